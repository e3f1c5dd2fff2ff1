// A small matrix product whose sums stay in registers: what `linear.cpp` and `paged_prefill.cpp` are made of.
//
// The right side is a panel: WIDE columns side by side, row after row, as the loop reads it. Per row of the panel a
// tile loads WIDE numbers of it and up to TALL numbers of x, for TALL x WIDE multiply-adds.

#pragma once

#include "vector.h"

// Sums, weights and one number of x fit the registers (32 with AVX-512, else 16), and a multiply-add needs the fewest
// loads. On one Zen 4 core pair 32 rows of smollm2-135m took 45 ms with 1 x 12 vectors and 34 with 2 x 12; in 256
// bits 49 with 2 x 6 and 38 with 3 x 4.
constexpr int VECS = LANES == 16 ? 2 : 3;   // registers across a panel
constexpr int TALL = LANES == 16 ? 12 : 4;  // rows of a tile
constexpr int WIDE = VECS * LANES;          // columns of a panel

// Adds x [ROWS, count] @ panel [count, WIDE] to y [ROWS, columns]; first: y is what nothing was added to yet. An output
// is one sum, from the first number to the last, whatever ROWS is. Where x and the panel are pairs, each counts as one.
template <int ROWS, class X, class W>
void tile(const X* x, int64_t x_stride, const W* panel, int64_t count, float* y, int64_t y_stride, int columns,
          bool first) {
    vec sums[ROWS][VECS] = {};
    if (!first)
        for (int row = 0; row < ROWS; row++) std::memcpy(sums[row], y + row * y_stride, columns * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        decltype(load(panel)) weights[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) weights[v] = load(panel + i * WIDE + v * LANES);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sums[row][v] = plus(sums[row][v], x[row * x_stride + i], weights[v]);
    }
    for (int row = 0; row < ROWS; row++) std::memcpy(y + row * y_stride, sums[row], columns * sizeof(float));
}

// tile<rows>, for a number of rows that only the caller knows.
template <int ROWS = TALL, class X, class W, class... Rest>
void tile_of(int64_t rows, const X* x, int64_t x_stride, const W* panel, Rest... rest) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of<ROWS - 1>(rows, x, x_stride, panel, rest...);
    }
    tile<ROWS>(x, x_stride, panel, rest...);
}

// tile<TALL> and less, down all rows of x: in tiles of equal height.
template <class X, class W>
void tiles_of(int64_t rows, const X* x, int64_t x_stride, const W* panel, int64_t count, float* y, int64_t y_stride,
              int columns, bool first) {
    const int64_t tiles = (rows + TALL - 1) / TALL;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t start = rows * t / tiles, own = rows * (t + 1) / tiles - start;
        tile_of(own, x + start * x_stride, x_stride, panel, count, y + start * y_stride, y_stride, columns, first);
    }
}
