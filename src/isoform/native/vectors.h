// Registers full of numbers, and how weights of each form come into them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef REAL
#define REAL float
#endif

#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif

// Loops over registers, which are registers only where nothing of the loop is left.
#define UNROLL _Pragma("GCC unroll 16")

// In a register, and not read from memory at every use.
#if defined(__x86_64__)
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v)
#endif

typedef REAL real;
typedef int64_t i64;
constexpr int LANES = VECTOR / sizeof(real);
typedef real vec __attribute__((vector_size(VECTOR)));
typedef float halfvec __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t shorts __attribute__((vector_size(LANES * 2)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

// What a weight is stored in.
struct Bf16 { uint16_t bits; };
enum Form { WIDE = 0, BFLOAT16 = 1, INT8 = 2, EIGHT = 3 };

static inline vec load(const real* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline vec load(const Bf16* p) {
#if defined(__AVX512F__)  // which GCC takes apart into halves
    if (sizeof(real) == 4) {
        __m512i w = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
        vec v; std::memcpy(&v, &w, sizeof v); return v;
    }
#endif
    shorts s; std::memcpy(&s, p, sizeof s);
    words w = __builtin_convertvector(s, words) << 16;
    halfvec f; std::memcpy(&f, &w, sizeof f);
    return __builtin_convertvector(f, vec);
}
static inline vec load(const int8_t* p) {
#if defined(__AVX512F__)  // which GCC makes ten instructions of
    if (sizeof(real) == 4) {
        __m512 f = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
        vec v; std::memcpy(&v, &f, sizeof v); return v;
    }
#elif defined(__AVX2__)
    if (sizeof(real) == 4) {
        __m256 f = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
        vec v; std::memcpy(&v, &f, sizeof v); return v;
    }
#endif
    bytes b; std::memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, ints), vec);
}
static inline real one(const real* p) { return *p; }
static inline real one(const Bf16* p) {
    uint32_t w = uint32_t(p->bits) << 16; float f; std::memcpy(&f, &w, 4); return f;
}
static inline real one(const int8_t* p) { return real(*p); }

static inline real sum(vec v) {
#if defined(__AVX512F__)
    if (sizeof(real) == 4) { __m512 f; std::memcpy(&f, &v, sizeof f); return real(_mm512_reduce_add_ps(f)); }
#elif defined(__AVX2__)
    if (sizeof(real) == 4) {
        __m256 f; std::memcpy(&f, &v, sizeof f);
        __m128 q = _mm_add_ps(_mm256_castps256_ps128(f), _mm256_extractf128_ps(f, 1));
        q = _mm_add_ps(q, _mm_movehl_ps(q, q));
        return real(_mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q))));
    }
#endif
    real parts[LANES]; std::memcpy(parts, &v, sizeof v);
    real total = 0;
    for (int i = 0; i < LANES; i++) total += parts[i];
    return total;
}

// The sums of four vectors, for the price of little more than one.
static inline void sum4(const vec* v, real* out) {
#if defined(__AVX2__)
    if (sizeof(real) == 4) {
        __m256 p[4];
        UNROLL for (int a = 0; a < 4; a++) {
#if defined(__AVX512F__)
            __m512 f; std::memcpy(&f, v + a, sizeof f);
            p[a] = _mm256_add_ps(_mm512_castps512_ps256(f), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(f), 1)));
#else
            std::memcpy(p + a, v + a, sizeof(__m256));
#endif
        }
        const __m256 q = _mm256_hadd_ps(_mm256_hadd_ps(p[0], p[1]), _mm256_hadd_ps(p[2], p[3]));
        const __m128 s = _mm_add_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1));
        std::memcpy(out, &s, sizeof s);
        return;
    }
#endif
    for (int a = 0; a < 4; a++) out[a] = sum(v[a]);
}
