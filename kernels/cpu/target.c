/* One step of the target: any mix of plain rows, trees and chains of many sequences over a paged latent cache. */
#include "target.h"
#include <stdlib.h>

#ifdef HEDGEROW_FAULTS /* planted, to see that the tests see them */
static int planted;
void target_plant(int fault) { planted = fault; }
#else
static const int planted = 0;
#endif
enum { PATH_REVERSED = 1, NORMALISER_OFF, ANCESTOR_LEFT_OUT };

enum { TILE = 256 };   /* rows that go through all layers together */
enum { QUERIES = LANES == 16 ? 72 : 48 }; /* rows times heads that read a page together */

typedef struct {
    float *h, *q_a, *q_b, *q, *context, *routed, *packed, *scores; /* [TILE] rows each; scores [queries][stride] */
    long scores_room;
    const float **xs;
    float **ys;
    float *weight;     /* of a (row, expert) pair, in order of experts */
    int *pair, *first; /* its row; the first pair of each expert */
    int *chosen, *tail;
    long tail_room;
} Scratch;

typedef struct {
    Model m;
    Pool *pool;
    Plan plan;
    const Cache *cache;
    int from, to;                       /* rows of the tile */
    float *x, *qkv, *o, *gate_up, *experts_gate_up; /* [TILE] rows */
    float *part;                        /* of a sum over ranks; [TILE] rows */
    int broken;                         /* a sum could not be made */
    float *logits, *features;
    Scratch *scratch;                   /* [threads] */
    char *taken;                        /* [layers][experts] by a row of this step */
    Memory memory;
} Target;

/* ---- memory ------------------------------------------------------------------------------------------------------ */
#define FLOATS(n) take(&t->memory, sizeof(float) * (size_t)(n))

static int queries_of(const Model *m) { return MOST(m->heads, QUERIES); }

static int take_all(Target *t) {
    const Model *m = &t->m;
    const long pairs = (long)TILE * MOST(m->top_k, 1), key = m->kv_rank + m->rope, E = (m->experts + 15) / 16 * 16;
    const long width = MOST(m->width, MOST(m->shared_width, m->expert_width)), most = MOST(pairs, queries_of(m));
    t->x = FLOATS((long)TILE * m->hidden);
    t->qkv = FLOATS(TILE * (m->q_rank + key));
    t->o = FLOATS((long)TILE * m->heads * m->value);
    t->gate_up = FLOATS(TILE * 2 * width);
    t->experts_gate_up = FLOATS(pairs * 2 * MOST(m->expert_width, 16));
    t->part = FLOATS((long)TILE * m->hidden);
    t->taken = take(&t->memory, (size_t)MOST((long)m->layers * m->experts, 1));
    t->scratch = take(&t->memory, sizeof(Scratch) * (size_t)pool_size(t->pool));
    if (!t->scratch) return 0;
    memset(t->scratch, 0, sizeof(Scratch) * (size_t)pool_size(t->pool));
    for (int id = 0; id < pool_size(t->pool); id++) {
        Scratch *s = t->scratch + id;
        s->h = FLOATS((long)TILE * m->hidden);
        s->q_a = FLOATS((long)TILE * m->q_rank);
        s->q_b = FLOATS((long)TILE * m->heads * (m->nope + m->rope));
        s->q = FLOATS(TILE * m->heads * key);
        s->context = FLOATS((long)TILE * m->heads * m->kv_rank);
        s->routed = FLOATS((TILE + 2) * E);
        s->packed = FLOATS(MOST(TILE, pairs) * width);
        s->xs = take(&t->memory, sizeof(float *) * (size_t)most);
        s->ys = take(&t->memory, sizeof(float *) * (size_t)most);
        s->weight = FLOATS(2 * pairs);
        s->pair = take(&t->memory, sizeof(int) * (size_t)pairs);
        s->first = take(&t->memory, sizeof(int) * (size_t)(E + 1));
        s->chosen = take(&t->memory, sizeof(int) * (size_t)(pairs + E));
    }
    return t->memory.blocks == 8 + 13 * pool_size(t->pool);
}

