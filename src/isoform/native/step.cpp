// One token a row through a decoder, as a list of operations that threads walk through together.
//
// `isoform.nn.program` writes the list; `isoform.native.library` compiles this file for the machine it is on.
// REAL is float, or double. Weights lie row by row, [out][in], as they are stored, but for whole numbers. Threads are OpenMP's, so
// that they are the ones PyTorch keeps, and no two pools wait for the same cores.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <omp.h>
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

// e^x. Branchless, so that loops over it become vectors; below the smallest normal number it is 0.
static inline double exponential(double x) { return std::exp(x); }
static inline float exponential(float x) {
    float n = x * 1.44269504f;
    n = n < -200.f ? -200.f : n;
    n = n > 200.f ? 200.f : n;
    float whole = (n + 12582912.f) - 12582912.f;
    float r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    int32_t k = int32_t(whole);
    int32_t first = k >> 1, second = k - first;  // two factors: their product may be beyond what one can hold
    int32_t a = (first + 127) << 23, b = (second + 127) << 23;
    float fa, fb; std::memcpy(&fa, &a, 4); std::memcpy(&fb, &b, 4);
    float y = p * fa * fb;
    y = x < -87.3f ? 0.f : y;
    return x != x ? x : y;
}
static inline double tangent(double x) { return std::tanh(x); }
static inline float tangent(float x) { return 1.f - 2.f / (exponential(2.f * x) + 1.f); }
static inline real sigmoid(real x) { return 1 / (1 + exponential(-x)); }

// In the order of `isoform.nn.program.ACTIVATIONS`.
enum Act { IDENTITY, RELU, RELU_SQUARED, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH, ELU, LEAKY, SOFTPLUS,
           MISH, SOFTCAP };

template <int A> static inline real act(real x, real cap) {
    switch (A) {
        case RELU: return x < 0 ? real(0) : x;
        case RELU_SQUARED: { real y = x < 0 ? real(0) : x; return y * y; }
        case GELU: return x * real(0.5) * (1 + std::erf(x * real(0.70710678118654752440)));
        case GELU_TANH: {
            real inner = real(0.79788456080286535588) * (x + real(0.044715) * x * x * x);
            return real(0.5) * x * (1 + tangent(inner));
        }
        case QUICK_GELU: return x * sigmoid(real(1.702) * x);
        case SILU: return x * sigmoid(x);
        case SIGMOID: return sigmoid(x);
        case TANH: return std::tanh(x);
        case ELU: return x > 0 ? x : std::expm1(x);
        case LEAKY: return x > 0 ? x : real(0.01) * x;
        case SOFTPLUS: return x > 20 ? x : std::log1p(std::exp(x));
        case MISH: return x * std::tanh(x > 20 ? x : std::log1p(std::exp(x)));
        case SOFTCAP: return std::tanh(x / cap) * cap;
        default: return x;
    }
}
template <int A> static void apply(real* x, const real* times, i64 n, real cap) {
    if (times) {
        #pragma omp simd
        for (i64 i = 0; i < n; i++) x[i] = act<A>(x[i], cap) * times[i];
    } else {
        #pragma omp simd
        for (i64 i = 0; i < n; i++) x[i] = act<A>(x[i], cap);
    }
}
static void activate(int kind, real* x, const real* times, i64 n, real cap) {
    switch (kind) {
#define CASE(A) case A: return apply<A>(x, times, n, cap);
        CASE(IDENTITY) CASE(RELU) CASE(RELU_SQUARED) CASE(GELU) CASE(GELU_TANH) CASE(QUICK_GELU) CASE(SILU)
        CASE(SIGMOID) CASE(TANH) CASE(ELU) CASE(LEAKY) CASE(SOFTPLUS) CASE(MISH) CASE(SOFTCAP)
    }
}

// ---- products -------------------------------------------------------------------------------------------

struct Out { real* to; i64 stride; const real* from; i64 from_stride; const real *bias, *scale; real alpha; };

