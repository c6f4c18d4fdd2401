// x Wᵀ with both rounded to 8 bits.
//
// Inputs are rounded to -127 … 127 times a scale a row; with weights of 8 bits their sums are exact, and so
// alike on all machines. `isoform.native.eights` lays weights out in blocks of 16 outputs: the sum of each
// one's weights in 32 bits, then [groups][16][4]. A rounded row is [groups][4], then its scale. Groups of four
// inputs come in pairs; what is beyond the width is 0.
#pragma once
#include "products.h"

constexpr int BLOCK = 16;
#if defined(__AVX512VNNI__)
#define WHOLE 64
#elif defined(__AVX2__)
#define WHOLE 32
#else
#define WHOLE 16
#endif
typedef int32_t whole __attribute__((vector_size(WHOLE)));

// total + four products a lane. Where one instruction does it, it takes x as a number without a sign.
#if defined(__AVX512VNNI__)
#define OFFSET 128
static inline whole add4(whole total, whole x, whole w) {
    return (whole)_mm512_dpbusd_epi32((__m512i)total, (__m512i)x, (__m512i)w);
}
#elif defined(__AVXVNNI__)
#define OFFSET 128
static inline whole add4(whole total, whole x, whole w) {
    return (whole)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)x, (__m256i)w);
}
#elif defined(__AVX2__)
#define OFFSET 0
static inline whole add4(whole total, whole x, whole w) {  // pairs fit 16 bits: 2 · 127² < 2¹⁵
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)x), _mm256_sign_epi8((__m256i)w, (__m256i)x));
    return total + (whole)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
#define OFFSET 0
static inline whole add4(whole total, whole x, whole w) {
    int8_t a[WHOLE], b[WHOLE];
    std::memcpy(a, &x, WHOLE); std::memcpy(b, &w, WHOLE);
    for (int i = 0; i < WHOLE; i++) total[i / 4] += int32_t(a[i]) * b[i];
    return total;
}
#endif
constexpr int PARTS = BLOCK * 4 / WHOLE;

static inline i64 groups_of(i64 width) { return (width + 7) / 8 * 2; }

// A row as whole numbers. What is not finite makes the scale NaN, and with it every output.
static void round_row(const real* x, i64 width, real* to) {
    real most = 0, odd = 0;
    #pragma omp simd reduction(max:most) reduction(+:odd)
    for (i64 i = 0; i < width; i++) {
        const real size = x[i] < 0 ? -x[i] : x[i];
        most = size > most ? size : most;
        odd += x[i] - x[i];
    }
    const real by = most > 0 ? 127 / most : real(0);
    uint8_t* bytes = (uint8_t*)to;
    #pragma omp simd
    for (i64 i = 0; i < width; i++) bytes[i] = uint8_t(int32_t(std::rint(x[i] * by)) + OFFSET);
    const i64 groups = groups_of(width);
    for (i64 i = width; i < 4 * groups; i++) bytes[i] = OFFSET;
    const real scale = most / 127 + odd;
    std::memcpy(bytes + 4 * groups, &scale, sizeof scale);
}

// B blocks of R rows, of which outputs low .. high are written; U: how many groups are taken at a time.
template <int B, int R, int U>
static inline void whole_tile(const int8_t* w, i64 stride, const uint8_t* x, i64 ldx, i64 groups, const Out& o, i64 row, i64 block, i64 low, i64 high) {
    whole sums[U][R][B * PARTS];
    UNROLL for (int b = 0; b < B; b++)
        UNROLL for (int p = 0; p < PARTS; p++) {
            whole start; std::memcpy(&start, w + b * stride + p * WHOLE, WHOLE);
            UNROLL for (int u = 0; u < U; u++)
                UNROLL for (int r = 0; r < R; r++) sums[u][r][b * PARTS + p] = u ? whole{} : start * -OFFSET;
        }
    const int8_t* at = w + 4 * BLOCK;
    for (i64 k = 0; k < groups; k += U) {
        UNROLL for (int u = 0; u < U; u++) {
            whole given[R];
            UNROLL for (int r = 0; r < R; r++) {
                int32_t four; std::memcpy(&four, x + r * ldx + 4 * (k + u), 4);
                given[r] = whole{} + four;
            }
            UNROLL for (int b = 0; b < B; b++)
                UNROLL for (int p = 0; p < PARTS; p++) {
                    whole wide; std::memcpy(&wide, at + b * stride + (k + u) * 4 * BLOCK + p * WHOLE, WHOLE);
                    UNROLL for (int r = 0; r < R; r++)
                        sums[u][r][b * PARTS + p] = add4(sums[u][r][b * PARTS + p], given[r], wide);
                }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        real scale; std::memcpy(&scale, x + r * ldx + 4 * groups, sizeof scale);
        UNROLL for (int b = 0; b < B; b++) {
            int32_t found[BLOCK];
            UNROLL for (int p = 0; p < PARTS; p++) {
                UNROLL for (int u = 1; u < U; u++) sums[0][r][b * PARTS + p] += sums[u][r][b * PARTS + p];
                std::memcpy(found + p * WHOLE / 4, &sums[0][r][b * PARTS + p], WHOLE);
            }
            const i64 column = (block + b) * BLOCK;
            for (int a = 0; a < BLOCK; a += LANES) {
                ints part; std::memcpy(&part, found + a, sizeof part);
                const vec value = __builtin_convertvector(part, vec) * scale;
                const i64 at = column + a;
                // What is before `low` is another thread's, which may have applied its activation by now.
                if (at >= low) put(o, row + r, at, value, high - at);
                else for (i64 c = low; c < high && c < at + LANES; c++) put<1>(o, row + r, c, (const real*)&value + (c - at));
            }
        }
    }
}

#if defined(__AVX512VNNI__)
constexpr int BLOCKS = 4, ROWS = 6;  // as many as there are registers for
#else
constexpr int BLOCKS = 1, ROWS = 4;
#endif

template <int B>
static inline void whole_rows(const int8_t* w, i64 stride, const uint8_t* x, i64 ldx, i64 rows, i64 groups, const Out& o, i64 block, i64 low, i64 high) {
    i64 row = 0;
    for (; rows - row >= ROWS; row += ROWS) whole_tile<B, ROWS, 1>(w, stride, x + row * ldx, ldx, groups, o, row, block, low, high);
    for (; rows - row >= 2; row += 2) whole_tile<B, 2, 1>(w, stride, x + row * ldx, ldx, groups, o, row, block, low, high);
    if (row < rows) whole_tile<B, 1, 2>(w, stride, x + row * ldx, ldx, groups, o, row, block, low, high);
}

// Outputs low .. high of all rows.
static void whole_product(const int8_t* w, const uint8_t* x, i64 ldx, i64 rows, i64 width, const Out& o, i64 low, i64 high) {
    const i64 groups = groups_of(width), stride = 4 * BLOCK * (groups + 1);
    i64 block = low / BLOCK;
    const i64 end = (high + BLOCK - 1) / BLOCK;
    for (; end - block >= BLOCKS; block += BLOCKS) whole_rows<BLOCKS>(w + block * stride, stride, x, ldx, rows, groups, o, block, low, high);
    for (; block < end; block++) whole_rows<1>(w + block * stride, stride, x, ldx, rows, groups, o, block, low, high);
}
