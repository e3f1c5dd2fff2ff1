// A vector register of floats, in the notation that GCC and Clang share: + - * work lane by lane.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));

struct bfloat16 {
    uint16_t bits;
};

inline float number(float x) { return x; }

inline float number(bfloat16 x) {  // its bits are the upper half of a float32's
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

inline bfloat16 rounded(float x) {  // to the nearest, and of two to the even one
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return {uint16_t(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0)};
}

inline vec load(const float* from) {
    vec v;
    std::memcpy(&v, from, sizeof v);  // one instruction, and no alignment is asked for
    return v;
}

inline vec load(const bfloat16* from) {
    typedef uint16_t narrow __attribute__((vector_size(LANES * 2)));
    typedef uint32_t wide __attribute__((vector_size(LANES * 4)));
    narrow half;
    std::memcpy(&half, from, sizeof half);
    const wide bits = __builtin_convertvector(half, wide) << 16;
    vec v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

// The first `count` from there; the other lanes are 0.
template <class T>
vec load(const T* from, int64_t count) {
    T part[LANES] = {};
    std::memcpy(part, from, count * sizeof(T));
    return load(part);
}

inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }

// sum + x * w, as a loop over inputs adds up a product.
inline vec plus(vec sum, float x, vec w) { return sum + x * w; }

// Two bfloat16 side by side. Where the processor has an instruction for them, it multiplies 16 pairs of weights by one
// pair of inputs, and adds both products of each pair to a float32.
struct pair {
    bfloat16 first, second;
};
#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;

inline __m512bh load(const pair* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline vec plus(vec sum, pair x, __m512bh w) {
    int both;
    std::memcpy(&both, &x, sizeof both);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), w);
}
#else
constexpr bool PAIRS = false;
#endif

inline float sum_of(vec v) {
    typedef float four __attribute__((vector_size(16)));
    four parts[LANES / 4];
    std::memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; i++) parts[0] += parts[i];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// e^x for x <= 0, to 2 units in the last place; 0 below -87, where float32 has no normal numbers.
inline vec exp_of(vec x) {
    typedef int32_t ints __attribute__((vector_size(LANES * 4)));
    const vec round = vec{} + 12582912.0f;  // 1.5 x 2^23: added, no bit is left for a fraction
    const vec n = (x * 1.44269504f + round) - round;  // e^x = 2^n e^f
    const vec f = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts: the first times n is exact
    vec p = vec{} + 1.0f / 5040;  // Taylor's series: |f| < 0.35
    for (float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) p = p * f + factor;
    const ints bits = (__builtin_convertvector(n, ints) + 127) << 23;
    vec power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? vec{} : p * power;
}
