/* The DFlash drafter as Python describes it. The sizes of these structures are compared when a library is opened. */
#ifndef HEDGEROW_DRAFTER_H
#define HEDGEROW_DRAFTER_H
#include "target.h"

typedef struct {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;
    const float *base[2]; /* of the convolutions around attention and MLP: [into it, out of it][taps][hidden] */
    Matrix qkv; /* columns: query heads, key heads, value heads */
    Matrix o, gate_up, down;
    Matrix conv[2]; /* columns: [into it, out of it][taps][groups], up to a multiple of 16 */
    int32_t window; /* keys that are less than this far away are seen; 0: all */
    int32_t causal; /* within the block */
} DraftLayer;

typedef struct {
    int32_t layers, hidden, vocab, heads, kv_heads, head_dim, width, block, mask_token, feature_width, positions;
    int32_t projected; /* features come through fc and context_norm already */
    int32_t taps, group; /* of DFlash 2's convolutions: rows that one reaches, channels that share a weight; 0: none */
    int32_t narrow;      /* the embedding is bfloat16, not float */
    float eps, scale;
    const DraftLayer *layer;
    const void *embedding;
    const float *context_norm, *norm;
    const float *cos, *sin; /* [positions + block][head_dim / 2] */
    Matrix fc, head;
} DraftModel;

/* A sequence in a layer: position p lies in page p / PAGE modulo `pages`, which hold all that is still seen. */
typedef struct {
    float *keys;   /* [kv_heads][pages][head_dim][PAGE] */
    float *values; /* [kv_heads][pages][PAGE][head_dim] */
    int64_t pages;
} DraftContext;

/* A sequence of a step: the anchor stands at `position`, the context is start .. end - 1, end at most `position`. */
typedef struct {
    int32_t anchor, position, start, end;
} DraftAsk;

enum { BAD_ANCHOR = 20, BAD_DRAFT_POSITION, BAD_CONTEXT };
#endif
