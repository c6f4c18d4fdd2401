// x Wᵀ with W of numbers of the step's own type, bfloat16 or 8 bits, and x as it is.
#pragma once
#include "vectors.h"

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

// What will be read next, `by` bytes of it with every turn of a loop: memory works while others are multiplied.
struct Ahead {
    const char* at; i64 by;
    void go() {
        __builtin_prefetch(at);
        if (VECTOR > 32) __builtin_prefetch(at + 64);
        at += by;
    }
};

// The inputs `at` … `to` of `width`; `sums` [rows][outputs] holds what those before gave, for more to come.
struct Part { i64 at, to, width; real* sums; };

// O outputs of R rows; U: how many vectors of them are taken at a time, each with sums of its own.
template <class W, int O, int R, int U>
static inline void tile(const W* w, i64 ldw, const real* x, i64 ldx, const Part& part, const Out& o, i64 row, i64 column, Ahead& next) {
    Ahead ahead = next;  // in registers, inlined or not
    vec sums[U][R][O];
    UNROLL for (int u = 0; u < U; u++)
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int a = 0; a < O; a++) sums[u][r][a] = vec{};
    i64 k = part.at;
    for (; k + LANES * U <= part.to; k += LANES * U) {
        ahead.go();
        UNROLL for (int u = 0; u < U; u++) {
            vec given[R];
            UNROLL for (int r = 0; r < R; r++) {
                given[r] = load(x + r * ldx + k + u * LANES);
                KEEP(given[r]);
            }
            UNROLL for (int a = 0; a < O; a++) {
                vec wide = load(w + a * ldw + k + u * LANES);
                KEEP(wide);
                // The next tile's: rows are too short for the processor to see where they lead, unless they are
                // of whole vectors of 64 bytes.
                if ((VECTOR < 64 || sizeof(W) < sizeof(real)) && R <= 2 && !ahead.by) __builtin_prefetch(w + (a + O) * ldw + k + u * LANES);
                UNROLL for (int r = 0; r < R; r++) sums[u][r][a] += wide * given[r];
            }
        }
    }
    next = ahead;
    UNROLL for (int r = 0; r < R; r++) {
        real values[O];
        UNROLL for (int u = 1; u < U; u++) UNROLL for (int a = 0; a < O; a++) sums[0][r][a] += sums[u][r][a];
        if constexpr (O == 4) sum4(sums[0][r], values);
        else for (int a = 0; a < O; a++) values[a] = sum(sums[0][r][a]);
        for (i64 rest = k; rest < part.to; rest++)
            for (int a = 0; a < O; a++) values[a] += one(w + a * ldw + rest) * x[r * ldx + rest];
        real* held = part.sums + (row + r) * O;
        if (part.at) UNROLL for (int a = 0; a < O; a++) values[a] += held[a];
        if (part.to < part.width) UNROLL for (int a = 0; a < O; a++) held[a] = values[a];
        else put<O>(o, row + r, column, values);
    }
}

#if VECTOR == 64
constexpr int MOST = 6;  // rows a tile: as many as there are registers for
#else
constexpr int MOST = 3;
#endif
constexpr int ROWS_OF_TILES = 48;  // fewer than that

