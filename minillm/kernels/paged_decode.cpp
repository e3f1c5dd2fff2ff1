// Paged attention for decode steps on a CPU: K and V are read where they lie, a block at a time.
//
// Chapter 09. A task is one query row, or one KV head of it: it walks the row's block table with the online softmax of
// FlashAttention. Bytes: each K and V that a row sees, once; FLOPs: 4 x heads x length x dim a row. Row by row there
// is nothing to pad, so unequal lengths cost nothing. The order of every sum is fixed, whatever the threads.
//
// Blocks lie anywhere in memory, so a processor cannot guess the next one. The table says where it is: it is asked for
// while this one is attended. That took 24 rows of 100 to 250 tokens from 15 ms to 9, 21 GB/s (30 layers, one Zen 4).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "calls.h"
#include "vector.h"

namespace {

constexpr int64_t LINE = 64;  // bytes that come from memory at once

struct Shape {
    int64_t rows, heads, kv_heads, dim, block_size, max_blocks, window;  // window 0: none
    float scale, softcap;                                                // softcap 0: none
    int64_t q_stride;                                                    // from one token to the next
};

// DIM: the head dimension, known to the compiler, so that its loops unroll and a head is held in registers; 0:
// shape.dim.
template <class T, int64_t DIM>
void attend(const Shape& shape, const float* q, const T* keys, const T* values, const int64_t* tables,
            const int64_t* places, const int64_t* requests, const int64_t* lengths, float* out, int threads) {
    const int64_t dim = DIM ? DIM : shape.dim, vecs = (dim + LANES - 1) / LANES;
    const int64_t group = shape.heads / shape.kv_heads, size = shape.block_size;
    const int64_t stride = shape.kv_heads * dim;  // from one slot to the next
    const auto part = [dim](const auto* head, int64_t j) {  // its j-th register
        const auto* from = head + j * LANES;
        return DIM && DIM % LANES == 0 ? load(from) : load(from, std::min<int64_t>(LANES, dim - j * LANES));
    };
    // A block is read from end to end by a task that has all heads; rows may be too few for that.
    const int64_t together = shape.rows >= 4 * threads ? shape.kv_heads : 1, tasks = shape.kv_heads / together;
    const int64_t heads = together * group;  // of a task

#pragma omp parallel num_threads(threads)
    {
        std::vector<float> top(heads), sum(heads), weights(size + LANES);
        std::vector<vec> queries(heads * vecs), mixed(heads * vecs);

#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < shape.rows * tasks; task++) {
            const int64_t row = task / tasks, kv_head = task % tasks * together, length = lengths[row];
            const int64_t* table = tables + requests[row] * shape.max_blocks;
            const int64_t token = places ? places[row] : row;
            const float* own = q + token * shape.q_stride + kv_head * group * dim;
            float* to = out + (token * shape.heads + kv_head * group) * dim;
            for (int64_t head = 0; head < heads; head++) {
                top[head] = -std::numeric_limits<float>::infinity(), sum[head] = 0.0f;
                for (int64_t j = 0; j < vecs; j++) {
                    queries[head * vecs + j] = part(own + head * dim, j) * shape.scale;
                    mixed[head * vecs + j] = vec{};
                }
            }

            int64_t place = shape.window ? std::max<int64_t>(0, length - shape.window) : 0;
            while (place < length) {
                const int64_t slot = place % size, count = std::min(size - slot, length - place);
                const int64_t first = (table[place / size] * size + slot) * stride + kv_head * dim;
                const int64_t next = place + count < length ? (table[place / size + 1] * size) * stride : -1;
                for (int64_t head = 0; head < heads; head++) {
                    const int64_t fetched = next < 0 ? 0 : size * (head + 1) / heads;  // this head's share of its slots
                    for (int64_t i = size * head / heads; i < fetched; i++)
                        for (int64_t d = 0; d < together * dim; d += LINE / sizeof(T)) {
                            __builtin_prefetch(keys + next + i * stride + kv_head * dim + d, 0, 2);
                            __builtin_prefetch(values + next + i * stride + kv_head * dim + d, 0, 2);
                        }
                    const vec* query = &queries[head * vecs];
                    const T* first_key = keys + first + head / group * dim;
                    const T* first_value = values + first + head / group * dim;
                    float highest = top[head];
                    for (int64_t i = 0; i < count; i++) {
                        const T* key = first_key + i * stride;
                        vec even{}, odd{};  // two sums, for one would wait for itself
                        for (int64_t j = 0; j + 1 < vecs; j += 2) {
                            even += query[j] * part(key, j);
                            odd += query[j + 1] * part(key, j + 1);
                        }
                        if (vecs % 2) even += query[vecs - 1] * part(key, vecs - 1);
                        float score = sum_of(even + odd);
                        if (shape.softcap > 0) score = shape.softcap * std::tanh(score / shape.softcap);
                        weights[i] = score;
                        highest = std::max(highest, score);
                    }
                    const float shrink = std::exp(top[head] - highest);  // what was summed had another maximum
                    vec total{};
                    for (int64_t i = 0; i < count; i += LANES) {
                        vec e = exp_of(load(&weights[i]) - highest);
                        for (int64_t lane = count - i; lane < LANES; lane++) e[lane] = 0.0f;  // beyond the block
                        store(&weights[i], e);
                        total += e;
                    }
                    top[head] = highest, sum[head] = sum[head] * shrink + sum_of(total);

                    vec* mix = &mixed[head * vecs];
                    vec held[DIM ? (DIM + LANES - 1) / LANES : 1];
                    vec* const now = DIM ? held : mix;
                    for (int64_t j = 0; j < vecs; j++) now[j] = mix[j] * shrink;
                    for (int64_t i = 0; i < count; i++) {
                        const T* value = first_value + i * stride;
                        for (int64_t j = 0; j < vecs; j++) now[j] += weights[i] * part(value, j);
                    }
                    for (int64_t j = 0; j < vecs; j++) mix[j] = now[j];
                }
                place += count;
            }
            for (int64_t head = 0; head < heads; head++)
                for (int64_t d = 0; d < dim; d++)
                    to[head * dim + d] = length ? mixed[head * vecs + d / LANES][d % LANES] / sum[head] : 0.0f;
        }
    }
}

