/* What the parts of the engine share: matrices and their product, row functions, threads. */
#ifndef HEDGEROW_ENGINE_H
#define HEDGEROW_ENGINE_H
#include "vec.h"
#include <stdlib.h>

/* A weight matrix, packed for the product:
 *   F32   [N/16][K][16] float
 *   BF16  [N/(2 LANES)][K][LANES] words; low half column n, high half column n + LANES
 *   Q4    words [N/16][K/8][16], nibble j = q + 8 at k = 8 w + j; scales [N/16][K/32][16]; value q * scale, unrounded
 */
enum { F32, BF16, Q4 };
typedef struct {
    int32_t type, k, n, unused;
    const void *data;
    const float *scales;
} Matrix;

/* y[r][0 ..] = (add ? y : 0) + sum over k, ascending, of x[r][k] * columns [from, to): one chain of multiply-adds for
 * each element, so that it depends neither on the other rows nor on how rows and columns are grouped. */
void product(const Matrix *m, int from, int to, int rows, const float *const *x, float *const *y, int add);

/* The same over a float matrix in another layout: column 16 p + i of row k is w[k * stride + 16 p + i]. */
void product_strided(const float *w, long stride, int k, int panels, int rows, const float *const *x, float *const *y,
                     int add);

/* Threads that sleep between steps and, in a step, wait for each other asleep after a short look. */
typedef struct Pool Pool;
typedef void (*Work)(void *argument, int id, int threads);
Pool *pool_open(int threads); /* 0: they could not be started */
void pool_close(Pool *pool);
int pool_size(const Pool *pool);
void pool_run(Pool *pool, Work work, void *argument, int threads); /* the caller is thread 0 */
void pool_wait(Pool *pool, int threads);                           /* until all threads of the step are here */

#define SHARE(n, from, to) const int from = (int)((long)(n) * id / threads), to = (int)((long)(n) * (id + 1) / threads)

/* This thread's columns of n, in whole units of any matrix that may be cut there */
#define COLUMNS(n, from, to)                                                                            \
    const int grain_##from = (n) % 32 ? 16 : 32;                                                        \
    const int from = (int)((long)(n) / grain_##from * id / threads) * grain_##from,                     \
              to = (int)((long)(n) / grain_##from * (id + 1) / threads) * grain_##from
/* Where each of n rows is */
#define POINT(list, r, n, where) for (int r = 0; r < (n); r++) (list)[r] = (where)

#define MOST(a, b) ((a) > (b) ? (a) : (b))

/* Blocks of memory that live and go together. */
typedef struct {
    void **block;
    int blocks;
} Memory;

/* A block of whole cache lines; 0, and not counted, where there is none. */
INLINE void *take(Memory *m, size_t bytes) {
    void **more = realloc(m->block, sizeof(void *) * (size_t)(m->blocks + 1));
    if (!more) return 0;
    m->block = more;
    void *fresh = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (fresh) m->block[m->blocks++] = fresh;
    return fresh;
}

INLINE void give_back(Memory *m) {
    for (int i = 0; i < m->blocks; i++) free(m->block[i]);
    free(m->block);
}

/* Row `row` of a table of `n` columns, of bfloat16 where it is `narrow`, as floats */
INLINE void table_row(const void *table, int narrow, long row, int n, float *out) {
    if (!narrow) {
        memcpy(out, (const float *)table + row * n, sizeof(float) * (size_t)n);
        return;
    }
    const uint16_t *from = (const uint16_t *)table + row * n;
    for (int i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

/* ---- functions of one row; lengths are multiples of 16 ----------------------------------------------------------- */
INLINE void rms_norm(const float *x, const float *weight, float *y, int n, float eps) {
    vec s[PARTS] = {{0}};
    for (int i = 0; i < n; i += 16)
        EACH(p, PARTS) {
            vec a = *(const vec *)(x + i + p * LANES);
            s[p] = fma_vec(a, a, s[p]);
        }
    vec inverse = spread(1.0f / sqrtf(fold(s) / (float)n + eps));
    for (int i = 0; i < n; i += LANES) *(vec *)(y + i) = *(const vec *)(x + i) * inverse * *(const vec *)(weight + i);
}

/* [gate 16 | up 16] in turn, `panels` times -> silu(gate) * up * weight, into the gates' places */
INLINE void swiglu(float *gu, int panels, float weight) {
    for (int p = 0; p < panels; p++)
        EACH(i, PARTS) {
            float *at = gu + 32 * p + i * LANES;
            vec g = *(const vec *)at, u = *(const vec *)(at + 16);
            *(vec *)at = g * sigmoid_vec(g) * u * spread(weight);
        }
}

/* The gates' places of `swiglu`, side by side */
INLINE void gather_gates(const float *gu, float *out, int panels) {
    for (int p = 0; p < panels; p++) memcpy(out + 16 * p, gu + 32 * p, 16 * sizeof(float));
}

/* Softmax without its division: exponentials in place, 1 / sum returned. `s` has room to the next multiple of 16. */
INLINE float soften(float *s, int n) {
    const int m = (n + 15) / 16 * 16;
    for (int i = n; i < m; i++) s[i] = -INFINITY;
    vec top = *(const vec *)s;
    for (int i = LANES; i < m; i += LANES) {
        vec a = *(const vec *)(s + i);
        top = choose(a > top, a, top);
    }
    float high = top[0];
    for (int i = 1; i < LANES; i++) high = top[i] > high ? top[i] : high;
    vec sum[PARTS] = {{0}};
    for (int i = 0; i < m; i += 16)
        EACH(p, PARTS) {
            vec e = exp_vec(*(const vec *)(s + i + p * LANES) - spread(high));
            *(vec *)(s + i + p * LANES) = e;
            sum[p] += e;
        }
    return 1.0f / fold(sum);
}
#endif
