/* The drafter: features into a sequence's context, and the logits of one block for each of many sequences. */
#include "drafter.h"
#include "walk.h"
#include <stdlib.h>

enum { ROWS = 64 }; /* that go through all layers together, or one block if that is larger */

typedef struct {
    float *h, *packed, *keys, *near, *scores; /* [rows]; a block's keys [head_dim][near]; its scores [queries][near] */
    long scores_room;
    const float **xs;
    float **ys;
} Scratch;

typedef struct {
    DraftModel m;
    Pool *pool;
    int rows, near; /* rows of a tile; the block up to a multiple of 16 */
    float *x, *qkv, *o, *gate_up;
    float *kernel, *delta; /* of convolutions: [rows][conv.n], and what a half gives, [rows][hidden] */
    Scratch *scratch;
    Memory memory;
    /* the step or the append that runs */
    const DraftContext *context; /* [sequences][layers] */
    const DraftAsk *ask;
    int sequences;
    const float *features;
    int new_rows, position;
    float *logits, *hidden;
} Drafter;

#define FLOATS(n) take(&t->memory, sizeof(float) * (size_t)(n))

static int queries_of(const DraftModel *m) { return m->block * (m->heads / m->kv_heads); }
static long qkv_width(const DraftModel *m) { return (long)(m->heads + 2 * m->kv_heads) * m->head_dim; }

void drafter_close(Drafter *t) {
    for (int id = 0; t->scratch && id < pool_size(t->pool); id++) free(t->scratch[id].scores);
    if (t->pool) pool_close(t->pool);
    give_back(&t->memory);
    free(t);
}