template <class T>
void by_dim(const Shape& shape, const float* q, const void* keys, const void* values, const int64_t* tables,
            const int64_t* places, const int64_t* requests, const int64_t* lengths, float* out, int threads) {
    const auto chosen = shape.dim == 32 ? attend<T, 32> : shape.dim == 64 ? attend<T, 64>
                        : shape.dim == 128 ? attend<T, 128> : attend<T, 0>;
    chosen(shape, q, static_cast<const T*>(keys), static_cast<const T*>(values), tables, places, requests, lengths,
           out, threads);
}

}  // namespace

// q, out [tokens, heads, dim] float32, q_stride numbers from one token of q to the next; keys, values [blocks,
// block_size, kv_heads, dim]; tables [requests, max_blocks]; places, requests, lengths [rows]: which token a row is (no
// places: the first is the first), whose table it reads, and how many tokens of it.
extern "C" void paged_decode(bool is_bfloat16, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                             int64_t block_size, int64_t max_blocks, int64_t window, float scale, float softcap,
                             const float* q, int64_t q_stride, const void* keys, const void* values,
                             const int64_t* tables, const int64_t* places, const int64_t* requests,
                             const int64_t* lengths, float* out, int threads) {
    const Shape shape{rows, heads, kv_heads, dim, block_size, max_blocks, window, scale, softcap, q_stride};
    const auto run = is_bfloat16 ? by_dim<bfloat16> : by_dim<float>;
    run(shape, q, keys, values, tables, places, requests, lengths, out, threads);
}

// Rows of `bytes` each, from [rows] that lie k_stride and v_stride bytes apart, to their slots of keys and values; a
// slot below 0 is nobody's.
extern "C" void paged_store(int64_t rows, int64_t bytes, const char* k, int64_t k_stride, const char* v,
                            int64_t v_stride, char* keys, char* values, const int64_t* slots) {
    for (int64_t row = 0; row < rows; row++) {
        if (slots[row] < 0) continue;
        std::memcpy(keys + slots[row] * bytes, k + row * k_stride, bytes);
        std::memcpy(values + slots[row] * bytes, v + row * v_stride, bytes);
    }
}
