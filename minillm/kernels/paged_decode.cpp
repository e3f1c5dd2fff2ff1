// Paged attention for decode steps on a CPU: K and V are read where they lie, a block at a time.
//
// Chapter 09. A task is one query row and one KV head: it walks the row's block table with the online softmax of
// FlashAttention. Bytes: each K and V that a row sees, once; FLOPs: 4 x heads x length x dim a row. Row by row there
// is nothing to pad, so unequal lengths cost nothing. The order of every sum is fixed, whatever the threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

struct bfloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(bfloat16 x) {  // its bits are the upper half of a float32's
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

struct Shape {
    int64_t rows, heads, kv_heads, dim, block_size, max_blocks, window;  // window 0: none
    float scale, softcap;                                                // softcap 0: none
};

// DIM: the head dimension, known to the compiler, so that its loops unroll; 0: shape.dim.
template <class T, int64_t DIM>
void attend(const Shape& shape, const float* q, const T* keys, const T* values, const int64_t* tables,
            const int64_t* requests, const int64_t* lengths, float* out, int threads) {
    const int64_t dim = DIM ? DIM : shape.dim, group = shape.heads / shape.kv_heads, size = shape.block_size;
    const int64_t stride = shape.kv_heads * dim;  // from one slot to the next

#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < shape.rows * shape.kv_heads; task++) {
        const int64_t row = task / shape.kv_heads, kv_head = task % shape.kv_heads, length = lengths[row];
        const int64_t* table = tables + requests[row] * shape.max_blocks;
        const float* query = q + (row * shape.heads + kv_head * group) * dim;
        float* result = out + (row * shape.heads + kv_head * group) * dim;
        std::vector<float> top(group, -std::numeric_limits<float>::infinity()), sum(group, 0.0f);
        std::vector<float> weights(size), mixed(group * dim, 0.0f);

        int64_t place = shape.window ? std::max<int64_t>(0, length - shape.window) : 0;
        while (place < length) {
            const int64_t slot = place % size, count = std::min(size - slot, length - place);
            const int64_t first = (table[place / size] * size + slot) * stride + kv_head * dim;
            for (int64_t head = 0; head < group; head++) {
                const float* own = query + head * dim;
                float highest = top[head];
                for (int64_t i = 0; i < count; i++) {
                    const T* key = keys + first + i * stride;
                    float score = 0.0f;
#pragma omp simd reduction(+ : score)
                    for (int64_t d = 0; d < dim; d++) score += own[d] * wide(key[d]);
                    score *= shape.scale;
                    if (shape.softcap > 0) score = shape.softcap * std::tanh(score / shape.softcap);
                    weights[i] = score;
                    highest = std::max(highest, score);
                }
                const float shrink = std::exp(top[head] - highest);  // what was summed so far had another maximum
                float total = sum[head] * shrink;
#pragma omp simd reduction(+ : total)
                for (int64_t i = 0; i < count; i++) {
                    weights[i] = std::exp(weights[i] - highest);
                    total += weights[i];
                }
                float* mix = mixed.data() + head * dim;
                if (DIM) {  // small enough to be held in registers
                    float held[DIM ? DIM : 1];
                    for (int64_t d = 0; d < DIM; d++) held[d] = mix[d] * shrink;
                    for (int64_t i = 0; i < count; i++) {
                        const T* value = values + first + i * stride;
                        for (int64_t d = 0; d < DIM; d++) held[d] += weights[i] * wide(value[d]);
                    }
                    for (int64_t d = 0; d < DIM; d++) mix[d] = held[d];
                } else {
                    for (int64_t d = 0; d < dim; d++) mix[d] *= shrink;
                    for (int64_t i = 0; i < count; i++) {
                        const T* value = values + first + i * stride;
                        for (int64_t d = 0; d < dim; d++) mix[d] += weights[i] * wide(value[d]);
                    }
                }
                top[head] = highest, sum[head] = total;
            }
            place += count;
        }
        for (int64_t head = 0; head < group; head++)
            for (int64_t d = 0; d < dim; d++)
                result[head * dim + d] = length ? mixed[head * dim + d] / sum[head] : 0.0f;
    }
}

template <class T>
void by_dim(const Shape& shape, const float* q, const void* keys, const void* values, const int64_t* tables,
            const int64_t* requests, const int64_t* lengths, float* out, int threads) {
    const auto chosen = shape.dim == 32 ? attend<T, 32> : shape.dim == 64 ? attend<T, 64>
                        : shape.dim == 128 ? attend<T, 128> : attend<T, 0>;
    chosen(shape, q, static_cast<const T*>(keys), static_cast<const T*>(values), tables, requests, lengths, out,
           threads);
}

}  // namespace

// q, out [rows, heads, dim] float32; keys, values [blocks, block_size, kv_heads, dim]; tables [requests, max_blocks];
// requests, lengths [rows]: whose table a row reads, and how many tokens of it.
extern "C" void paged_decode(bool is_bfloat16, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                             int64_t block_size, int64_t max_blocks, int64_t window, float scale, float softcap,
                             const float* q, const void* keys, const void* values, const int64_t* tables,
                             const int64_t* requests, const int64_t* lengths, float* out, int threads) {
    const Shape shape{rows, heads, kv_heads, dim, block_size, max_blocks, window, scale, softcap};
    (is_bfloat16 ? by_dim<bfloat16> : by_dim<float>)(shape, q, keys, values, tables, requests, lengths, out, threads);
}
