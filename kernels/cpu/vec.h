/* Vectors of the machine's width and the arithmetic that everything here is written in.
 *
 * No result depends on the width: lanes run over outputs, never over a sum, and sums over a row use 16 partial sums by
 * position modulo 16, folded in one order. Nor on the compiler: every fused multiply-add is written out, and the build
 * forbids the compiler to make others (-ffp-contract=off). Each operation is then one rounding of IEEE 754.
 */
#ifndef HEDGEROW_VEC_H
#define HEDGEROW_VEC_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__FMA__) && defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

#if defined(HEDGEROW_LANES) /* a width that the machine need not have, for tests */
enum { LANES = HEDGEROW_LANES };
#elif defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { PARTS = 16 / LANES }; /* vectors that hold 16 floats */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec spread(float a) { return a - (vec){0}; }

/* a * b + c, rounded once */
INLINE vec fma_vec(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    vec r; /* a machine without the instruction: the C library's fmaf, slow and equal in every bit */
    for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

/* where `mask` is set a, elsewhere b */
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* e^x to 2 ulp; 0 below -87 (so -inf gives 0) */
INLINE vec exp_vec(vec x) {
    const vec magic = spread(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ivec keep = x > spread(-87.0f);
    x = (vec)((ivec)x & keep);
    vec t = fma_vec(x, spread(1.44269504f), magic), n = t - magic;
    vec r = fma_vec(n, spread(-0.693359375f), x);
    r = fma_vec(n, spread(2.12194440e-4f), r);
    vec p = spread(1.9875691500e-4f);
    p = fma_vec(p, r, spread(1.3981999507e-3f));
    p = fma_vec(p, r, spread(8.3334519073e-3f));
    p = fma_vec(p, r, spread(4.1665795894e-2f));
    p = fma_vec(p, r, spread(1.6666665459e-1f));
    p = fma_vec(p, r, spread(5.0000001201e-1f));
    p = fma_vec(p, r * r, r) + spread(1.0f);
    return (vec)(((ivec)p + (ivec)((uvec)t << 23)) & keep);
}

INLINE vec sigmoid_vec(vec x) {
    const vec limit = spread(80.0f);
    x = choose(x < limit, x, limit);
    x = choose(x > -limit, x, -limit);
    return spread(1.0f) / (spread(1.0f) + exp_vec(-x));
}

/* Sum of 16 partial sums, in the one order */
INLINE float fold(const vec *partial) {
    float t[16];
    memcpy(t, partial, sizeof t);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) t[i] += t[i + n];
    return t[0];
}
#endif