static void forget_taken(Target *t) { memset(t->taken, 0, (size_t)t->m.layers * (size_t)t->m.experts); }

void target_close(Target *t) {
    for (int id = 0; t->scratch && id < pool_size(t->pool); id++) {
        free(t->scratch[id].scores);
        free(t->scratch[id].tail);
    }
    if (t->pool) pool_close(t->pool);
    give_back(&t->memory);
    plan_free(&t->plan);
    free(t);
}

/* What `m` points to must outlive it. 0: no memory or no threads. */
Target *target_open(const Model *m, int threads) {
    Target *t = calloc(1, sizeof *t);
    if (!t) return 0;
    t->m = *m;
    t->pool = pool_open(threads);
    if (t->pool && take_all(t)) {
        forget_taken(t);
        return t;
    }
    target_close(t);
    return 0;
}

/* Room that depends on the lengths in the plan: made before the threads start, so that nothing can fail in the step. */
static int make_room(Target *t) {
    long stride = 0, rows = 0;
    for (int s = 0; s < t->plan.sequences; s++) {
        const Sequence *q = t->plan.sequence + s;
        stride = MOST(stride, q->prefix + q->rows);
        rows = MOST(rows, q->rows);
    }
    stride = (stride + PAGE - 1) / PAGE * PAGE + 16;
    for (int id = 0; id < pool_size(t->pool); id++) {
        Scratch *s = t->scratch + id;
        if (stride * queries_of(&t->m) > s->scores_room) {
            free(s->scores);
            s->scores_room = 0;
            s->scores = aligned_alloc(64, sizeof(float) * (size_t)(stride * 2 * queries_of(&t->m)));
            if (!s->scores) return 0;
            s->scores_room = stride * 2 * queries_of(&t->m);
        }
        if (rows > s->tail_room) {
            free(s->tail);
            s->tail_room = 0;
            s->tail = malloc(sizeof(int) * (size_t)(rows * 2 * QUERIES));
            if (!s->tail) return 0;
            s->tail_room = rows * 2;
        }
    }
    return 1;
}

/* ---- attention --------------------------------------------------------------------------------------------------- */
static void rope(const Model *m, float *v, int position) {
    const float *cos = m->cos + (long)position * (m->rope / 2), *sin = m->sin + (long)position * (m->rope / 2);
    for (int i = 0; i < m->rope / 2; i++) {
        const float a = v[2 * i], b = v[2 * i + 1];
        v[2 * i] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
        v[2 * i + 1] = __builtin_fmaf(b, cos[i], a * sin[i]);
    }
}

static float *keys_of(const Target *t, int layer, int page) {
    return t->cache->keys + ((long)layer * t->cache->pages + page) * (t->m.kv_rank + t->m.rope) * PAGE;
}
static float *latents_of(const Target *t, int layer, int page) {
    return t->cache->latents + ((long)layer * t->cache->pages + page) * PAGE * t->m.kv_rank;
}

/* The latent and the rotated key of a row, into its slot, in both layouts */
static void write_latent(const Target *t, const Layer *l, int layer, int row) {
    const Model *m = &t->m;
    const Row *at = t->plan.row + row;
    const Sequence *q = t->plan.sequence + at->sequence;
    const int slot = q->prefix + row - q->first, page = q->page[slot / PAGE];
    float *a = t->qkv + (long)(row - t->from) * (m->q_rank + m->kv_rank + m->rope) + m->q_rank;
    float *latent = latents_of(t, layer, page) + (long)(slot % PAGE) * m->kv_rank;
    float *keys = keys_of(t, layer, page) + slot % PAGE;
    rms_norm(a, l->kv_norm, latent, m->kv_rank, m->latent_eps);
    rope(m, a + m->kv_rank, q->prefix + at->depth);
    for (int i = 0; i < m->kv_rank; i++) keys[i * PAGE] = latent[i];
    for (int i = 0; i < m->rope; i++) keys[(m->kv_rank + i) * PAGE] = a[m->kv_rank + i];
}

