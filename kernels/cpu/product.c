/* The matrix product: tiles of a few rows by a few vectors of columns that stay in registers over the whole of k. */
#include "engine.h"

enum { STRIDED = 3 };        /* F32 with a given distance between rows k */
enum { ROW_BLOCK = 6 };      /* rows of the tallest tile */
enum { ROW_BLOCK_PAGE = LANES == 16 ? 6 : 3 }; /* and of a page of the cache: what 32 registers, or 16, hold */
enum { AHEAD = 16, AHEAD_PAGE = 32 };          /* cache lines that are prefetched ahead, and rows of a page */
enum { AHEAD_Q4 = 64 };      /* and of 4-bit words, which take longer to widen */
enum { NEAR = 64 << 10 };    /* bytes of units that stay near while all rows pass */
enum { WIDE_ROWS = 4 };      /* from here on 4-bit words are widened once, into the L1 cache, and used by all rows */
enum { WIDE_UNITS = LANES / 8, WIDE_K = 384 }; /* units and k of a block */

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

/* Vector v of a tile's columns at k, as floats. bfloat16 vectors come in pairs, from one vector of words. */
INLINE vec column(const int type, const char *w, long ks, int K, int k, int v) {
    if (type == BF16) {
        const uvec both = *(const uvec *)((const uint32_t *)w + ((long)(v / 2) * K + k) * LANES);
        return v % 2 ? (vec)(both & 0xffff0000u) : (vec)(both << 16);
    }
    const long at = type == F32 ? ((long)(v / PARTS) * K + k) * 16 : k * ks + v / PARTS * 16;
    return *(const vec *)((const float *)w + at + v % PARTS * LANES);
}

/* The multiply-adds of one k: x[r][k] times the tile's columns b */
#define STEP(k)                                                           \
    EACH(r, RB) {                                                         \
        const vec a = spread(x[r][k]);                                    \
        EACH(v, VB) acc[r][v] = fma_vec(a, b[v], acc[r][v]);              \
    }

/* RB rows by UB units of columns. Called with constants only: a tile of variable size would live in memory. */
INLINE void tile(const int type, const int RB, const int UB, const char *w, long ks, const float *scales, int K,
                 const float *const *x, float *const *y, const int add) {
    const int VU = unit_vectors(type), VB = UB * VU;
    vec acc[ROW_BLOCK][8], b[8];
    EACH(r, RB) EACH(v, VB) acc[r][v] = add ? *(const vec *)(y[r] + LANES * v) : (vec){0};
    if (type == Q4) {
        for (int g = 0; g < K / 32; g++) {
            vec s[8], m[8];
            EACH(u, UB) __builtin_prefetch(scales + ((long)u * (K / 32) + g + AHEAD_Q4 / 4) * 16);
            EACH(v, VB) {
                s[v] = *(const vec *)(scales + ((long)(v / VU) * (K / 32) + g) * 16 + v % VU * LANES);
                m[v] = s[v] * spread(-8.0f);
            }
            for (int n = 4 * g; n < 4 * g + 4; n++) {
                uvec words[8];
                EACH(u, UB) __builtin_prefetch((const uint32_t *)w + ((long)u * (K / 8) + n + AHEAD_Q4) * 16);
                EACH(v, VB) {
                    const long at = ((long)(v / VU) * (K / 8) + n) * 16 + v % VU * LANES;
                    words[v] = *(const uvec *)((const uint32_t *)w + at);
                }
                EACH(j, 8) {
                    EACH(v, VB) {
                        b[v] = widen_nibble(words[v], s[v], m[v]);
                        words[v] >>= 4;
                    }
                    STEP(8 * n + j)
                }
            }
        }
    } else {
        for (int k = 0; k < K; k++) {
            if (type == BF16)
                EACH(u, UB) __builtin_prefetch((const uint32_t *)w + ((long)u * K + k) * LANES + AHEAD * 16);
            if (type == STRIDED) EACH(u, UB) __builtin_prefetch((const float *)w + (k + AHEAD_PAGE) * ks + u * 16);
            EACH(v, VB) b[v] = column(type, w, ks, K, k, v);
            STEP(k)
        }
    }
    EACH(r, RB) EACH(v, VB) *(vec *)(y[r] + LANES * v) = acc[r][v];
}

/* Units a tile of RB rows takes: 16 registers of 8 lanes, or 32 of 16 */
INLINE int units_of(const int type, const int RB) {
    const int wide = RB == 1 ? 8 : RB <= 3 && type != Q4 ? 8 : 4;
    const int narrow = type == Q4 ? (RB == 1 ? 4 : 2) : RB == 1 ? 8 : RB == 2 || (RB == 3 && type != BF16) ? 4 : 2;
    return (LANES == 16 ? wide : narrow) / unit_vectors(type);
}

/* Rows of the tallest tile: of 4-bit words more are widened, see below */
INLINE int tallest(const int type) {
    return type == Q4 ? WIDE_ROWS - 1 : type == STRIDED ? ROW_BLOCK_PAGE : ROW_BLOCK;
}

/* Where unit u of a matrix starts, in bytes */
INLINE long unit_bytes(const int type, int K) {
    return type == F32 ? 64L * K : type == BF16 ? 4L * LANES * K : type == Q4 ? 8L * K : 64;
}