/* What `m` points to must outlive it. 0: no memory or no threads. */
Drafter *drafter_open(const DraftModel *m, int threads) {
    Drafter *t = calloc(1, sizeof *t);
    if (!t) return 0;
    t->m = *m;
    t->rows = MOST(ROWS, m->block);
    t->near = (m->block + 15) / 16 * 16;
    t->pool = pool_open(threads);
    int whole = t->pool != 0;
    if (whole) {
        const long R = t->rows, pointers = MOST(R, queries_of(m));
        t->x = FLOATS(R * m->hidden);
        t->qkv = FLOATS(R * qkv_width(m));
        t->o = FLOATS(R * m->heads * m->head_dim);
        t->gate_up = FLOATS(R * 2 * m->width);
        if (m->taps) {
            t->kernel = FLOATS(R * m->layer->conv[0].n);
            t->delta = FLOATS(R * m->hidden);
        }
        t->scratch = take(&t->memory, sizeof(Scratch) * (size_t)threads);
        if (t->scratch) memset(t->scratch, 0, sizeof(Scratch) * (size_t)threads);
        for (int id = 0; t->scratch && id < threads; id++) {
            Scratch *s = t->scratch + id;
            s->h = FLOATS(R * m->hidden);
            s->packed = FLOATS(R * m->width);
            s->keys = FLOATS((long)m->head_dim * t->near);
            s->near = FLOATS((long)queries_of(m) * t->near);
            s->xs = take(&t->memory, sizeof(float *) * (size_t)pointers);
            s->ys = take(&t->memory, sizeof(float *) * (size_t)pointers);
        }
        whole = t->memory.blocks == 5 + 2 * (m->taps > 0) + 6 * threads;
    }
    if (whole) return t;
    drafter_close(t);
    return 0;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */
static void rope(const DraftModel *m, float *v, int position) {
    const int half = m->head_dim / 2;
    const float *cos = m->cos + (long)position * half, *sin = m->sin + (long)position * half;
    for (int i = 0; i < half; i++) {
        const float a = v[i], b = v[i + half];
        v[i] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
        v[i + half] = __builtin_fmaf(b, cos[i], a * sin[i]);
    }
}

static void normed(const Drafter *t, Scratch *w, int rows, const float *weight) {
    for (int r = 0; r < rows; r++) {
        w->xs[r] = w->h + (long)r * t->m.hidden;
        rms_norm(t->x + (long)r * t->m.hidden, weight, w->h + (long)r * t->m.hidden, t->m.hidden, t->m.eps);
    }
}

static const float *keys_of(const Drafter *t, const DraftContext *c, int head, long page) {
    return c->keys + (head * c->pages + page % c->pages) * t->m.head_dim * PAGE;
}
static const float *values_of(const Drafter *t, const DraftContext *c, int head, long page) {
    return c->values + (head * c->pages + page % c->pages) * t->m.head_dim * PAGE;
}

/* ---- new context: keys and values of the features' positions, in every layer ------------------------------------- */
static void append(void *drafter, int id, int threads) {
    Drafter *t = drafter;
    const DraftModel *m = &t->m;
    Scratch *w = t->scratch + id;
    const int n = t->new_rows, d = m->head_dim, first = m->heads * d;
    const long width = qkv_width(m);
    if (m->projected) {
        memcpy(w->h, t->features, sizeof(float) * (size_t)n * (size_t)m->hidden);
    } else {
        COLUMNS(m->hidden, x0, x1);
        POINT(w->xs, r, n, t->features + (long)r * m->feature_width);
        POINT(w->ys, r, n, t->x + (long)r * m->hidden + x0);
        product(&m->fc, x0, x1, n, w->xs, w->ys, 0);
        pool_wait(t->pool, threads);
        normed(t, w, n, m->context_norm);
    }
    SHARE(m->kv_heads, g0, g1);
    for (int layer = 0; layer < m->layers; layer++) {
        const DraftLayer *l = m->layer + layer;
        const DraftContext *c = t->context + layer;
        POINT(w->xs, r, n, w->h + (long)r * m->hidden);
        COLUMNS(2 * m->kv_heads * d, a0, a1);
        POINT(w->ys, r, n, t->qkv + r * width + first + a0);
        product(&l->qkv, first + a0, first + a1, n, w->xs, w->ys, 0);
        pool_wait(t->pool, threads);
        for (int g = g0; g < g1; g++)
            for (int r = 0; r < n; r++) {
                const int position = t->position + r, at = position % PAGE;
                float *k = t->qkv + r * width + first + (long)g * d;
                float *keys = (float *)keys_of(t, c, g, position / PAGE) + at;
                rms_norm(k, l->k_norm, k, d, m->eps);
                rope(m, k, position);
                for (int i = 0; i < d; i++) keys[(long)i * PAGE] = k[i];
                float *value = (float *)values_of(t, c, g, position / PAGE) + (long)at * d;
                memcpy(value, k + (long)m->kv_heads * d, sizeof(float) * (size_t)d);
            }
        pool_wait(t->pool, threads);
    }
}

/* Features [n][feature_width] of positions from `position` on into `context` [layers], which has room for them. */
int drafter_append(Drafter *t, const DraftContext *context, const float *features, int n, int position, int threads) {
    if (n < 0 || position < 0 || (int64_t)position + n > t->m.positions) return BAD_DRAFT_POSITION;
    for (int l = 0; l < t->m.layers; l++)
        if (context[l].pages < 1) return BAD_CONTEXT;
    for (int from = 0; from < n; from += t->rows) {
        t->context = context;
        t->features = features + (long)from * t->m.feature_width;
        t->position = position + from;
        t->new_rows = n - from < t->rows ? n - from : t->rows;
        pool_run(t->pool, append, t, threads);
    }
    return FINE;
}

/* ---- a block ----------------------------------------------------------------------------------------------------- */

/* Query heads of key head g in sequence s of the tile: over the context that they see, then the block. */
static void attend(Drafter *t, Scratch *w, int layer, int s, int g) {
    const DraftModel *m = &t->m;
    const DraftLayer *l = m->layer + layer;
    const DraftContext *c = t->context + (long)s * m->layers + layer;
    const DraftAsk *ask = t->ask + s;
    const int d = m->head_dim, B = m->block, G = m->heads / m->kv_heads, n = B * G, near = t->near;
    const long width = qkv_width(m), P = ask->position;
    float *rows = t->qkv + (long)s * B * width;
    const long seen = l->window && P - l->window + 1 > ask->start ? P - l->window + 1 : ask->start; /* by row 0 */
    const long first = seen / PAGE, far = ask->end > seen ? ask->end - first * PAGE : 0;
    const long stride = (far + PAGE + near) / PAGE * PAGE + PAGE + 16;
    for (int b = 0; b < B; b++) {
        float *k = rows + b * width + (long)(m->heads + g) * d;
        rms_norm(k, l->k_norm, k, d, m->eps);
        rope(m, k, (int)P + b);
        for (int i = 0; i < d; i++) w->keys[(long)i * near + b] = k[i];
        for (int i = 0; i < G; i++) {
            float *q = rows + b * width + ((long)g * G + i) * d;
            rms_norm(q, l->q_norm, q, d, m->eps);
            rope(m, q, (int)P + b);
            for (int j = 0; j < d; j++) q[j] *= m->scale;
            w->xs[b * G + i] = q;
        }
    }
    POINT(w->ys, i, n, w->near + (long)i * near);
    product_strided(w->keys, near, d, near / 16, n, w->xs, w->ys, 0);
    for (long at = 0; at < far; at += PAGE) {
        POINT(w->ys, i, n, w->scores + i * stride + at);
        product_strided(keys_of(t, c, g, first + at / PAGE), PAGE, d, PAGE / 16, n, w->xs, w->ys, 0);
    }
    float inverse[n];
    for (int i = 0; i < n; i++) {
        float *score = w->scores + i * stride;
        const int row = i / G;
        long low = l->window && P + row - l->window + 1 > ask->start ? P + row - l->window + 1 : ask->start;
        low = low - first * PAGE < far ? low - first * PAGE : far;
        for (long j = 0; j < low; j++) score[j] = -INFINITY;
        for (int b = 0; b < B; b++) {
            const int apart = b > row ? b - row : row - b;
            const int hidden = (l->causal && b > row) || (l->window && apart >= l->window);
            score[far + b] = hidden ? -INFINITY : w->near[(long)i * near + b];
        }
        inverse[i] = soften(score, (int)far + B);
        w->ys[i] = t->o + ((long)s * B + row) * m->heads * d + ((long)g * G + i % G) * d;
        memset(w->ys[i], 0, sizeof(float) * (size_t)d);
    }
    for (long at = 0; at < far; at += PAGE) {
        POINT(w->xs, i, n, w->scores + i * stride + at);
        const int some = far - at < PAGE ? (int)(far - at) : PAGE;
        product_strided(values_of(t, c, g, first + at / PAGE), d, some, d / 16, n, w->xs, w->ys, 1);
    }
    POINT(w->xs, i, n, w->scores + i * stride + far);
    product_strided(rows + (long)(m->heads + m->kv_heads + g) * d, width, B, d / 16, n, w->xs, w->ys, 1);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < d; j++) w->ys[i][j] *= inverse[i];
}