/* Rows of the ancestors at depths from `row`'s straight part to its own, into tail[0 ..] */
static void read_tail(const Plan *plan, const Sequence *q, int row, int *tail) {
    const Row *at = plan->row + row;
    int r = row - q->first;
    for (int d = at->depth; d >= at->straight; d--) {
        tail[d - at->straight] = r;
        r = q->parents[r];
    }
}

/* Rows [r0, r1) of one sequence, heads of this thread: q [row][heads][key] -> context [row][heads][kv_rank].
 * Keys are the prefix, then each row's own path, in order of position; what else lies in the pages is not used. */
static void attend(Target *t, Scratch *w, int layer, int r0, int r1, int heads) {
    const Model *m = &t->m;
    const Plan *plan = &t->plan;
    const Sequence *s = plan->sequence + plan->row[r0].sequence;
    const int P = s->prefix, key = m->kv_rank + m->rope, C = m->kv_rank, n = (r1 - r0) * heads;
    const int span = P + r1 - s->first; /* slots that some row sees */
    const long stride = (span + PAGE - 1) / PAGE * PAGE + 16;
    float *context = w->context + (long)(r0 - t->from) * heads * C;
    for (int i = 0; i < n; i++) w->xs[i] = w->q + ((long)(r0 - t->from) * heads + i) * key;
    for (int slot = 0; slot < span; slot += PAGE) {
        for (int i = 0; i < n; i++) w->ys[i] = w->scores + i * stride + slot;
        product_strided(keys_of(t, layer, s->page[slot / PAGE]), PAGE, key, PAGE / 16, n, w->xs, w->ys, 0);
    }
    float inverse[n];
    int shared = s->rows;
    for (int r = r0; r < r1; r++) {
        const Row *at = plan->row + r;
        int *tail = w->tail + (long)(r - r0) * s->rows;
        read_tail(plan, s, r, tail);
        if (at->straight < shared) shared = at->straight;
        for (int h = 0; h < heads; h++) {
            const int i = (r - r0) * heads + h;
            float *score = w->scores + i * stride + P;
            /* an ancestor's row is never below its depth, so this is safe in place */
            for (int d = at->straight; d <= at->depth; d++) score[d] = score[tail[d - at->straight]];
            if (planted == ANCESTOR_LEFT_OUT && at->depth > 1) score[at->depth - 1] = -INFINITY;
            inverse[i] = soften(w->scores + i * stride, P + at->depth + 1);
            if (planted == NORMALISER_OFF && s->rows > 1) inverse[i] = nextafterf(inverse[i], 2.0f);
        }
    }
    memset(context, 0, sizeof(float) * (size_t)(n * C));
    for (int i = 0; i < n; i++) w->ys[i] = context + (long)i * C;
    for (int slot = 0; slot < P + shared; slot += PAGE) {
        for (int i = 0; i < n; i++) w->xs[i] = w->scores + i * stride + slot;
        const int keys = P + shared - slot < PAGE ? P + shared - slot : PAGE;
        product_strided(latents_of(t, layer, s->page[slot / PAGE]), C, keys, C / 16, n, w->xs, w->ys, 1);
    }
    for (int r = r0; r < r1; r++) {
        const Row *at = plan->row + r;
        const int *tail = w->tail + (long)(r - r0) * s->rows;
        for (int k = shared; k <= at->depth; k++) {
            const int d = planted == PATH_REVERSED ? at->depth + shared - k : k;
            const int slot = P + (d < at->straight ? d : tail[d - at->straight]);
            const float *latent = latents_of(t, layer, s->page[slot / PAGE]) + (long)(slot % PAGE) * C;
            for (int h = 0; h < heads; h++) {
                const int i = (r - r0) * heads + h;
                const vec p = spread(w->scores[i * stride + P + d]);
                float *to = context + (long)i * C;
                for (int j = 0; j < C; j += LANES)
                    *(vec *)(to + j) = fma_vec(p, *(const vec *)(latent + j), *(const vec *)(to + j));
            }
        }
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < C; j += LANES) *(vec *)(context + (long)i * C + j) *= spread(inverse[i]);
}

