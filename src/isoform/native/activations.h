// Activations, those that are met most as loops over registers.
#pragma once
#include "vectors.h"

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

// erf x, within 1.3e-7: a polynomial below 1, and e^{-x²} times one in 1 / (1 + x / 2) above (least-squares fits).
static inline double error_function(double x) { return std::erf(x); }
static inline float error_function(float x) {
    const float u = x * x;
    float p = 7.889119297e-05f;
    p = p * u - 8.020841051e-04f;
    p = p * u + 5.189535208e-03f;
    p = p * u - 2.685444430e-02f;
    p = p * u + 1.128360033e-01f;
    p = p * u - 3.761262596e-01f;
    p = p * u + 1.128379107e+00f;
    const float size = x < 0 ? -x : x;
    const float t = 1.f / (1.f + 0.5f * size);
    float q = 1.728846692e-02f;
    q = q * t + 5.085222423e-02f;
    q = q * t - 3.534865081e-01f;
    q = q * t + 4.486707449e-01f;
    q = q * t - 3.448778018e-02f;
    q = q * t + 3.213485181e-01f;
    q = q * t + 2.659613490e-01f;
    q = q * t + 2.840694785e-01f;
    q = q * t - 1.050281062e-04f;
    const float far = 1.f - exponential(-size * size) * q;
    return size < 1.f ? x * p : x < 0 ? -far : far;
}
static inline real sigmoid(real x) { return 1 / (1 + exponential(-x)); }

// In the order of `isoform.nn.program.ACTIVATIONS`.
enum Act { IDENTITY, RELU, RELU_SQUARED, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH, ELU, LEAKY, SOFTPLUS,
           MISH, SOFTCAP };

template <int A> static inline real act(real x, real cap) {
    switch (A) {
        case RELU: return x < 0 ? real(0) : x;
        case RELU_SQUARED: { real y = x < 0 ? real(0) : x; return y * y; }
        case GELU: return x * real(0.5) * (1 + error_function(x * real(0.70710678118654752440)));
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