/* ---- DFlash 2's convolutions: hedgerow/model/convolution.py ------------------------------------------------------- */

/* out = the sum over taps o of (base[o] + kernel[o, group]) * x[-o], where x has `before` rows of its block above it */
static void convolved(const DraftModel *m, const float *base, const float *kernel, const float *x, int before,
                      float *out) {
    const int H = m->hidden, groups = H / m->group, taps = before + 1 < m->taps ? before + 1 : m->taps;
    for (int g = 0; g < groups; g++)
        for (int i = g * m->group; i < (g + 1) * m->group; i++) {
            float sum = (base[i] + kernel[g]) * x[i];
            for (int o = 1; o < taps; o++)
                sum = __builtin_fmaf(base[o * H + i] + kernel[o * groups + g], x[i - (long)o * H], sum);
            out[i] = sum;
        }
}

/* What goes into a half, in place of the normed rows; a row needs those above it, so the last comes first. */
static void convolve_in(Drafter *t, Scratch *w, const DraftLayer *l, int half, int R, int id, int threads) {
    const DraftModel *m = &t->m;
    if (!m->taps) return;
    const long n = l->conv[half].n;
    COLUMNS((int)n, c0, c1);
    POINT(w->ys, r, R, t->kernel + r * n + c0);
    product(&l->conv[half], c0, c1, R, w->xs, w->ys, 0);
    pool_wait(t->pool, threads);
    for (int r = R - 1; r >= 0; r--) {
        float *row = w->h + (long)r * m->hidden;
        convolved(m, l->base[half], t->kernel + r * n, row, r % m->block, row);
    }
}

