// One token a row through a decoder, as a list of operations that threads walk through together.
//
// `isoform.nn.lower` writes the list; `isoform.native.library` compiles this file for the machine it is on.
// REAL is float, or double. Weights lie row by row, [out][in], as they are stored, but those of `eights.h`.
// Threads are OpenMP's, so that they are the ones PyTorch keeps, and no two pools wait for the same cores.

#include <omp.h>
#include "attention.h"
#include "eights.h"
#include "scores.h"

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
