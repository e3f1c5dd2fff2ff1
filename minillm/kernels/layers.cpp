// All layers of a decoder in one call: what `linear.cpp`, `paged_decode.cpp` and `paged_prefill.cpp` do, one after
// another, and the little between them: norms, residuals, RoPE, and K and V written to their slots.
//
// Chapter 10. A compiled step of 30 layers comes back to Python 90 times. Each is a few microseconds of work, and far
// more than that in practice: in between, megabytes of weights sweep what Python needs out of the processor's caches.
// In one call nothing but the loops has to come back. Numbers between the layers are float32, whatever the weights are.

#include <cmath>

#include "calls.h"
#include "vector.h"

namespace {

// Tensors of a layer. Norms and bias [hidden], [dim] or [outputs] float32; products in their panels.
struct Layer {
    const float *norm, *q_norm, *k_norm, *qkv_bias;  // of these, null: there is none
    const void *qkv, *out;
    const float* mlp_norm;
    const void *gate_up, *down;
    int64_t window;  // 0: none
};

}  // namespace

struct DecoderShape {
    int64_t layers, hidden, heads, kv_heads, dim, ffn;
    float eps, scale, softcap;  // softcap 0: none
    bool is_bfloat16;           // the products' weights, and K and V
};

// x [tokens, hidden] comes in and goes out; cos, sin [tokens, dim], of `rope.py`. keys, values [layers, blocks,
// block_size, kv_heads, dim]; slots [tokens]; tables [requests, max_blocks]. Each token is one of `rows`, whose places,
// requests and lengths are [rows], or in one of n `stretches` [n, 4].
struct DecoderStep {
    int64_t tokens, blocks, block_size, max_blocks, rows, n;
    float* x;
    const float *cos, *sin;
    char *keys, *values;
    const int64_t *slots, *tables, *places, *requests, *lengths, *stretches;
    float *normed, *qkv, *attended;  // room: [tokens, hidden], [tokens, heads + 2 kv_heads, dim], [tokens, heads, dim]
};

namespace {

// y = x / rms(x) * weight, of one row; y may be x.
void rms_norm(int64_t size, const float* x, const float* weight, float eps, float* y) {
    vec squares{};
    for (int64_t i = 0; i < size; i += LANES) {
        const vec part = size - i >= LANES ? load(x + i) : load(x + i, size - i);
        squares += part * part;
    }
    const float factor = 1.0f / std::sqrt(sum_of(squares) / size + eps);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

// x = x * cos + (x with its halves swapped) * sin, of one head.
void rotate(int64_t dim, float* x, const float* cos, const float* sin) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cos[i] + high * sin[i];
        x[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

inline void keep(float x, float* to) { *to = x; }

inline void keep(float x, bfloat16* to) { *to = rounded(x); }

// A token's q, k and v [heads + 2 kv_heads, dim] as attention wants them; its K and V to their slot.
template <class T>
void settle(const DecoderShape& shape, const Layer& layer, float* qkv, const float* cos, const float* sin, T* key,
            T* value) {
    const int64_t dim = shape.dim, turned = shape.heads + shape.kv_heads, kept = shape.kv_heads * dim;
    if (layer.qkv_bias)
        for (int64_t i = 0; i < (turned + shape.kv_heads) * dim; i++) qkv[i] += layer.qkv_bias[i];
    for (int64_t head = 0; head < turned; head++) {
        const float* norm = head < shape.heads ? layer.q_norm : layer.k_norm;
        if (norm) rms_norm(dim, qkv + head * dim, norm, shape.eps, qkv + head * dim);
        rotate(dim, qkv + head * dim, cos, sin);
    }
    for (int64_t i = 0; i < kept; i++) {
        keep(qkv[shape.heads * dim + i], key + i);
        keep(qkv[turned * dim + i], value + i);
    }
}

template <class T>
void run(const DecoderShape& shape, const Layer* layers, const DecoderStep& step, int threads) {
    const int64_t hidden = shape.hidden, dim = shape.dim, kept = shape.kv_heads * dim;
    const int64_t width = (shape.heads + 2 * shape.kv_heads) * dim, pool = step.blocks * step.block_size * kept;
    const bool narrow = shape.is_bfloat16;
    // Adds `normed`, what a branch gave, to x, and norms that for the next branch.
    const auto between = [&](const float* weight, bool first) {
#pragma omp parallel for num_threads(threads)
        for (int64_t token = 0; token < step.tokens; token++) {
            float *x = step.x + token * hidden, *normed = step.normed + token * hidden;
            if (!first)
                for (int64_t i = 0; i < hidden; i++) x[i] += normed[i];
            if (weight) rms_norm(hidden, x, weight, shape.eps, normed);
        }
    };
    for (int64_t l = 0; l < shape.layers; l++) {
        const Layer& layer = layers[l];
        T *keys = reinterpret_cast<T*>(step.keys) + l * pool, *values = reinterpret_cast<T*>(step.values) + l * pool;
        between(layer.norm, l == 0);
        linear(narrow, step.tokens, hidden, width, step.normed, layer.qkv, step.qkv, threads);
#pragma omp parallel for num_threads(threads)
        for (int64_t token = 0; token < step.tokens; token++)
            settle(shape, layer, step.qkv + token * width, step.cos + token * dim, step.sin + token * dim,
                   keys + step.slots[token] * kept, values + step.slots[token] * kept);
        if (step.rows)
            paged_decode(narrow, step.rows, shape.heads, shape.kv_heads, dim, step.block_size, step.max_blocks,
                         layer.window, shape.scale, shape.softcap, step.qkv, width, keys, values, step.tables,
                         step.places, step.requests, step.lengths, step.attended, threads);
        if (step.n)
            paged_prefill(narrow, step.n, shape.heads, shape.kv_heads, dim, step.block_size, step.max_blocks,
                          layer.window, shape.scale, shape.softcap, step.qkv, width, keys, values, step.tables,
                          step.stretches, step.attended, threads);
        linear(narrow, step.tokens, shape.heads * dim, hidden, step.attended, layer.out, step.normed, threads);
        between(layer.mlp_norm, false);
        mlp(narrow, step.tokens, hidden, shape.ffn, step.normed, layer.gate_up, layer.down, step.normed, threads);
    }
    between(nullptr, false);
}

}  // namespace

extern "C" void decoder_layers(const DecoderShape* shape, const void* layers, const DecoderStep* step, int threads) {
    (shape->is_bfloat16 ? run<bfloat16> : run<float>)(*shape, static_cast<const Layer*>(layers), *step, threads);
}
