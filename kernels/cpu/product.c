/* The matrix product: tiles of a few rows by a few vectors of columns that stay in registers over the whole of k. */
#include "engine.h"

enum { STRIDED = 3 };        /* F32 with a given distance between rows k */
enum { ROW_BLOCK = 6 };      /* rows of the tallest tile */
enum { AHEAD = 512 };        /* elements that are prefetched ahead */
enum { WIDE_ROWS = 19 };     /* from here on packed weights are widened once and used by all rows */
enum { WIDE_K = 256 };       /* k of one widened block: 16 columns of it fill half of the L1 cache */

INLINE int unit_columns(const int type) { return type == BF16 ? 2 * LANES : 16; }
INLINE int unit_vectors(const int type) { return type == BF16 ? 2 : PARTS; }

/* (q + 8) of a nibble and the scale give q * scale, rounded as a product is: 8 * scale is exact */
INLINE vec widen_nibble(uvec word, vec scale, vec minus_eight) {
#ifdef __AVX512F__
    return fma_vec((vec)_mm512_cvtepi32_ps((__m512i)(word & 15)), scale, minus_eight);
#elif defined(__AVX2__) && defined(__FMA__)
    return fma_vec((vec)_mm256_cvtepi32_ps((__m256i)(word & 15)), scale, minus_eight);
#else
    return fma_vec(__builtin_convertvector((ivec)(word & 15), vec), scale, minus_eight);
#endif
}

/* RB rows by UB units of columns. Called with constants only: a tile of variable size would live in memory. */
INLINE void tile(const int type, const int RB, const int UB, const char *w, long ks, const float *scales, int K,
                 const float *const *x, float *const *y, const int add) {
    const int VU = unit_vectors(type), VB = UB * VU;
    vec acc[ROW_BLOCK][8], b[8];
    if (add) { EACH(r, RB) EACH(v, VB) acc[r][v] = *(const vec *)(y[r] + LANES * v); }
    else { EACH(r, RB) EACH(v, VB) acc[r][v] = (vec){0}; }
    if (type == Q4) {
        for (int g = 0; g < K / 32; g++) {
            vec s[8], m[8];
            EACH(v, VB) {
                s[v] = *(const vec *)(scales + ((long)(v / VU) * (K / 32) + g) * 16 + v % VU * LANES);
                m[v] = s[v] * spread(-8.0f);
            }
            for (int n = 4 * g; n < 4 * g + 4; n++) {
                uvec words[8];
                EACH(v, VB) words[v] = *(const uvec *)((const uint32_t *)w + ((long)(v / VU) * (K / 8) + n) * 16 + v % VU * LANES);
                EACH(j, 8) {
                    EACH(v, VB) {
                        b[v] = widen_nibble(words[v], s[v], m[v]);
                        words[v] >>= 4;
                    }
                    EACH(r, RB) {
                        vec a = spread(x[r][8 * n + j]);
                        EACH(v, VB) acc[r][v] = fma_vec(a, b[v], acc[r][v]);
                    }
                }
            }
        }
    } else {
        for (int k = 0; k < K; k++) {
            if (type == BF16) {
                EACH(u, UB) {
                    const uint32_t *at = (const uint32_t *)w + ((long)u * K + k) * LANES;
                    if (RB < 3) __builtin_prefetch(at + AHEAD / 2);
                    uvec both = *(const uvec *)at;
                    b[2 * u] = (vec)(both << 16);
                    b[2 * u + 1] = (vec)(both & 0xffff0000u);
                }
            } else {
                EACH(v, VB) b[v] = *(const vec *)((const float *)w + (type == F32 ? ((long)(v / VU) * K + k) * 16 : k * ks + v / VU * 16) + v % VU * LANES);
            }
            EACH(r, RB) {
                vec a = spread(x[r][k]);
                EACH(v, VB) acc[r][v] = fma_vec(a, b[v], acc[r][v]);
            }
        }
    }
    EACH(r, RB) EACH(v, VB) *(vec *)(y[r] + LANES * v) = acc[r][v];
}

/* Units a tile of RB rows takes: 16 registers of 8 lanes, or 32 of 16 */
INLINE int units_of(const int type, const int RB) {
#ifdef __AVX512F__
    const int vectors = RB == 1 ? 8 : RB <= 3 && type != Q4 ? 8 : 4;
#else
    const int vectors = type == Q4 ? (RB == 1 ? 4 : 2) : RB == 1 ? 8 : RB <= 3 ? 4 : 2;
#endif
    return vectors / unit_vectors(type);
}

/* Where unit u of a matrix starts, in bytes */
INLINE long unit_bytes(const int type, int K) {
    return type == F32 ? (long)K * 64 : type == BF16 ? (long)K * LANES * 4 : type == Q4 ? (long)K * 8 : 64;
}

#define SPAN(RB, UB)                                                                                                    \
    for (; u + UB <= units; u += UB) {                                                                                  \
        float *ys[ROW_BLOCK];                                                                                           \
        EACH(r, RB) ys[r] = y[r] + (long)u * unit_columns(type);                                                        \
        tile(type, RB, UB, w + u * unit_bytes(type, K), ks, type == Q4 ? scales + (long)u * (K / 2) : 0, K, x, ys, add); \
    }
#define ROWS(RB)                                                                                                        \
    case RB: {                                                                                                          \
        const int UB = units_of(type, RB);                                                                              \
        SPAN(RB, UB)                                                                                                    \
        if (UB > 1) SPAN(RB, 1)                                                                                         \
    } break;

/* Up to ROW_BLOCK rows by `units` units */
INLINE void rows_of(const int type, const char *w, long ks, const float *scales, int K, int units, int rows,
                    const float *const *x, float *const *y, int add) {
    int u = 0;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
}

#define DEFINE(name, type)                                                                                              \
    static __attribute__((noinline)) void name(const char *w, long ks, const float *scales, int K, int units, int rows, \
                                               const float *const *x, float *const *y, int add) {                       \
        const int blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;                                                          \
        for (int b = 0; b < blocks; b++) {                                                                              \
            const int from = rows * b / blocks, n = rows * (b + 1) / blocks - from;                                     \
            rows_of(type, w, ks, scales, K, units, n, x + from, y + from, add);                                         \
        }                                                                                                               \
    }
DEFINE(product_f32, F32)
DEFINE(product_bf16, BF16)
DEFINE(product_q4, Q4)
DEFINE(product_rows, STRIDED)

void product_strided(const float *w, long stride, int k, int panels, int rows, const float *const *x, float *const *y,
                     int add) {
    product_rows((const char *)w, stride, 0, k, panels, rows, x, y, add);
}

void product(const Matrix *m, int from, int to, int rows, const float *const *x, float *const *y, int add) {
    if (from >= to || rows == 0) return;
    const int type = m->type, K = m->k, columns = unit_columns(type);
    const char *w = (const char *)m->data + from / columns * unit_bytes(type, K);
    if (type == F32) product_f32(w, 0, 0, K, (to - from) / columns, rows, x, y, add);
    else if (type == BF16) product_bf16(w, 0, 0, K, (to - from) / columns, rows, x, y, add);
    else product_q4(w, 0, m->scales + (long)(from / 16) * (K / 2), K, (to - from) / columns, rows, x, y, add);
}
