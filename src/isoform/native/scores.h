// What is asked of the scores over the vocabulary.
#pragma once
#include <algorithm>
#include <omp.h>
#include "activations.h"

// log Σ e^x, as what is to be taken off one after the other.
struct LogSum { real most, rest; };
static LogSum log_sum(const real* x, i64 width) {
    real most = x[0];
    #pragma omp simd reduction(max:most)
    for (i64 i = 0; i < width; i++) most = x[i] > most ? x[i] : most;
    real total = 0;
    #pragma omp simd reduction(+:total)
    for (i64 i = 0; i < width; i++) total += exponential(x[i] - most);
    return {most, std::log(total)};
}

// log Σ e^x of every row.
extern "C" int isoform_log_sums(const real* x, i64 rows, i64 width, real* out, i64 given) {
    const i64 parts = rows < given ? rows : given;
    #pragma omp parallel num_threads(parts)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (i64 row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const LogSum off = log_sum(x + row * width, width);
            out[row] = off.most + off.rest;
        }
    }
    return 0;
}

// The k largest of base + x - off in descending order, equal ones by place; banned ones, ascending, are passed over.
static i64 largest(const real* x, i64 width, LogSum off, real base, const i64* banned, i64 n_banned, i64 k, real* values, i64* ids) {
    constexpr i64 PIECE = 64;  // elements whose maximum is looked at before they are
    const auto total = [=](real value) { return value - off.most - off.rest + base; };  // never falls as the value grows
    i64 n = 0;
    for (i64 first = 0; first < width; first += PIECE) {
        const i64 last = first + PIECE < width ? first + PIECE : width;
        if (n == k) {
            real most = x[first];
            #pragma omp simd reduction(max:most)
            for (i64 i = first; i < last; i++) most = x[i] > most ? x[i] : most;
            if (!(total(most) > values[k - 1])) continue;
        }
        for (i64 i = first; i < last; i++) {
            const real value = total(x[i]);
            if (!(value > (n == k ? values[k - 1] : -INFINITY)) || std::binary_search(banned, banned + n_banned, i)) continue;
            i64 at = n < k ? n++ : k - 1;
            for (; at > 0 && values[at - 1] < value; at--) { values[at] = values[at - 1]; ids[at] = ids[at - 1]; }
            values[at] = value; ids[at] = i;
        }
    }
    return n;
}

// The k largest of base + log-probability of every row, and whose they are.
extern "C" int isoform_best(const real* x, const real* base, i64 rows, i64 width, const i64* banned, i64 n_banned, i64 k,
                            real* values, i64* ids, i64 given) {
    const i64 parts = rows < given ? rows : given;
    #pragma omp parallel num_threads(parts)
    {
        const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (i64 row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const LogSum off = log_sum(x + row * width, width);
            real* to = values + row * k;
            i64* of = ids + row * k;
            i64 n = largest(x + row * width, width, off, base[row], banned, n_banned, k, to, of);
            // In a row with NaN nothing is larger than anything, and all that is left says so.
            const real none = off.rest - off.rest != 0 ? off.rest : -INFINITY;
            for (; n < k; n++) { to[n] = none; of[n] = 0; }
        }
    }
    return 0;
}
