// y = x @ W.T on a CPU, for the rows of a decode batch: W is read from memory once, whatever the rows.
//
// Chapter 10. W lies in panels: WIDE outputs side by side, input after input, as the loop of `tile.h` reads it. A panel
// goes through in parts that stay in the second-level cache while tile after tile of rows uses them, and a block of
// rows stays there while panel after panel does. An output is one sum, from the first input to the last, whatever the
// rows beside it or the threads.
//
// Of 16 bits, a processor may have an instruction that multiplies pairs. Then x is rounded to 16 bits, as torch has it
// from the start. Else W is widened as it is read.
//
// A gated MLP is two such products with silu(gate) x up between them. Here a block of rows goes through all three
// while what is between them is still in a cache.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "tile.h"

namespace {

constexpr int64_t PART = 768;   // inputs of a part: 96 KB of a panel
constexpr int64_t BLOCK = 120;  // rows of a block

// X and W: float and float; float and bfloat16, which is widened; or pair and pair, each of two inputs.
template <class X, class W>
void multiply(int64_t rows, int64_t inputs, int64_t outputs, const X* x, const W* packed, float* y, int threads) {
    constexpr bool widens = !std::is_same_v<X, W>;
    const int64_t panels = (outputs + WIDE - 1) / WIDE, blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t top = rows * block / blocks, height = rows * (block + 1) / blocks - top;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t p = 0; p < panels; p++) {
            float wide[widens ? PART * WIDE : 1];
            const int columns = std::min<int64_t>(WIDE, outputs - p * WIDE);
            for (int64_t done = 0; done < inputs; done += PART) {
                const int64_t count = std::min(PART, inputs - done);
                const W* part = packed + (p * inputs + done) * WIDE;
                const X* from = x + top * inputs + done;
                float* to = y + top * outputs + p * WIDE;
                if constexpr (widens)
                    if (height > TALL) {  // once for all tiles
                        for (int64_t i = 0; i < count * WIDE; i += LANES) store(wide + i, load(part + i));
                        tiles_of(height, from, inputs, wide, count, to, outputs, columns, done == 0);
                        continue;
                    }
                tiles_of(height, from, inputs, part, count, to, outputs, columns, done == 0);
            }
        }
    }
}

#if defined(__AVX512BF16__)
// x is rounded to pairs first. packed: [panels, pairs of inputs, WIDE]; of an odd number of inputs the last is 0.
void multiply(int64_t rows, int64_t inputs, int64_t outputs, const float* x, const bfloat16* packed, float* y,
              int threads) {
    static thread_local std::vector<pair> narrow;
    const int64_t pairs = (inputs + 1) / 2;
    narrow.resize(std::max<size_t>(narrow.size(), rows * pairs));
    pair* const to = narrow.data();
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * inputs;
        for (int64_t i = 0; i < inputs / 2; i++) to[row * pairs + i] = {rounded(from[2 * i]), rounded(from[2 * i + 1])};
        if (inputs % 2) to[row * pairs + pairs - 1] = {rounded(from[inputs - 1]), {0}};
    }
    multiply(rows, pairs, outputs, to, reinterpret_cast<const pair*>(packed), y, threads);
}
#endif

inline vec silu(vec x) {  // x / (1 + e^-x), with no e^x above 1
    const vec e = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? x * e : x) / (1.0f + e);
}

// x, y [rows, hidden]; gate_up [2 ffn, hidden], down [hidden, ffn], each in its panels.
template <class T>
void gated_mlp(int64_t rows, int64_t hidden, int64_t ffn, const float* x, const T* gate_up, const T* down, float* y,
               int threads) {
    static thread_local std::vector<float> between;  // kept from call to call: new memory is slow the first time
    const int64_t most = std::min(rows, BLOCK);
    between.resize(std::max<size_t>(between.size(), most * 3 * ffn));
    float *both = between.data(), *mixed = both + most * 2 * ffn;  // [rows, 2 ffn], [rows, ffn]
    for (int64_t top = 0; top < rows; top += most) {
        const int64_t height = std::min(most, rows - top);
        multiply(height, hidden, 2 * ffn, x + top * hidden, gate_up, both, threads);
#pragma omp parallel for num_threads(threads)
        for (int64_t row = 0; row < height; row++)
            for (int64_t i = 0; i < ffn; i += LANES) {
                const float *gate = both + row * 2 * ffn + i, *up = gate + ffn;
                const int64_t count = std::min<int64_t>(LANES, ffn - i);
                const vec product = count == LANES ? silu(load(gate)) * load(up) : silu(load(gate, count)) * load(up, count);
                std::memcpy(mixed + row * ffn + i, &product, count * sizeof(float));
            }
        multiply(height, ffn, hidden, mixed, down, y + top * hidden, threads);
    }
}

}  // namespace

extern "C" int linear_wide() { return WIDE; }

extern "C" bool linear_pairs() { return PAIRS; }

// x [rows, inputs], y [rows, outputs] float32; packed [panels, inputs, WIDE], what is beyond the outputs unused. With
// linear_pairs, that of bfloat16 is [panels, (inputs + 1) / 2, WIDE, 2].
extern "C" void linear(bool is_bfloat16, int64_t rows, int64_t inputs, int64_t outputs, const float* x,
                       const void* packed, float* y, int threads) {
    if (is_bfloat16)
        multiply(rows, inputs, outputs, x, static_cast<const bfloat16*>(packed), y, threads);
    else
        multiply(rows, inputs, outputs, x, static_cast<const float*>(packed), y, threads);
}

// x, y [rows, hidden] float32; gate_up [2 ffn, hidden] and down [hidden, ffn] in panels, as `packed` above.
extern "C" void mlp(bool is_bfloat16, int64_t rows, int64_t hidden, int64_t ffn, const float* x, const void* gate_up,
                    const void* down, float* y, int threads) {
    if (is_bfloat16)
        gated_mlp(rows, hidden, ffn, x, static_cast<const bfloat16*>(gate_up), static_cast<const bfloat16*>(down), y,
                  threads);
    else
        gated_mlp(rows, hidden, ffn, x, static_cast<const float*>(gate_up), static_cast<const float*>(down), y,
                  threads);
}