template <int O> static inline void put(const Out& o, i64 row, i64 column, const real* given) {
    real value[O];
    UNROLL for (int a = 0; a < O; a++) value[a] = given[a];
    if (o.scale) UNROLL for (int a = 0; a < O; a++) value[a] *= o.scale[column + a];
    if (o.bias) UNROLL for (int a = 0; a < O; a++) value[a] += o.bias[column + a];
    UNROLL for (int a = 0; a < O; a++) value[a] *= o.alpha;
    if (o.from) UNROLL for (int a = 0; a < O; a++) value[a] += o.from[row * o.from_stride + column + a];
    UNROLL for (int a = 0; a < O; a++) o.to[row * o.stride + column + a] = value[a];
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

// O outputs of R rows; U: how many vectors of them are taken at a time, each with sums of its own.
template <class W, int O, int R, int U>
static inline void tile(const W* w, i64 ldw, const real* x, i64 ldx, i64 width, const Out& o, i64 row, i64 column) {
    vec sums[U][R][O];
    UNROLL for (int u = 0; u < U; u++)
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int a = 0; a < O; a++) sums[u][r][a] = vec{};
    i64 k = 0;
    for (; k + LANES * U <= width; k += LANES * U) {
        UNROLL for (int u = 0; u < U; u++) {
            vec given[R];
            UNROLL for (int r = 0; r < R; r++) {
                given[r] = load(x + r * ldx + k + u * LANES);
                KEEP(given[r]);
            }
            UNROLL for (int a = 0; a < O; a++) {
                vec wide = load(w + a * ldw + k + u * LANES);
                KEEP(wide);
                // The next tile's: rows are too short for the processor to see where they lead.
                if (R <= 2) __builtin_prefetch(w + (a + O) * ldw + k + u * LANES);
                UNROLL for (int r = 0; r < R; r++) sums[u][r][a] += wide * given[r];
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        real values[O];
        UNROLL for (int u = 1; u < U; u++) UNROLL for (int a = 0; a < O; a++) sums[0][r][a] += sums[u][r][a];
        if constexpr (O == 4) sum4(sums[0][r], values);
        else for (int a = 0; a < O; a++) values[a] = sum(sums[0][r][a]);
        for (i64 rest = k; rest < width; rest++)
            for (int a = 0; a < O; a++) values[a] += one(w + a * ldw + rest) * x[r * ldx + rest];
        put<O>(o, row + r, column, values);
    }
}

#if VECTOR == 64
constexpr int MOST = 6;  // rows a tile: as many as there are registers for
#else
constexpr int MOST = 3;
#endif

// The given rows against O outputs. The last tile has one row or two.
template <class W, int O>
static inline void rows_of(const W* w, i64 ldw, const real* x, i64 ldx, i64 width, const Out& o, i64 row, i64 end, i64 column) {
    for (; end - row > MOST && end - row != 4; row += MOST) tile<W, O, MOST, 1>(w, ldw, x + row * ldx, ldx, width, o, row, column);
    for (; end - row >= 2; row += 2) tile<W, O, 2, 1>(w, ldw, x + row * ldx, ldx, width, o, row, column);
    if (row < end) tile<W, O, 1, 2>(w, ldw, x + row * ldx, ldx, width, o, row, column);
}

// Many rows: a panel of outputs is turned, so that a vector holds outputs, and nothing is added across it.
constexpr int PANEL = 2 * LANES;

#if defined(__AVX2__)
static inline __m256 eight(const float* p) { return _mm256_loadu_ps(p); }
static inline __m256 eight(const Bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline __m256 eight(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline __m256 eight(const double*) { return __m256{}; }

// Eight inputs of eight outputs.
template <class W> static inline void turn8(const W* w, i64 ldw, float* to) {
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = eight(w + i * ldw);
    UNROLL for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
        }
    UNROLL for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * PANEL, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * PANEL, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}
#endif

template <class W> static void turn(const W* w, i64 ldw, i64 outs, i64 width, real* panel) {
    i64 k = 0;
#if defined(__AVX2__)
    if (sizeof(real) == 4 && outs == PANEL)
        for (; k + 8 <= width; k += 8)
            for (i64 a = 0; a < PANEL; a += 8) turn8(w + a * ldw + k, ldw, (float*)panel + k * PANEL + a);
#endif
    for (; k < width; k++) {
        for (i64 a = 0; a < outs; a++) panel[k * PANEL + a] = one(w + a * ldw + k);
        for (i64 a = outs; a < PANEL; a++) panel[k * PANEL + a] = 0;
    }
}

// LANES outputs of a row.
static inline void put(const Out& o, i64 row, i64 column, vec value) {
    if (o.scale) value *= load(o.scale + column);
    if (o.bias) value += load(o.bias + column);
    value *= o.alpha;
    if (o.from) value += load(o.from + row * o.from_stride + column);
    std::memcpy(o.to + row * o.stride + column, &value, sizeof value);
}
// As many of `outs` outputs as there are in it, from `column` on.
static inline void put(const Out& o, i64 row, i64 column, vec value, i64 outs) {
    if (outs >= LANES) return put(o, row, column, value);
    real values[LANES]; std::memcpy(values, &value, sizeof value);
    for (i64 a = 0; a < outs; a++) put<1>(o, row, column + a, values + a);
}

template <int R>
static inline void panel_tile(const real* panel, const real* x, i64 ldx, i64 width, const Out& o, i64 row, i64 column, i64 outs) {
    vec sums[R][2];
    UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = vec{};
    for (i64 k = 0; k < width; k++) {
        const vec low = load(panel + k * PANEL), high = load(panel + k * PANEL + LANES);
        UNROLL for (int r = 0; r < R; r++) {
            const vec given = x[r * ldx + k] - vec{};
            sums[r][0] += low * given;
            sums[r][1] += high * given;
        }
    }
    real found[R][PANEL];  // from which the loop below reads, so that the sums stay in registers above
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < 2; i++) std::memcpy(found[r] + i * LANES, &sums[r][i], sizeof(vec));
    for (int r = 0; r < R; r++)
        for (i64 a = 0; a < outs; a += LANES) put(o, row + r, column + a, load(found[r] + a), outs - a);
}

#if VECTOR == 64
constexpr int TALL = 12;  // rows a panel's tile: as many as there are registers for
#else
constexpr int TALL = 6;
#endif
// Rows from which turning pays, by what the tiles of few rows have to widen again and again.
static inline i64 many(int form) { return form == WIDE ? 48 : form == BFLOAT16 ? 12 : 24; }
template <class W> constexpr int form_of = sizeof(W) == sizeof(real) ? WIDE : sizeof(W) == 2 ? BFLOAT16 : INT8;

// Outputs begin .. end of all rows.
template <class W>
static void product(const W* w, const real* x, i64 ldx, i64 rows, i64 width, const Out& o, i64 begin, i64 end, real* spare) {
    i64 c = begin;
    if (rows == 1) {
        for (; c + 4 <= end; c += 4) tile<W, 4, 1, 2>(w + c * width, width, x, ldx, width, o, 0, c);
        for (; c < end; c++) tile<W, 1, 1, 4>(w + c * width, width, x, ldx, width, o, 0, c);
        return;
    }
    if (rows < many(form_of<W>)) {
        for (; c + 4 <= end; c += 4) rows_of<W, 4>(w + c * width, width, x, ldx, width, o, 0, rows, c);
        for (; c < end; c++) rows_of<W, 1>(w + c * width, width, x, ldx, width, o, 0, rows, c);
        return;
    }
    i64 block = 98304 / (width * i64(sizeof(real)) / 4 + 1) / TALL * TALL;  // rows that stay in the second-level cache
    block = block < 4 * TALL ? 4 * TALL : block;
    for (i64 first = 0; first < rows; first += block) {
        const i64 last = first + block < rows ? first + block : rows;
        for (c = begin; c < end; c += PANEL) {
            const i64 outs = end - c < PANEL ? end - c : PANEL;
            turn(w + c * width, width, outs, width, spare);
            i64 row = first;
            for (; last - row >= TALL; row += TALL) panel_tile<TALL>(spare, x + row * ldx, ldx, width, o, row, c, outs);
            for (; last - row >= 4; row += 4) panel_tile<4>(spare, x + row * ldx, ldx, width, o, row, c, outs);
            for (; row < last; row++) panel_tile<1>(spare, x + row * ldx, ldx, width, o, row, c, outs);
        }
    }
}

// ---- products of whole numbers --------------------------------------------------------------------------

// Inputs are rounded to -127 … 127 times a scale a row; with weights of 8 bits their sums are exact, and so
// alike on all machines. `isoform.native.eights` lays weights out in blocks of 16 outputs: the sum of each
// one's weights in 32 bits, then [groups][16][4]. A rounded row is [groups][4], then its scale. Groups of four
// inputs come in pairs; what is beyond the width is 0.

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

// ---- the list -------------------------------------------------------------------------------------------

enum Kind { NORM = 0, LINEAR = 1, ADD = 2, COPY = 3, ROTATE = 4, ATTEND = 5, CROSS = 6, ROUND = 7 };

extern "C" {

struct Op {
    int32_t kind, form, act, gated;
    int32_t in, out, from, layer;       // buffers; -1: none
    int32_t in_at, out_at;              // first column
    i64 n, m, count;                    // outputs and inputs of a product; width and number of a norm's vectors
    const void* weight;
    const real *scale, *bias;
    double alpha, eps, softcap;
    int32_t rms, near;                  // kind of norm; kind of layer
    int32_t heads, kv, width, unused;
};

struct Near {                           // what layers of one kind share
    i64 window;                         // 0: none
    i64 rotary, interleaved;            // channels that turn; 0: none
    const real *cos, *sin;              // [positions][rotary]
    const real* bias;                   // [heads][distances], or null
    i64 distances;
};

struct Call {
    i64 rows, used, threads;
    i64 layer_stride, row_stride, head_stride;  // of the cache, in elements
    real* cache;
    const int32_t* trail;               // [rows][trail_stride]: whose slot it is; null: a row's own
    i64 trail_stride;
    const i64* starts;                  // first slot of a row; null: 0
    const int32_t* samples;             // whose source a row reads
    real* const* memory;                // keys and values of each layer
    i64 source;                         // its slots
    const real* source_added;           // [samples][source], or null
    real* const* buffers;
    const i64* strides;
    real* spare;                        // of every thread
    i64 spare_stride;
};

}

static void normalise(const Op& op, const real* x, real* y) {
    const i64 n = op.n;
    const real* gain = op.scale; const real* bias = op.bias;
    real mean = 0;
    if (!op.rms) {
        #pragma omp simd reduction(+:mean)
        for (i64 i = 0; i < n; i++) mean += x[i];
        mean /= n;
    }
    real square = 0;
    #pragma omp simd reduction(+:square)
    for (i64 i = 0; i < n; i++) { real d = x[i] - mean; square += d * d; }
    const real by = 1 / std::sqrt(square / n + real(op.eps));
    #pragma omp simd
    for (i64 i = 0; i < n; i++) y[i] = (x[i] - mean) * by;
    if (gain) {
        #pragma omp simd
        for (i64 i = 0; i < n; i++) y[i] *= gain[i];
    }
    if (bias) {
        #pragma omp simd
        for (i64 i = 0; i < n; i++) y[i] += bias[i];
    }
}

static void rotate(const Near& near, i64 position, real* x) {
    const real *cos = near.cos + position * near.rotary, *sin = near.sin + position * near.rotary;
    const i64 half = near.rotary / 2;
    for (i64 i = 0; i < half; i++) {
        const i64 a = near.interleaved ? 2 * i : i, b = near.interleaved ? a + 1 : i + half;
        const real first = x[a], second = x[b];
        x[a] = first * cos[a] + second * sin[a];  // the first one's sine is negative in the table
        x[b] = second * cos[b] + first * sin[b];
    }
}

static inline real dot(const real* a, const real* b, i64 n) {
    vec first{}, second{};
    i64 i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        first += load(a + i) * load(b + i);
        second += load(a + i + LANES) * load(b + i + LANES);
    }
    real s = sum(first + second);
    for (; i < n; i++) s += a[i] * b[i];
    return s;
}

// The scores of one query against n keys, four at a time. `slot(j)` is where the key of slot j lies.
template <class Slot>
static void match(const real* q, i64 n, i64 width, const Slot& slot, real alpha, real* scores) {
    i64 j = 0;
    for (; j + 4 <= n; j += 4) {
        const real* k[4] = {slot(j), slot(j + 1), slot(j + 2), slot(j + 3)};
        vec sums[4] = {vec{}, vec{}, vec{}, vec{}};
        i64 i = 0;
        for (; i + LANES <= width; i += LANES) {
            const vec given = load(q + i);
            UNROLL for (int a = 0; a < 4; a++) sums[a] += load(k[a] + i) * given;
        }
        real values[4];
        sum4(sums, values);
        for (; i < width; i++) UNROLL for (int a = 0; a < 4; a++) values[a] += q[i] * k[a][i];
        UNROLL for (int a = 0; a < 4; a++) scores[j + a] = values[a] * alpha;
    }
    for (; j < n; j++) scores[j] = dot(q, slot(j), width) * alpha;
}

// U vectors of the mean of values.
template <int U, class Slot>
static inline void mean(const real* weights, i64 n, const Slot& slot, i64 at, real by, real* out) {
    vec sums[U];
    UNROLL for (int u = 0; u < U; u++) sums[u] = vec{};
    for (i64 j = 0; j < n; j++) {
        const real* v = slot(j) + at;
        UNROLL for (int u = 0; u < U; u++) sums[u] += load(v + u * LANES) * weights[j];
    }
    UNROLL for (int u = 0; u < U; u++) { sums[u] *= by; std::memcpy(out + at + u * LANES, &sums[u], sizeof(vec)); }
}

// softmax(scores) times values. `slot(j)` is where the values of slot j lie.
template <class Slot>
static void weigh(real* scores, i64 n, i64 width, const Slot& slot, real* out) {
    real most = scores[0];
    #pragma omp simd reduction(max:most)
    for (i64 j = 0; j < n; j++) most = scores[j] > most ? scores[j] : most;
    real total = 0;
    #pragma omp simd reduction(+:total)
    for (i64 j = 0; j < n; j++) { scores[j] = exponential(scores[j] - most); total += scores[j]; }
    const real by = 1 / total;
    i64 c = 0;
    for (; c + 8 * LANES <= width; c += 8 * LANES) mean<8>(scores, n, slot, c, by, out);
    for (; c + 4 * LANES <= width; c += 4 * LANES) mean<4>(scores, n, slot, c, by, out);
    for (; c + LANES <= width; c += LANES) mean<1>(scores, n, slot, c, by, out);
    for (; c < width; c++) {
        real s = 0;
        for (i64 j = 0; j < n; j++) s += slot(j)[c] * scores[j];
        out[c] = s * by;
    }
}

// One row's new token in one group of heads: write its key and value, and read.
static void attend(const Op& op, const Near& near, const Call& call, i64 row, i64 head, real* spare) {
    const i64 width = op.width, group = op.heads / op.kv, used = call.used;
    const i64 start = call.starts ? call.starts[row] : 0;
    real* heads = call.buffers[op.in] + row * call.strides[op.in];
    real* k = heads + (op.heads + head) * width;
    const real* v = heads + (op.heads + op.kv + head) * width;
    real* keys = call.cache + 2 * op.layer * call.layer_stride + head * call.head_stride;
    real* values = keys + call.layer_stride;
    if (near.rotary && !op.gated) rotate(near, used - start, k);
    std::memcpy(keys + row * call.row_stride + used * width, k, width * sizeof(real));
    std::memcpy(values + row * call.row_stride + used * width, v, width * sizeof(real));
    i64 low = start;
    if (near.window && used + 1 - near.window > low) low = used + 1 - near.window;
    const int32_t* trail = call.trail ? call.trail + row * call.trail_stride : nullptr;
    const i64 n = used + 1 - low;
    for (i64 g = 0; g < group; g++) {
        const i64 h = head * group + g;
        real* q = heads + h * width;
        if (near.rotary && !op.gated) rotate(near, used - start, q);
        const real* own = keys + row * call.row_stride + low * width;
        if (trail)
            match(q, n, width, [&](i64 j) { return keys + trail[low + j] * call.row_stride + (low + j) * width; }, real(op.alpha), spare);
        else
            match(q, n, width, [=](i64 j) { return own + j * width; }, real(op.alpha), spare);
        if (op.softcap != 0) activate(SOFTCAP, spare, nullptr, n, real(op.softcap));
        if (near.bias) {
            const real* bias = near.bias + h * near.distances + (used - low);
            for (i64 j = 0; j < n; j++) spare[j] += bias[-j];
        }
        real* out = call.buffers[op.out] + row * call.strides[op.out] + h * width;
        if (trail)
            weigh(spare, n, width, [&](i64 j) { return values + trail[low + j] * call.row_stride + (low + j) * width; }, out);
        else {
            own = values + row * call.row_stride + low * width;
            weigh(spare, n, width, [=](i64 j) { return own + j * width; }, out);
        }
    }
}

// One row in one group of heads reads its source.
static void cross(const Op& op, const Call& call, i64 row, i64 head, real* spare) {
    const i64 width = op.width, group = op.heads / op.kv, n = call.source, sample = call.samples[row];
    const real* keys = call.memory[2 * op.layer] + (sample * op.kv + head) * n * width;
    const real* values = call.memory[2 * op.layer + 1] + (sample * op.kv + head) * n * width;
    for (i64 g = 0; g < group; g++) {
        const i64 h = head * group + g;
        const real* q = call.buffers[op.in] + row * call.strides[op.in] + h * width;
        match(q, n, width, [=](i64 j) { return keys + j * width; }, real(op.alpha), spare);
        if (op.softcap != 0) activate(SOFTCAP, spare, nullptr, n, real(op.softcap));
        if (call.source_added) for (i64 j = 0; j < n; j++) spare[j] += call.source_added[sample * n + j];
        weigh(spare, n, width, [=](i64 j) { return values + j * width; },
              call.buffers[op.out] + row * call.strides[op.out] + h * width);
    }
}

static void linear(const Op& op, const Call& call, i64 thread, i64 threads, real* spare) {
    const i64 rows = call.rows, unit = op.form == EIGHT ? BLOCK : rows < many(op.form) ? 4 : PANEL;
    const i64 blocks = (op.n + unit - 1) / unit;
    const i64 begin = blocks * thread / threads * unit;
    i64 end = blocks * (thread + 1) / threads * unit;
    end = end < op.n ? end : op.n;
    if (begin >= end) return;
    const real* x = call.buffers[op.in] + op.in_at;
    const i64 ldx = call.strides[op.in];
    Out out{call.buffers[op.out] + op.out_at, call.strides[op.out], nullptr, 0, op.bias, op.scale, real(op.alpha)};
    if (op.from >= 0) { out.from = call.buffers[op.from]; out.from_stride = call.strides[op.from]; }
    for (int half = 0; half <= (op.gated ? 1 : 0); half++) {
        const i64 by = half ? op.n : 0;
        const i64 first = begin + by, last = end + by;
        switch (op.form) {
            case WIDE: product((const real*)op.weight, x, ldx, rows, op.m, out, first, last, spare); break;
            case BFLOAT16: product((const Bf16*)op.weight, x, ldx, rows, op.m, out, first, last, spare); break;
            case INT8: product((const int8_t*)op.weight, x, ldx, rows, op.m, out, first, last, spare); break;
            case EIGHT:
                whole_product((const int8_t*)op.weight, (const uint8_t*)x, ldx * sizeof(real), rows, op.m, out, first, last);
                break;
        }
    }
    if (op.act == IDENTITY && !op.gated) return;
    for (i64 r = 0; r < rows; r++) {
        real* to = out.to + r * out.stride;
        activate(op.act, to + begin, op.gated ? to + op.n + begin : nullptr, end - begin, real(op.softcap));
    }
}

// Every row as whole numbers.
static void round_rows(const Op& op, const Call& call, i64 thread, i64 threads) {
    for (i64 row = call.rows * thread / threads; row < call.rows * (thread + 1) / threads; row++)
        round_row(call.buffers[op.in] + row * call.strides[op.in], op.m, call.buffers[op.out] + row * call.strides[op.out]);
}

// One product of any number of rows: x Wᵀ, scaled, and the bias. `rounded`: room for [rows][groups + 1].
extern "C" int isoform_linear(const real* x, i64 rows, i64 width, const void* weight, i64 form, const real* scale,
                              const real* bias, real* to, i64 n, real* spare, real* rounded, i64 given) {
    #pragma omp parallel num_threads(given)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Op op{};
        op.form = int32_t(form); op.from = -1; op.out = 1; op.n = n; op.m = width;
        op.weight = weight; op.scale = scale; op.bias = bias; op.alpha = 1;
        real* buffers[3] = {const_cast<real*>(x), to, rounded};
        const i64 strides[3] = {width, n, groups_of(width) + 1};
        Call call{};
        call.rows = rows; call.buffers = buffers; call.strides = strides;
        if (form == EIGHT) {
            Op before{};
            before.out = 2; before.m = width;
            round_rows(before, call, thread, threads);
            op.in = 2;
            #pragma omp barrier
        }
        linear(op, call, thread, threads, spare + thread * PANEL * width);
    }
    return 0;
}

