// What the step is given; field by field the structures of `isoform.native.program`.
#pragma once
#include "vectors.h"

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