/* All rows of the tile, sequence by sequence, in blocks that read a page together */
static void attend_all(Target *t, Scratch *w, int layer, int heads) {
    const int most = MOST(1, QUERIES / heads);
    for (int r = t->from; r < t->to;) {
        const Sequence *s = t->plan.sequence + t->plan.row[r].sequence;
        int until = s->first + s->rows;
        if (until > t->to) until = t->to;
        if (until > r + most) until = r + most;
        attend(t, w, layer, r, until, heads);
        r = until;
    }
}

/* ---- a step of one thread; pool_wait stands where another thread's results are needed ---------------------------- */
static void normed(const Target *t, Scratch *w, const float *weight) {
    for (int r = 0; r < t->to - t->from; r++) {
        w->xs[r] = w->h + (long)r * t->m.hidden;
        rms_norm(t->x + (long)r * t->m.hidden, weight, w->h + (long)r * t->m.hidden, t->m.hidden, t->m.eps);
    }
}

/* x += every rank's part, added in rank order. Rows of x before and behind it are nobody's until the next barrier. */
static void meet(Target *t, int id, int threads) {
    const long R = t->to - t->from, H = t->m.hidden;
    pool_wait(t->pool, threads);
    if (id == 0) t->broken |= t->m.sum(t->part, R * H) != 0;
    pool_wait(t->pool, threads);
    SHARE(R, r0, r1);
    for (long i = r0 * H; i < r1 * H; i += LANES) *(vec *)(t->x + i) += *(const vec *)(t->part + i);
}

/* The latents of the tile's rows into the cache */
static void latents(Target *t, Scratch *w, int layer, int id, int threads) {
    const Model *m = &t->m;
    const Layer *l = m->layer + layer;
    const int R = t->to - t->from, width = m->q_rank + m->kv_rank + m->rope;
    normed(t, w, l->attention_norm);
    COLUMNS(width, a0, a1);
    POINT(w->ys, r, R, t->qkv + (long)r * width + a0);
    product(&l->qkv_a, a0, a1, R, w->xs, w->ys, 0);
    pool_wait(t->pool, threads);
    SHARE(R, r0, r1);
    for (int r = r0; r < r1; r++) write_latent(t, l, layer, t->from + r);
}

static void attention(Target *t, Scratch *w, int layer, int id, int threads) {
    const Model *m = &t->m;
    const Layer *l = m->layer + layer;
    const int R = t->to - t->from, C = m->kv_rank, key = C + m->rope, qk = m->nope + m->rope, width = m->q_rank + key;
    SHARE(m->heads, h0, h1);
    const int heads = h1 - h0;
    for (int r = 0; r < R; r++) {
        w->xs[r] = w->q_a + (long)r * m->q_rank;
        w->ys[r] = w->q_b + (long)r * heads * qk;
        rms_norm(t->qkv + (long)r * width, l->q_norm, w->q_a + (long)r * m->q_rank, m->q_rank, m->latent_eps);
    }
    product(&l->q_b, h0 * qk, h1 * qk, R, w->xs, w->ys, 0);
    for (int r = 0; r < R; r++) {
        const Row *at = t->plan.row + t->from + r;
        const int position = t->plan.sequence[at->sequence].prefix + at->depth;
        for (int h = 0; h < heads; h++) {
            float *v = w->q_b + ((long)r * heads + h) * qk;
            for (int j = 0; j < qk; j++) v[j] *= m->softmax_scale;
            rope(m, v + m->nope, position);
            memcpy(w->q + ((long)r * heads + h) * key + C, v + m->nope, sizeof(float) * (size_t)m->rope);
        }
    }
    for (int h = 0; h < heads; h++) {
        POINT(w->xs, r, R, w->q_b + ((long)r * heads + h) * qk);
        POINT(w->ys, r, R, w->q + ((long)r * heads + h) * key);
        product(&l->uk, (h0 + h) * C, (h0 + h + 1) * C, R, w->xs, w->ys, 0);
    }
    pool_wait(t->pool, threads);
    if (heads) attend_all(t, w, layer, heads);
    for (int h = 0; h < heads; h++) {
        POINT(w->xs, r, R, w->context + ((long)r * heads + h) * C);
        POINT(w->ys, r, R, t->o + ((long)r * m->heads + h0 + h) * m->value);
        product(&l->uv, (h0 + h) * m->value, (h0 + h + 1) * m->value, R, w->xs, w->ys, 0);
    }
    pool_wait(t->pool, threads);
    COLUMNS(m->hidden, x0, x1);
    POINT(w->xs, r, R, t->o + (long)r * m->heads * m->value);
    const int alone = m->ranks == 1;
    POINT(w->ys, r, R, (alone ? t->x : t->part) + (long)r * m->hidden + x0);
    product(&l->o, x0, x1, R, w->xs, w->ys, alone);
    if (!alone) meet(t, id, threads);
    pool_wait(t->pool, threads);
}