// log Σ e^x of every row.
extern "C" int isoform_log_sums(const real* x, i64 rows, i64 width, real* out, i64 given) {
    const i64 parts = rows < given ? rows : given;
    #pragma omp parallel num_threads(parts)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (i64 row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const real* at = x + row * width;
            real most = at[0];
            #pragma omp simd reduction(max:most)
            for (i64 i = 0; i < width; i++) most = at[i] > most ? at[i] : most;
            real total = 0;
            #pragma omp simd reduction(+:total)
            for (i64 i = 0; i < width; i++) total += exponential(at[i] - most);
            out[row] = most + std::log(total);
        }
    }
    return 0;
}

extern "C" int isoform_step(const Op* ops, i64 n_ops, const Near* nears, const Call* given) {
    const Call& call = *given;
    #pragma omp parallel num_threads(call.threads)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        real* spare = call.spare + thread * call.spare_stride;
        for (i64 i = 0; i < n_ops; i++) {
            const Op& op = ops[i];
            switch (op.kind) {
                case LINEAR: linear(op, call, thread, threads, spare); break;
                case ROUND: round_rows(op, call, thread, threads); break;
                case NORM: {
                    const i64 all = call.rows * op.count;
                    for (i64 u = all * thread / threads; u < all * (thread + 1) / threads; u++) {
                        const i64 row = u / op.count, at = u % op.count * op.n;
                        normalise(op, call.buffers[op.in] + row * call.strides[op.in] + op.in_at + at,
                                  call.buffers[op.out] + row * call.strides[op.out] + op.out_at + at);
                    }
                    break;
                }
                case ADD:
                case COPY:
                    for (i64 row = call.rows * thread / threads; row < call.rows * (thread + 1) / threads; row++) {
                        const real* x = call.buffers[op.in] + row * call.strides[op.in];
                        real* y = call.buffers[op.out] + row * call.strides[op.out];
                        if (op.kind == COPY) std::memcpy(y, x, op.n * sizeof(real));
                        else {
                            const real* from = call.buffers[op.from] + row * call.strides[op.from];
                            for (i64 c = 0; c < op.n; c++) y[c] = from[c] + real(op.alpha) * x[c];
                        }
                    }
                    break;
                case ROTATE: {
                    const i64 all = call.rows * op.count;
                    for (i64 u = all * thread / threads; u < all * (thread + 1) / threads; u++) {
                        const i64 row = u / op.count, start = call.starts ? call.starts[row] : 0;
                        rotate(nears[op.near], call.used - start,
                               call.buffers[op.in] + row * call.strides[op.in] + u % op.count * op.width);
                    }
                    break;
                }
                case ATTEND:
                case CROSS: {
                    const i64 all = call.rows * op.kv;
                    for (i64 u = all * thread / threads; u < all * (thread + 1) / threads; u++) {
                        if (op.kind == ATTEND) attend(op, nears[op.near], call, u / op.kv, u % op.kv, spare);
                        else cross(op, call, u / op.kv, u % op.kv, spare);
                    }
                    break;
                }
            }
            #pragma omp barrier
        }
    }
    return 0;
}
