// Paged attention for prompts on a CPU: stretches of query tokens, each over the blocks of its own request.
//
// Chapter 09. FlashAttention's loop (Dao et al. 2022, arXiv:2205.14135): a task is a few query tokens under one KV
// head; KEYS keys at a time are copied out of their blocks, scores and their mix of values are two small products
// (`tile.h`), and no score leaves the second-level cache. FLOPs: 4 x heads x dim for each key that a token sees.
//
// Keys are taken in the same groups whatever the stretch, and a key that a row does not see adds an exact 0 to it. So
// a row has the same bits in a whole prompt and in any chunk of it, beside any other rows and with any threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "calls.h"
#include "tile.h"

namespace {

constexpr int64_t KEYS = 96;  // of a group; a multiple of WIDE, whatever the processor
static_assert(KEYS % WIDE == 0 && KEYS % LANES == 0);
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct Shape {
    int64_t heads, kv_heads, dim, block_size, max_blocks, window;  // window 0: none
    float scale, softcap;                                          // softcap 0: none
};

struct Task {
    int64_t row, count, request, before, kv_head;  // its first query row, how many, and the tokens before the first
};

// Room for one task, used again for the next. Rows are query tokens by the heads that share the KV head.
struct Room {
    std::vector<float> queries, scores, mixed, keys, values, top, sum;

    Room(int64_t rows, int64_t dim)
        : queries(rows * dim), scores(rows * KEYS), mixed(rows * dim), keys(KEYS * dim),
          values(KEYS * ((dim + WIDE - 1) / WIDE * WIDE)), top(rows), sum(rows) {}
};

template <class T>
void attend(const Shape& shape, const Task& task, const float* q, int64_t q_stride, const T* keys, const T* values,
            const int64_t* tables, float* out, Room& room) {
    const int64_t dim = shape.dim, group = shape.heads / shape.kv_heads, rows = task.count * group;
    const int64_t* table = tables + task.request * shape.max_blocks;
    const auto slot = [&](int64_t place) {
        return ((table[place / shape.block_size] * shape.block_size + place % shape.block_size) * shape.kv_heads +
                task.kv_head) * dim;
    };
    for (int64_t row = 0; row < rows; row++) {
        const float* from = q + (task.row + row / group) * q_stride + (task.kv_head * group + row % group) * dim;
        for (int64_t d = 0; d < dim; d++) room.queries[row * dim + d] = from[d] * shape.scale;
    }
    std::fill_n(room.mixed.begin(), rows * dim, 0.0f);
    std::fill_n(room.top.begin(), rows, NONE);
    std::fill_n(room.sum.begin(), rows, 0.0f);

    const auto oldest = [&](int64_t sees) { return shape.window ? std::max<int64_t>(0, sees - shape.window) : 0; };
    const int64_t end = task.before + task.count;  // no row of the task sees more
    for (int64_t start = oldest(task.before + 1) / KEYS * KEYS; start < end; start += KEYS) {
        const int64_t count = std::min(KEYS, end - start), panels = (count + WIDE - 1) / WIDE;
        for (int64_t i = 0; i < panels * WIDE; i++) {  // into panels: [panel, dim, WIDE] and [panel, KEYS, WIDE]
            float* to = &room.keys[i / WIDE * dim * WIDE + i % WIDE];
            const int64_t from = i < count ? slot(start + i) : 0;
            for (int64_t d = 0; d < dim; d++) to[d * WIDE] = i < count ? number(keys[from + d]) : 0.0f;
            for (int64_t d = 0; i < count && d < dim; d++)
                room.values[(d / WIDE * KEYS + i) * WIDE + d % WIDE] = number(values[from + d]);
        }
        for (int64_t p = 0; p < panels; p++)
            tiles_of(rows, room.queries.data(), dim, &room.keys[p * dim * WIDE], dim, &room.scores[p * WIDE], KEYS,
                     WIDE, true);

        for (int64_t row = 0; row < rows; row++) {
            const int64_t sees = task.before + row / group + 1;
            const int64_t first = std::max<int64_t>(0, oldest(sees) - start), last = std::min(count, sees - start);
            float* scores = &room.scores[row * KEYS];
            if (first >= last) {  // it sees none of these keys
                std::fill_n(scores, count, 0.0f);
                continue;
            }
            if (shape.softcap > 0)
                for (int64_t i = first; i < last; i++)
                    scores[i] = shape.softcap * std::tanh(scores[i] / shape.softcap);
            std::fill_n(scores, first, NONE);
            std::fill(scores + last, scores + (last + LANES - 1) / LANES * LANES, NONE);
            vec highest = vec{} + room.top[row];
            for (int64_t i = 0; i < last; i += LANES) {
                const vec s = load(scores + i);
                highest = s > highest ? s : highest;
            }
            float highest_of = highest[0];
            for (int lane = 1; lane < LANES; lane++) highest_of = std::max(highest_of, highest[lane]);
            vec total{};
            for (int64_t i = 0; i < last; i += LANES) {
                const vec e = exp_of(load(scores + i) - highest_of);
                store(scores + i, e);
                total += e;
            }
            std::fill(scores + last, scores + count, 0.0f);
            const float shrink = std::exp(room.top[row] - highest_of);  // what was summed had another maximum
            room.top[row] = highest_of, room.sum[row] = room.sum[row] * shrink + sum_of(total);
            for (int64_t d = 0; d < dim; d++) room.mixed[row * dim + d] *= shrink;
        }
        for (int64_t d = 0; d < dim; d += WIDE)
            tiles_of(rows, room.scores.data(), KEYS, &room.values[d * KEYS], count, &room.mixed[d], dim,
                     std::min<int64_t>(WIDE, dim - d), false);
    }
    for (int64_t row = 0; row < rows; row++) {
        float* to = out + ((task.row + row / group) * shape.heads + task.kv_head * group + row % group) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = room.mixed[row * dim + d] / room.sum[row];
    }
}

}  // namespace

// q [tokens, heads, dim] float32, q_stride numbers from one token to the next; keys, values [blocks, block_size,
// kv_heads, dim]; tables [requests, max_blocks]; stretches [n, 4]: first row of q, rows, request, tokens of it before
// them; out [tokens, heads, dim], whose other rows are left alone.
extern "C" void paged_prefill(bool is_bfloat16, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim,
                              int64_t block_size, int64_t max_blocks, int64_t window, float scale, float softcap,
                              const float* q, int64_t q_stride, const void* keys, const void* values,
                              const int64_t* tables, const int64_t* stretches, float* out, int threads) {
    const Shape shape{heads, kv_heads, dim, block_size, max_blocks, window, scale, softcap};
    const int64_t group = heads / kv_heads, tall = std::max<int64_t>(1, KEYS / group);  // query tokens of a task
    std::vector<Task> tasks;
    for (const int64_t* s = stretches; s < stretches + 4 * n; s += 4)
        for (int64_t i = 0; i < s[1]; i += tall)
            for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
                tasks.push_back({s[0] + i, std::min(tall, s[1] - i), s[2], s[3] + i, kv_head});
#pragma omp parallel num_threads(threads)
    {
        Room room(tall * group, dim);
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < (int64_t)tasks.size(); t++) {
            if (is_bfloat16)
                attend(shape, tasks[t], q, q_stride, static_cast<const bfloat16*>(keys),
                       static_cast<const bfloat16*>(values), tables, out, room);
            else
                attend(shape, tasks[t], q, q_stride, static_cast<const float*>(keys),
                       static_cast<const float*>(values), tables, out, room);
        }
    }
}