/* x += this half's product of `xs`, through its convolution where there is one */
static void add_half(Drafter *t, Scratch *w, const DraftLayer *l, int half, int R, int id, int threads) {
    const DraftModel *m = &t->m;
    const Matrix *last = half ? &l->down : &l->o;
    const int H = m->hidden;
    COLUMNS(H, x0, x1);
    POINT(w->ys, r, R, (m->taps ? t->delta : t->x) + (long)r * H + x0);
    product(last, x0, x1, R, w->xs, w->ys, !m->taps);
    if (!m->taps) return;
    pool_wait(t->pool, threads);
    const long n = l->conv[half].n, out = (long)m->taps * (H / m->group);
    SHARE(R, r0, r1);
    for (int r = r0; r < r1; r++) {
        float *sum = w->h, *x = t->x + (long)r * H;
        convolved(m, l->base[half] + (long)m->taps * H, t->kernel + r * n + out, t->delta + (long)r * H, r % m->block,
                  sum);
        for (int i = 0; i < H; i++) x[i] += sum[i];
    }
}

static void step(void *drafter, int id, int threads) {
    Drafter *t = drafter;
    const DraftModel *m = &t->m;
    Scratch *w = t->scratch + id;
    const int B = m->block, R = t->sequences * B, H = m->hidden, W = m->width;
    const long width = qkv_width(m);
    SHARE(R, r0, r1);
    for (int r = r0; r < r1; r++) {
        const long token = r % B ? m->mask_token : t->ask[r / B].anchor;
        table_row(m->embedding, m->narrow, token, H, t->x + (long)r * H);
    }
    for (int layer = 0; layer < m->layers; layer++) {
        const DraftLayer *l = m->layer + layer;
        pool_wait(t->pool, threads);
        normed(t, w, R, l->input_norm);
        convolve_in(t, w, l, 0, R, id, threads);
        COLUMNS((int)width, a0, a1);
        POINT(w->ys, r, R, t->qkv + r * width + a0);
        product(&l->qkv, a0, a1, R, w->xs, w->ys, 0);
        pool_wait(t->pool, threads);
        SHARE(t->sequences * m->kv_heads, u0, u1);
        for (int u = u0; u < u1; u++) attend(t, w, layer, u / m->kv_heads, u % m->kv_heads);
        pool_wait(t->pool, threads);
        POINT(w->xs, r, R, t->o + (long)r * m->heads * m->head_dim);
        add_half(t, w, l, 0, R, id, threads);
        pool_wait(t->pool, threads);
        normed(t, w, R, l->mlp_norm);
        convolve_in(t, w, l, 1, R, id, threads);
        COLUMNS(2 * W, g0, g1);
        POINT(w->ys, r, R, t->gate_up + (long)r * 2 * W + g0);
        product(&l->gate_up, g0, g1, R, w->xs, w->ys, 0);
        for (int r = 0; r < R; r++) swiglu(w->ys[r], (g1 - g0) / 32, 1.0f);
        pool_wait(t->pool, threads);
        for (int r = 0; r < R; r++) gather_gates(t->gate_up + (long)r * 2 * W, w->packed + (long)r * W, W / 16);
        POINT(w->xs, r, R, w->packed + (long)r * W);
        add_half(t, w, l, 1, R, id, threads);
    }
    pool_wait(t->pool, threads);
    COLUMNS(m->vocab, v0, v1);
    int n = 0;
    for (int r = 0; r < R; r++) {
        if (r % B == 0) continue; /* the anchor's row */
        w->xs[n] = w->h + (long)n * H;
        w->ys[n] = t->logits + (long)n * m->vocab + v0;
        rms_norm(t->x + (long)r * H, m->norm, w->h + (long)n++ * H, H, m->eps);
    }
    if (t->hidden && id == 0) memcpy(t->hidden, w->h, sizeof(float) * (size_t)n * (size_t)H);
    product(&m->head, v0, v1, n, w->xs, w->ys, 0);
}

