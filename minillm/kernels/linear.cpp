// y = x @ W.T on a CPU, for the rows of a decode batch: W is read from memory once, whatever the rows.
//
// Chapter 10. W lies in panels: WIDE outputs side by side, input after input, as the loop of `tile.h` reads it. A panel
// goes through in parts that stay in the second-level cache while tile after tile of rows uses them, and a block of
// rows stays there while panel after panel does. An output is one sum, from the first input to the last, whatever the
// rows beside it or the threads. Of few rows, threads take panels in turn; of many, rows.
//
// Of 16 bits, a processor may have an instruction that multiplies pairs. Then x is rounded to 16 bits, as torch has it
// from the start. Else W is widened as it is read.
//
// A gated MLP is two such products with silu(gate) x up between them: done panel by panel, while it is at hand.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "tile.h"

namespace {

constexpr int64_t PART = 768;   // inputs of a part: 96 KB of a panel
constexpr int64_t BLOCK = 120;  // rows of a block
constexpr int64_t OWN = 48;     // rows for each thread, from which on it takes them through a product by itself

// run(top, height, threads) for blocks of rows that cover them all, each of BLOCK at most. With many rows each thread
// has blocks of its own, so that threads share no numbers but W: two cores may be far apart. (When they shared the
// columns of each block, two that lie side by side took 208 ms for what two far apart took 275; now both take 200.)
template <class Run>
void by_blocks(int64_t rows, int threads, Run run) {
    const bool own = threads > 1 && rows >= OWN * threads;
    const int64_t each = own ? threads : 1, blocks = (rows + each * BLOCK - 1) / (each * BLOCK) * each;
    const auto block = [=](int64_t i, int share) {
        const int64_t top = rows * i / blocks;
        run(top, rows * (i + 1) / blocks - top, share);
    };
    if (own) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t i = 0; i < blocks; i++) block(i, 1);
    } else {  // outside of any parallel region: within one, even of one thread, others are started anew each time
        for (int64_t i = 0; i < blocks; i++) block(i, threads);
    }
}

// x [height, inputs] by one panel of W, whose first `columns` outputs go to y. X and W: float and float; float and
// bfloat16, which is widened; or pair and pair, each of two inputs.
template <class X, class W>
void panel_of(int64_t height, int64_t inputs, const X* x, const W* panel, float* y, int64_t y_stride, int columns) {
    constexpr bool widens = !std::is_same_v<X, W>;
    float wide[widens ? PART * WIDE : 1];
    for (int64_t done = 0; done < inputs; done += PART) {
        const int64_t count = std::min(PART, inputs - done);
        const W* part = panel + done * WIDE;
        if constexpr (widens)
            if (height > TALL) {  // once for all tiles
                for (int64_t i = 0; i < count * WIDE; i += LANES) store(wide + i, load(part + i));
                tiles_of(height, x + done, inputs, wide, count, y, y_stride, columns, done == 0);
                continue;
            }
        tiles_of(height, x + done, inputs, part, count, y, y_stride, columns, done == 0);
    }
}

// A block of rows by all of W.
template <class X, class W>
void multiply_block(int64_t height, int64_t inputs, int64_t outputs, const X* x, const W* packed, float* y,
                    int threads) {
    const int64_t panels = (outputs + WIDE - 1) / WIDE;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        panel_of(height, inputs, x, packed + p * inputs * WIDE, y + p * WIDE, outputs,
                 std::min<int64_t>(WIDE, outputs - p * WIDE));
}

inline vec silu(vec x) {  // x / (1 + e^-x), with no e^x above 1
    const vec e = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? x * e : x) / (1.0f + e);
}