// All rows against O outputs. The last tile has one row or two.
template <class W, int O>
static inline void rows_of(const W* w, i64 ldw, const real* x, i64 ldx, i64 rows, i64 width, const Out& o, i64 column) {
    i64 tiles = 0, left = rows;
    for (; left > MOST && left != 4; left -= MOST) tiles++;
    tiles += (left + 1) / 2;
    // Where tiles follow each other they read the same weights, which have to stay in the first-level cache.
    const i64 near = 32768 / (O * i64(sizeof(W)) + MOST * i64(sizeof(real))) / (4 * LANES) * (4 * LANES);
    const i64 parts = tiles > 1 ? (width + near - 1) / near : 1;
    real sums[ROWS_OF_TILES * O];
    Ahead ahead{(const char*)(w + O * ldw), tiles > 1 ? O * LANES * i64(sizeof(W)) / tiles : 0};
    for (i64 p = 0, at = 0; p < parts; p++) {
        const i64 to = p + 1 < parts ? width * (p + 1) / parts / LANES * LANES : width;
        const Part part{at, to, width, sums};
        i64 row = 0;
        for (; rows - row > MOST && rows - row != 4; row += MOST) tile<W, O, MOST, 1>(w, ldw, x + row * ldx, ldx, part, o, row, column, ahead);
        for (; rows - row >= 2; row += 2) tile<W, O, 2, 1>(w, ldw, x + row * ldx, ldx, part, o, row, column, ahead);
        if (row < rows) tile<W, O, 1, 2>(w, ldw, x + row * ldx, ldx, part, o, row, column, ahead);
        at = to;
    }
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
static inline void panel_tile(const real* panel, const real* x, i64 ldx, i64 width, const Out& o, i64 row, i64 column, i64 outs, Ahead& next) {
    Ahead ahead = next;
    vec sums[R][2];
    UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = vec{};
    for (i64 k = 0; k < width; k++) {
        ahead.go();
        const vec low = load(panel + k * PANEL), high = load(panel + k * PANEL + LANES);
        UNROLL for (int r = 0; r < R; r++) {
            const vec given = x[r * ldx + k] - vec{};
            sums[r][0] += low * given;
            sums[r][1] += high * given;
        }
    }
    next = ahead;
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
// `count` rows, 1 … R.
template <int R>
static void panel_rows(i64 count, const real* panel, const real* x, i64 ldx, i64 width, const Out& o, i64 row, i64 column, i64 outs, Ahead& ahead) {
    if (count == R) return panel_tile<R>(panel, x, ldx, width, o, row, column, outs, ahead);
    if constexpr (R > 1) panel_rows<R - 1>(count, panel, x, ldx, width, o, row, column, outs, ahead);
}

// Rows from which turning pays, by what the tiles of few rows have to widen again and again.
static inline i64 many(int form) { return VECTOR == 64 || form == WIDE ? ROWS_OF_TILES : form == BFLOAT16 ? TALL - 1 : 16; }
template <class W> constexpr int form_of = sizeof(W) == sizeof(real) ? WIDE : sizeof(W) == 2 ? BFLOAT16 : INT8;

// Outputs begin .. end of all rows.
template <class W>
static void product(const W* w, const real* x, i64 ldx, i64 rows, i64 width, const Out& o, i64 begin, i64 end, real* spare) {
    i64 c = begin;
    if (rows == 1) {
        Ahead none{nullptr, 0};
        const Part all{0, width, width, nullptr};
        for (; c + 4 <= end; c += 4) tile<W, 4, 1, 2>(w + c * width, width, x, ldx, all, o, 0, c, none);
        for (; c < end; c++) tile<W, 1, 1, 4>(w + c * width, width, x, ldx, all, o, 0, c, none);
        return;
    }
    if (rows < many(form_of<W>)) {
        for (; c + 4 <= end; c += 4) rows_of<W, 4>(w + c * width, width, x, ldx, rows, width, o, c);
        for (; c < end; c++) rows_of<W, 1>(w + c * width, width, x, ldx, rows, width, o, c);
        return;
    }
    i64 block = 98304 / (width * i64(sizeof(real)) / 4 + 1) / TALL * TALL;  // rows that stay in the second-level cache
    block = block < 4 * TALL ? 4 * TALL : block;
    for (i64 first = 0; first < rows; first += block) {
        const i64 last = first + block < rows ? first + block : rows;
        for (c = begin; c < end; c += PANEL) {
            const i64 outs = end - c < PANEL ? end - c : PANEL;
            turn(w + c * width, width, outs, width, spare);
            Ahead ahead{(const char*)(w + (c + PANEL) * width), PANEL * i64(sizeof(W)) * TALL / (last - first) + 1};
            const i64 tiles = (last - first + TALL - 1) / TALL;
            for (i64 t = 0; t < tiles; t++) {  // as high as each other: low ones wait for their own sums
                const i64 row = first + (last - first) * t / tiles, next = first + (last - first) * (t + 1) / tiles;
                panel_rows<TALL>(next - row, spare, x + row * ldx, ldx, width, o, row, c, outs, ahead);
            }
        }
    }
}
