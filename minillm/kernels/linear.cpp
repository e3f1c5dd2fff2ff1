// y = x @ W.T on a CPU, for the rows of a decode batch: W is read from memory once, whatever the rows.
//
// Chapter 10. W lies in panels: WIDE outputs side by side, input after input, as the loop reads it. A tile is up to
// TALL rows of x by one panel, with its sums in registers: per input it loads WIDE weights and TALL numbers of x, for
// TALL x WIDE multiply-adds. A panel goes through in parts that stay in the second-level cache while tile after tile
// uses them, and a block of rows stays there while panel after panel does. An output is one sum, from the first input
// to the last, whatever the rows beside it or the threads.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vector.h"

namespace {

// Sums, weights and one number of x fit the registers (32 with AVX-512, else 16), and a multiply-add needs the fewest
// loads. On one Zen 4 core pair 32 rows of smollm2-135m took 45 ms with 1 x 12 vectors and 34 with 2 x 12; in 256
// bits 49 with 2 x 6 and 38 with 3 x 4.
constexpr int VECS = LANES == 16 ? 2 : 3;   // registers across a panel
constexpr int TALL = LANES == 16 ? 12 : 4;  // rows of a tile
constexpr int WIDE = VECS * LANES;          // outputs of a panel
constexpr int64_t PART = 768;               // inputs of a part: 96 KB of a panel
constexpr int64_t BLOCK = 120;              // rows of a block

// Adds x [ROWS, count] @ panel [count, WIDE] to y [ROWS, columns]; first: y is what nothing was added to yet.
template <int ROWS, class T>
void tile(const float* x, int64_t x_stride, const T* panel, int64_t count, float* y, int64_t y_stride, int columns,
          bool first) {
    vec sums[ROWS][VECS] = {};
    if (!first)
        for (int row = 0; row < ROWS; row++) std::memcpy(sums[row], y + row * y_stride, columns * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        vec weights[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) weights[v] = load(panel + i * WIDE + v * LANES);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sums[row][v] += x[row * x_stride + i] * weights[v];
    }
    for (int row = 0; row < ROWS; row++) std::memcpy(y + row * y_stride, sums[row], columns * sizeof(float));
}

// tile<rows>, for a number of rows that only the caller knows.
template <int ROWS = TALL, class T, class... Rest>
void tile_of(int64_t rows, const float* x, int64_t x_stride, const T* panel, Rest... rest) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of<ROWS - 1>(rows, x, x_stride, panel, rest...);
    }
    tile<ROWS>(x, x_stride, panel, rest...);
}

template <class T>
void multiply(int64_t rows, int64_t inputs, int64_t outputs, const float* x, const T* packed, float* y, int threads) {
    const int64_t panels = (outputs + WIDE - 1) / WIDE, blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t top = rows * block / blocks, height = rows * (block + 1) / blocks - top;
        const int64_t tiles = (height + TALL - 1) / TALL;
        const bool widen = !std::is_same_v<T, float> && tiles > 1;  // once for all tiles
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t p = 0; p < panels; p++) {
            float wide[std::is_same_v<T, float> ? 1 : PART * WIDE];
            const int columns = std::min<int64_t>(WIDE, outputs - p * WIDE);
            for (int64_t done = 0; done < inputs; done += PART) {
                const int64_t count = std::min(PART, inputs - done);
                const T* part = packed + (p * inputs + done) * WIDE;
                if (widen)
                    for (int64_t i = 0; i < count * WIDE; i += LANES) store(wide + i, load(part + i));
                for (int64_t t = 0; t < tiles; t++) {
                    const int64_t start = height * t / tiles, own = height * (t + 1) / tiles - start;  // of equal height
                    const float* from = x + (top + start) * inputs + done;
                    float* to = y + (top + start) * outputs + p * WIDE;
                    if (widen)
                        tile_of(own, from, inputs, wide, count, to, outputs, columns, done == 0);
                    else
                        tile_of(own, from, inputs, part, count, to, outputs, columns, done == 0);
                }
            }
        }
    }
}

}  // namespace

extern "C" int linear_wide() { return WIDE; }

// x [rows, inputs], y [rows, outputs] float32; packed [panels, inputs, WIDE], what is beyond the outputs unused.
extern "C" void linear(bool is_bfloat16, int64_t rows, int64_t inputs, int64_t outputs, const float* x,
                       const void* packed, float* y, int threads) {
    if (is_bfloat16)
        multiply(rows, inputs, outputs, x, static_cast<const bfloat16*>(packed), y, threads);
    else
        multiply(rows, inputs, outputs, x, static_cast<const float*>(packed), y, threads);
}
