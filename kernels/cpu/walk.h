/* Draws and walks as Python describes them. The sizes of these structures are compared when a library is opened. */
#ifndef HEDGEROW_WALK_H
#define HEDGEROW_WALK_H
#include "engine.h"

/* One sequence's rows, `first` .. of the logits: the anchor, then a tree's nodes. Its law is that of kernels/sample.py:
 * row 0 draws the token of `position`, its children that of the next. */
typedef struct {
    uint64_t seed;
    double top_p;
    float temperature, min_p;
    int32_t top_k;
    uint32_t sample_index, position;
    int32_t first, rows, unused;
} Walk;

/* One sequence's tree: most nodes, most ranks at one depth (0: any number). */
typedef struct {
    int32_t budget, cap;
} TreeAsk;

/* A candidate selector (hedgerow/model/selector.py): codebooks [vocab][rank], projection [hidden][rank] */
typedef struct {
    const float *predecessor, *successor, *projection;
    int32_t rank, k, hidden, vocab;
} PairWeights;

/* trees.c */
int top_logprobs(const float *logits, int64_t rows, int vocab, int k, float *logprobs, int32_t *tokens);
float log_sum(const float *x, int n, float high); /* log of the sum of exp(x - high), n a multiple of 16 */

enum { BAD_WALK = 30, BAD_LOGITS, BAD_TREE };

double minus_log(double y); /* -log y of a positive normal number, to 2 ulp, also near 1 */
#endif
