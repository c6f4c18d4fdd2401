// One token a row in one group of heads.
#pragma once
#include "activations.h"
#include "list.h"

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
