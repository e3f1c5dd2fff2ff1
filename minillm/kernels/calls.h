// What the kernels of a CPU offer to Python (`cpp.py`), and to each other.

#pragma once

#include <cstdint>

extern "C" {

int linear_wide();

bool linear_pairs();

void linear(bool is_bfloat16, int64_t rows, int64_t inputs, int64_t outputs, const float* x, const void* packed,
            float* y, int threads);

void mlp(bool is_bfloat16, int64_t rows, int64_t hidden, int64_t ffn, const float* x, const void* gate_up,
         const void* down, float* y, int threads);

void paged_decode(bool is_bfloat16, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
                  int64_t max_blocks, int64_t window, float scale, float softcap, const float* q, int64_t q_stride,
                  const void* keys, const void* values, const int64_t* tables, const int64_t* places,
                  const int64_t* requests, const int64_t* lengths, float* out, int threads);

void paged_prefill(bool is_bfloat16, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
                   int64_t max_blocks, int64_t window, float scale, float softcap, const float* q, int64_t q_stride,
                   const void* keys, const void* values, const int64_t* tables, const int64_t* stretches, float* out,
                   int threads);

}  // extern "C"