/* As many tiles of RB rows by UB units as there are */
#define SPAN(RB, UB)                                                                \
    for (; u + UB <= units; u += UB) {                                              \
        const float *scale = type == Q4 ? scales + (long)u * (K / 2) : 0;           \
        float *ys[ROW_BLOCK];                                                       \
        EACH(r, RB) ys[r] = y[r] + at + (long)u * unit_columns(type);               \
        tile(type, RB, UB, w + u * unit_bytes(type, K), ks, scale, K, x, ys, add);  \
    }
#define ROWS(RB)                                                                    \
    case RB: {                                                                      \
        const int UB = units_of(type, RB);                                          \
        if (RB > tallest(type)) break; /* never */                                  \
        SPAN(RB, UB)                                                                \
        if (UB > 4) SPAN(RB, 4) /* a page has 4 units of keys */                    \
        if (UB > 2) SPAN(RB, 2)                                                     \
        if (UB > 1) SPAN(RB, 1)                                                     \
    } break;

/* Up to ROW_BLOCK rows by `units` units */
INLINE void rows_of(const int type, const char *w, long ks, const float *scales, int K, int units, int rows,
                    const float *const *x, float *const *y, long at, int add) {
    int u = 0;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
}

/* k of [from, to) of one unit of 4-bit words, as an F32 unit */
static void widen(const uint32_t *words, const float *scales, int from, int to, float *out) {
    for (int g = from / 32; g < to / 32; g++)
        EACH(p, PARTS) {
            const vec s = *(const vec *)(scales + g * 16 + p * LANES), m = s * spread(-8.0f);
            for (int n = 4 * g; n < 4 * g + 4; n++) {
                uvec word = *(const uvec *)(words + n * 16 + p * LANES);
                EACH(j, 8) {
                    *(vec *)(out + (8 * n + j - from) * 16 + p * LANES) = widen_nibble(word, s, m);
                    word >>= 4;
                }
            }
        }
}

/* Blocks of rows pass over a few units at a time, which only the first of them has to fetch from far. bfloat16 takes
 * its tallest tiles first: they hide what widening costs. */
#define DEFINE(name, type)                                                                              \
    static __attribute__((noinline)) void name(const char *w, long ks, const float *scales, int K,      \
                                               int units, int rows, const float *const *x,              \
                                               float *const *y, int add) {                              \
        const int near = type == STRIDED ? units : MOST(8, NEAR / (int)unit_bytes(type, K));            \
        const int blocks = (rows + tallest(type) - 1) / tallest(type);                                  \
        for (int u = 0; u < units; u += near) {                                                         \
            const int some = units - u < near ? units - u : near;                                       \
            const char *at = w + u * unit_bytes(type, K);                                               \
            const float *scale = type == Q4 ? scales + (long)u * (K / 2) : 0;                           \
            for (int b = 0; b < blocks; b++) {                                                          \
                const int from = type == BF16 ? b * tallest(type) : rows * b / blocks;                  \
                const int until = type == BF16 ? from + tallest(type) : rows * (b + 1) / blocks;        \
                const int n = (until < rows ? until : rows) - from;                                     \
                rows_of(type, at, ks, scale, K, some, n, x + from, y + from,                            \
                        (long)u * unit_columns(type), add);                                             \
            }                                                                                           \
        }                                                                                               \
    }
DEFINE(product_f32, F32)
DEFINE(product_bf16, BF16)
DEFINE(product_q4, Q4)
DEFINE(product_rows, STRIDED)

/* Many rows by 4-bit words: every block of them is widened once. y carries the chains from block to block. */
static void product_wide(const char *w, const float *scales, int K, int units, int rows, const float *const *x,
                         float *const *y, int add) {
    float block[WIDE_UNITS * WIDE_K * 16] __attribute__((aligned(64)));
    const float *xs[rows];
    float *ys[rows];
    for (int u = 0; u < units; u += WIDE_UNITS) {
        const int some = units - u < WIDE_UNITS ? units - u : WIDE_UNITS;
        for (int r = 0; r < rows; r++) ys[r] = y[r] + 16L * u;
        for (int k = 0; k < K; k += WIDE_K) {
            const int until = K - k < WIDE_K ? K : k + WIDE_K;
            for (int i = 0; i < some; i++)
                widen((const uint32_t *)(w + (u + i) * unit_bytes(Q4, K)), scales + (long)(u + i) * (K / 2), k, until,
                      block + (long)i * (until - k) * 16);
            for (int r = 0; r < rows; r++) xs[r] = x[r] + k;
            product_f32((const char *)block, 0, 0, until - k, some, rows, xs, ys, add || k);
        }
    }
}

void product_strided(const float *w, long stride, int k, int panels, int rows, const float *const *x, float *const *y,
                     int add) {
    product_rows((const char *)w, stride, 0, k, panels, rows, x, y, add);
}

void product(const Matrix *m, int from, int to, int rows, const float *const *x, float *const *y, int add) {
    if (from >= to || rows == 0) return;
    const int type = m->type, K = m->k, columns = unit_columns(type), units = (to - from) / columns;
    const char *w = (const char *)m->data + from / columns * unit_bytes(type, K);
    const float *scales = type == Q4 ? m->scales + (long)(from / 16) * (K / 2) : 0;
    if (type == F32) product_f32(w, 0, 0, K, units, rows, x, y, add);
    else if (type == BF16) product_bf16(w, 0, 0, K, units, rows, x, y, add);
    else if (rows < WIDE_ROWS) product_q4(w, 0, scales, K, units, rows, x, y, add);
    else product_wide(w, scales, K, units, rows, x, y, add);
}