// silu(gate x) * up x of a block of rows -> mixed [height, ffn]. gate_up: the panels of gate, then those of up, so that
// whoever has multiplied by one of each goes on with what it has at hand.
template <class X, class W>
void gate_block(int64_t height, int64_t inputs, int64_t ffn, const X* x, const W* gate_up, float* mixed, int threads) {
    const int64_t panels = (ffn + WIDE - 1) / WIDE;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t p = 0; p < panels; p++) {
        float gate[BLOCK * WIDE], up[BLOCK * WIDE];
        panel_of(height, inputs, x, gate_up + p * inputs * WIDE, gate, WIDE, WIDE);
        panel_of(height, inputs, x, gate_up + (panels + p) * inputs * WIDE, up, WIDE, WIDE);
        for (int64_t i = 0; i < height * WIDE; i += LANES) store(gate + i, silu(load(gate + i)) * load(up + i));
        const int64_t columns = std::min<int64_t>(WIDE, ffn - p * WIDE);
        for (int64_t row = 0; row < height; row++)
            std::memcpy(mixed + row * ffn + p * WIDE, gate + row * WIDE, columns * sizeof(float));
    }
}

#if defined(__AVX512BF16__)
// x [height, inputs], rounded -> [height, (inputs + 1) / 2]; of an odd number of inputs the last pair's second is 0.
const pair* narrowed(int64_t height, int64_t inputs, const float* x, int threads) {
    static thread_local std::vector<pair> narrow;
    const int64_t pairs = (inputs + 1) / 2;
    narrow.resize(std::max<size_t>(narrow.size(), height * pairs));
    pair* const to = narrow.data();
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < height; row++) {
        const float* from = x + row * inputs;
        for (int64_t i = 0; i < inputs / 2; i++) to[row * pairs + i] = {rounded(from[2 * i]), rounded(from[2 * i + 1])};
        if (inputs % 2) to[row * pairs + pairs - 1] = {rounded(from[inputs - 1]), {0}};
    }
    return to;
}

void multiply_block(int64_t height, int64_t inputs, int64_t outputs, const float* x, const bfloat16* packed, float* y,
                    int threads) {
    const pair* pairs = narrowed(height, inputs, x, threads);
    multiply_block(height, (inputs + 1) / 2, outputs, pairs, reinterpret_cast<const pair*>(packed), y, threads);
}

void gate_block(int64_t height, int64_t inputs, int64_t ffn, const float* x, const bfloat16* gate_up, float* mixed,
                int threads) {
    const pair* pairs = narrowed(height, inputs, x, threads);
    gate_block(height, (inputs + 1) / 2, ffn, pairs, reinterpret_cast<const pair*>(gate_up), mixed, threads);
}
#endif

template <class W>
void multiply(int64_t rows, int64_t inputs, int64_t outputs, const float* x, const W* packed, float* y, int threads) {
    by_blocks(rows, threads, [=](int64_t top, int64_t height, int share) {
        multiply_block(height, inputs, outputs, x + top * inputs, packed, y + top * outputs, share);
    });
}

template <class W>
void gated_mlp(int64_t rows, int64_t hidden, int64_t ffn, const float* x, const W* gate_up, const W* down, float* y,
               int threads) {
    by_blocks(rows, threads, [=](int64_t top, int64_t height, int share) {
        static thread_local std::vector<float> mixed;  // kept from call to call: new memory is slow the first time
        mixed.resize(std::max<size_t>(mixed.size(), height * ffn));
        gate_block(height, hidden, ffn, x + top * hidden, gate_up, mixed.data(), share);
        multiply_block(height, ffn, hidden, mixed.data(), down, y + top * hidden, share);
    });
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

// x, y [rows, hidden] float32. In panels, as `packed` above: gate [ffn, hidden], up [ffn, hidden], down [hidden, ffn].
extern "C" void mlp(bool is_bfloat16, int64_t rows, int64_t hidden, int64_t ffn, const float* x, const void* gate_up,
                    const void* down, float* y, int threads) {
    if (is_bfloat16)
        gated_mlp(rows, hidden, ffn, x, static_cast<const bfloat16*>(gate_up), static_cast<const bfloat16*>(down), y,
                  threads);
    else
        gated_mlp(rows, hidden, ffn, x, static_cast<const float*>(gate_up), static_cast<const float*>(down), y,
                  threads);
}