static int make_room(Drafter *t, int sequences, const DraftAsk *ask) {
    long far = 0;
    for (int s = 0; s < sequences; s++) far = MOST(far, ask[s].end);
    const long room = (far + 4 * PAGE + t->near + 16) * queries_of(&t->m);
    for (int id = 0; id < pool_size(t->pool); id++) {
        Scratch *s = t->scratch + id;
        if (room <= s->scores_room) continue;
        free(s->scores);
        s->scores_room = 0;
        s->scores = aligned_alloc(64, sizeof(float) * (size_t)((room * 2 + 15) / 16 * 16));
        if (!s->scores) return 0;
        s->scores_room = room * 2;
    }
    return 1;
}

static int check(const DraftModel *m, const DraftAsk *a, const DraftContext *context) {
    if (a->anchor < 0 || a->anchor >= m->vocab) return BAD_ANCHOR;
    if (a->position < 0 || a->position >= m->positions) return BAD_DRAFT_POSITION;
    if (a->start < 0 || a->start > a->end || a->end > a->position) return BAD_CONTEXT;
    for (int l = 0; l < m->layers; l++) {
        const int32_t window = m->layer[l].window, seen = a->end - window + 1, low = MOST(seen, a->start);
        const int64_t held = window ? a->end - low : a->end - a->start / PAGE * PAGE;
        if (a->end > a->start && context[l].pages * PAGE < held) return BAD_CONTEXT;
    }
    return FINE;
}

/* logits [sequences][block - 1][vocab]; hidden, or 0: the normed states that they are of, [..][hidden]. FINE, or what is wrong with the sequence *bad, and nothing was computed. */
int drafter_step(Drafter *t, int sequences, const DraftAsk *ask, const DraftContext *context, int threads,
                 float *logits, float *hidden, int *bad) {
    const DraftModel *m = &t->m;
    for (*bad = 0; *bad < sequences; ++*bad) {
        const int code = check(m, ask + *bad, context + (long)*bad * m->layers);
        if (code) return code;
    }
    if (!make_room(t, sequences, ask)) return NO_MEMORY;
    const int together = MOST(1, t->rows / m->block);
    for (int from = 0; from < sequences; from += together) {
        t->sequences = sequences - from < together ? sequences - from : together;
        t->ask = ask + from;
        t->context = context + (long)from * m->layers;
        t->logits = logits + (long)from * (m->block - 1) * m->vocab;
        t->hidden = hidden ? hidden + (long)from * (m->block - 1) * m->hidden : 0;
        pool_run(t->pool, step, t, threads);
    }
    return FINE;
}

/* Sizes that Python must agree with, and the floats of a vector */
void engine_sizes(int32_t *sizes) {
    const int32_t all[] = {
        sizeof(Matrix),     sizeof(Layer),      sizeof(Model),        sizeof(Cache),    sizeof(Fault),
        sizeof(DraftLayer), sizeof(DraftModel), sizeof(DraftContext), sizeof(DraftAsk), sizeof(Walk),
        sizeof(TreeAsk),    sizeof(PairWeights), LANES,
    };
    memcpy(sizes, all, sizeof all);
}