/* Experts of each row: sigmoid scores, a bias that only selects, the first of equals; pairs in order of experts. */
static void route(Target *t, Scratch *w, const Layer *l) {
    const Model *m = &t->m;
    const int R = t->to - t->from, E = (m->experts + 15) / 16 * 16, K = m->top_k;
    float *biased = w->routed + (long)TILE * E, *row_weight = w->weight + (long)TILE * K;
    int *count = w->chosen + (long)TILE * K;
    memset(count, 0, sizeof(int) * (size_t)E);
    for (int r = 0; r < R; r++) {
        float *s = w->routed + (long)r * E, sum = 1e-20f;
        for (int e = 0; e < E; e += LANES) {
            *(vec *)(s + e) = sigmoid_vec(*(const vec *)(s + e));
            *(vec *)(biased + e) = *(const vec *)(s + e) + *(const vec *)(l->bias + e);
        }
        for (int k = 0; k < K; k++) {
            int best = -1;
            for (int e = 0; e < m->experts; e++) {
                int taken = 0;
                for (int i = 0; i < k; i++) taken |= w->chosen[r * K + i] == e;
                if (!taken && (best < 0 || biased[e] > biased[best])) best = e;
            }
            w->chosen[r * K + k] = best;
        }
        for (int k = 1; k < K; k++) /* ascending */
            for (int i = k; i > 0 && w->chosen[r * K + i - 1] > w->chosen[r * K + i]; i--) {
                const int e = w->chosen[r * K + i];
                w->chosen[r * K + i] = w->chosen[r * K + i - 1];
                w->chosen[r * K + i - 1] = e;
            }
        for (int k = 0; k < K; k++) {
            count[w->chosen[r * K + k]]++;
            sum += s[w->chosen[r * K + k]];
        }
        for (int k = 0; k < K; k++) {
            const float score = s[w->chosen[r * K + k]];
            row_weight[r * K + k] = (m->normalise ? score / sum : score) * m->routed_scale;
        }
    }
    w->first[0] = 0;
    for (int e = 0; e < m->experts; e++) w->first[e + 1] = w->first[e] + count[e];
    memset(count, 0, sizeof(int) * (size_t)E);
    for (int r = 0; r < R; r++)
        for (int k = 0; k < K; k++) {
            const int e = w->chosen[r * K + k], at = w->first[e] + count[e]++;
            w->pair[at] = r;
            w->weight[at] = row_weight[r * K + k];
        }
}

