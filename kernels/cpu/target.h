/* The target as Python describes it. Both sides compare the sizes of these structures when the library is opened. */
#ifndef HEDGEROW_TARGET_H
#define HEDGEROW_TARGET_H
#include "engine.h"

enum { PAGE = 64 };

typedef struct {
    const float *attention_norm, *mlp_norm, *q_norm, *kv_norm;
    const float *bias; /* [experts up to a multiple of 16]; 0 in a dense layer */
    Matrix qkv_a, q_b, uk, uv, o;
    Matrix router;             /* columns up to a multiple of 16 */
    Matrix gate_up, down;      /* the dense MLP or the shared expert; 16 gates and 16 ups in turn */
    Matrix experts_gate_up, experts_down;
} Layer;

typedef struct {
    int32_t layers, hidden, vocab, heads, nope, rope, value, q_rank, kv_rank;
    int32_t width, shared_width, experts, top_k, expert_width, normalise, positions, taps;
    int32_t ranks; /* that divide the model, each with its heads, widths and vocabulary: the sizes here are this one's */
    int32_t first_token, tokens; /* of this rank's vocabulary; of all */
    int32_t narrow;              /* the embedding is bfloat16, not float */
    float eps, latent_eps, softmax_scale, routed_scale;
    const int32_t *tapped;     /* [taps] layers */
    const Layer *layer;
    const void *embedding;
    const float *norm;
    const float *cos, *sin;    /* [positions][rope / 2] */
    int (*sum)(float *part, int64_t count); /* makes a part the sum of all ranks'; not 0: it could not. ranks > 1 */
    Matrix head;
} Model;

typedef struct {
    float *keys;    /* [layers][pages][kv_rank + rope][PAGE]: latent and rotated key, positions side by side */
    float *latents; /* [layers][pages][PAGE][kv_rank] */
    int64_t pages;
} Cache;

/* What is wrong with a plan: its field, the sequence and the row. */
enum { FINE, BAD_PLAN, BAD_PREFIX, BAD_ROWS, BAD_TOKEN, BAD_PARENT, BAD_PAGES, BAD_PAGE, BAD_WANT, BAD_POSITION };
enum { BAD_SLOT = 10, NO_MEMORY, NO_SUM };
typedef struct {
    int32_t code, sequence, row, value;
} Fault;

typedef struct {
    int prefix, rows, first, pages, wanted;
    const int32_t *tokens, *parents, *page, *want;
} Sequence;

typedef struct {
    int sequence, depth;
    int straight; /* ancestors at depths 0 .. straight - 1 are the rows of the same numbers */
} Row;

/* The rows of one call. */
typedef struct {
    int sequences, rows, wanted;
    Sequence *sequence;
    Row *row;
    int *want; /* [wanted] rows, ascending */
    long sequence_room, row_room, want_room;
} Plan;

/* Reads and checks `words`: the number of sequences; for each prefix, rows, pages, wanted; then for each its tokens,
 * parents, pages and wanted rows. FINE, or what is wrong. */
int plan_read(Plan *plan, const Model *m, int64_t pages, const int32_t *words, int64_t length, Fault *fault);
void plan_free(Plan *plan);
#endif