static void mlp(Target *t, Scratch *w, int layer, int id, int threads) {
    const Model *m = &t->m;
    const Layer *l = m->layer + layer;
    const int R = t->to - t->from, H = m->hidden, I = m->expert_width, sparse = l->bias != 0;
    const int width = sparse ? m->shared_width : m->width, experts = sparse ? m->experts : 0;
    normed(t, w, l->mlp_norm);
    if (sparse) {
        const int E = (m->experts + 15) / 16 * 16;
        POINT(w->ys, r, R, w->routed + (long)r * E);
        product(&l->router, 0, E, R, w->xs, w->ys, 0);
        route(t, w, l);
        char *taken = t->taken + (long)layer * m->experts;
        for (int e = 0; e < experts && id == 0; e++) taken[e] |= w->first[e] < w->first[e + 1];
    }
    COLUMNS(2 * width, g0, g1);
    POINT(w->ys, r, R, t->gate_up + (long)r * 2 * width + g0);
    product(&l->gate_up, g0, g1, R, w->xs, w->ys, 0);
    for (int r = 0; r < R; r++) swiglu(w->ys[r], (g1 - g0) / 32, 1.0f);
    COLUMNS(2 * I, e0, e1);
    for (int e = 0; e < experts; e++) {
        const int from = w->first[e], n = w->first[e + 1] - from;
        POINT(w->xs, i, n, w->h + (long)w->pair[from + i] * H);
        POINT(w->ys, i, n, t->experts_gate_up + (long)(from + i) * 2 * I + e0);
        product(&l->experts_gate_up, e * 2 * I + e0, e * 2 * I + e1, n, w->xs, w->ys, 0);
        for (int i = 0; i < n; i++) swiglu(w->ys[i], (e1 - e0) / 32, w->weight[from + i]);
    }
    pool_wait(t->pool, threads);
    COLUMNS(H, x0, x1); /* x += experts, ascending, then the shared one; or this rank's part of that */
    float *to = m->ranks == 1 ? t->x : t->part;
    for (int r = 0; r < R && to == t->part; r++) memset(to + (long)r * H + x0, 0, sizeof(float) * (size_t)(x1 - x0));
    for (int e = 0; e < experts; e++) {
        const int from = w->first[e], n = w->first[e + 1] - from;
        for (int i = 0; i < n; i++)
            gather_gates(t->experts_gate_up + (long)(from + i) * 2 * I, w->packed + (long)i * I, I / 16);
        POINT(w->xs, i, n, w->packed + (long)i * I);
        POINT(w->ys, i, n, to + (long)w->pair[from + i] * H + x0);
        product(&l->experts_down, e * H + x0, e * H + x1, n, w->xs, w->ys, 1);
    }
    for (int r = 0; r < R; r++) gather_gates(t->gate_up + (long)r * 2 * width, w->packed + (long)r * width, width / 16);
    POINT(w->xs, r, R, w->packed + (long)r * width);
    POINT(w->ys, r, R, to + (long)r * H + x0);
    product(&l->down, x0, x1, R, w->xs, w->ys, 1);
    if (m->ranks > 1) meet(t, id, threads);
    pool_wait(t->pool, threads);
}

static void tap(const Target *t, int layer) {
    const Model *m = &t->m;
    for (int i = 0; i < m->taps; i++)
        for (int r = t->from; m->tapped[i] == layer && r < t->to; r++)
            memcpy(t->features + ((long)r * m->taps + i) * m->hidden, t->x + (long)(r - t->from) * m->hidden,
                   sizeof(float) * (size_t)m->hidden);
}

/* Whether anything is asked of the last layer but its latents */
static int ends_wanted(const Target *t) {
    for (int i = 0; i < t->m.taps; i++)
        if (t->m.tapped[i] + 1 == t->m.layers) return 1;
    for (int i = 0; i < t->plan.wanted; i++)
        if (t->plan.want[i] >= t->from && t->plan.want[i] < t->to) return 1;
    return 0;
}

static void head(Target *t, Scratch *w, int id, int threads) {
    const Model *m = &t->m;
    COLUMNS(m->vocab, v0, v1);
    int n = 0;
    for (int i = 0; i < t->plan.wanted; i++) {
        const int r = t->plan.want[i] - t->from;
        if (r < 0 || r >= t->to - t->from) continue;
        w->xs[n] = w->h + (long)n * m->hidden;
        w->ys[n] = t->logits + (long)i * m->vocab + v0;
        rms_norm(t->x + (long)r * m->hidden, m->norm, w->h + (long)n++ * m->hidden, m->hidden, m->eps);
    }
    product(&m->head, v0, v1, n, w->xs, w->ys, 0);
}

static void step(void *target, int id, int threads) {
    Target *t = target;
    const Model *m = &t->m;
    Scratch *w = t->scratch + id;
    SHARE(t->to - t->from, r0, r1);
    for (int r = r0; r < r1; r++) {
        const Row *at = t->plan.row + t->from + r;
        const Sequence *s = t->plan.sequence + at->sequence;
        const long token = s->tokens[t->from + r - s->first] - m->first_token, bytes = sizeof(float) * m->hidden;
        float *to = (m->ranks == 1 ? t->x : t->part) + (long)r * m->hidden;
        if (token >= 0 && token < m->vocab) table_row(m->embedding, m->narrow, token, m->hidden, to);
        else memset(to, 0, (size_t)bytes); /* another rank's */
        if (m->ranks > 1) memset(t->x + (long)r * m->hidden, 0, (size_t)bytes);
    }
    if (m->ranks > 1) meet(t, id, threads);
    pool_wait(t->pool, threads);
    for (int layer = 0; layer < m->layers; layer++) {
        latents(t, w, layer, id, threads);
        if (layer + 1 == m->layers && !ends_wanted(t)) return; /* of a chunk of a prompt, say */
        attention(t, w, layer, id, threads);
        mlp(t, w, layer, id, threads);
        if (id == 0) tap(t, layer); /* others write x only after a barrier that this thread still has to reach */
    }
    head(t, w, id, threads);
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

/* logits [wanted][vocab], features [rows][taps * hidden]. FINE, or `fault` says what is wrong: nothing was computed. */
int target_step(Target *t, const Cache *cache, const int32_t *words, int64_t length, int threads, float *logits,
                float *features, Fault *fault) {
    const int code = plan_read(&t->plan, &t->m, cache->pages, words, length, fault);
    if (code) return code;
    if (!make_room(t)) return NO_MEMORY;
    t->cache = cache;
    t->logits = logits;
    t->features = features;
    t->broken = 0;
    forget_taken(t);
    const int tiles = (t->plan.rows + TILE - 1) / TILE;
    for (int i = 0; i < tiles; i++) {
        t->from = (int)((long)t->plan.rows * i / tiles);
        t->to = (int)((long)t->plan.rows * (i + 1) / tiles);
        pool_run(t->pool, step, t, threads);
    }
    return t->broken ? NO_SUM : FINE;
}

/* Distinct experts of the last step in each layer, together; `layers` becomes the number of those that had any. */
int target_experts(const Target *t, int *layers) {
    int found = 0;
    *layers = 0;
    for (int layer = 0; layer < t->m.layers; layer++) {
        const int before = found;
        for (int e = 0; e < t->m.experts; e++) found += t->taken[(long)layer * t->m.experts + e];
        *layers += found > before;
    }
    return found;
}

/* Moves n slots in all layers; all sources are read before a target is written. `room`: n * (2 kv_rank + rope). */
int cache_copy(const Cache *cache, int layers, int kv_rank, int rope, int64_t n, const int64_t *from, const int64_t *to,
               float *room) {
    const long key = kv_rank + rope, slots = cache->pages * PAGE;
    for (int64_t i = 0; i < n; i++)
        if (from[i] < 0 || from[i] >= slots || to[i] < 0 || to[i] >= slots) return BAD_SLOT;
    for (long l = 0; l < layers; l++) {
        float *keys = cache->keys + l * slots * key, *latents = cache->latents + l * slots * kv_rank, *at = room;
        for (int64_t i = 0; i < n; i++) {
            const float *k = keys + from[i] / PAGE * key * PAGE + from[i] % PAGE;
            for (long j = 0; j < key; j++) *at++ = k[j * PAGE];
            memcpy(at, latents + from[i] * kv_rank, sizeof(float) * (size_t)kv_rank);
            at += kv_rank;
        }
        at = room;
        for (int64_t i = 0; i < n; i++) {
            float *k = keys + to[i] / PAGE * key * PAGE + to[i] % PAGE;
            for (long j = 0; j < key; j++) k[j * PAGE] = *at++;
            memcpy(latents + to[i] * kv_rank, at, sizeof(float) * (size_t)kv_rank);
            at += kv_rank;
        }
    }
    return FINE;
}
