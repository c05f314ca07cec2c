/* Conditional trees: how likely each of a position's best tokens is after each of those before it, as
 * hedgerow/model/selector.py says, and the best-first search over such pairs, whose trees are bit for bit those of
 * kernels/tree_pairs.py (`tree_pairs_heap`). */
#include "target.h"
#include "walk.h"

enum { MOST_DEPTH = 12, MOST_WIDTH = 31, WIDE = 32, RANK_BITS = 5 };

/* log of the sum of exponentials of WIDE numbers */
static float log_sum_exp(const float *x) {
    float high = -INFINITY;
    for (int i = 0; i < WIDE; i++) high = x[i] > high ? x[i] : high;
    return high > -INFINITY ? high + log_sum(x, WIDE, high) : high;
}

/* Candidates of a row, best first, of equals the earlier; x has no NaN */
static void sort_row(const float *x, int k, int32_t *order) {
    for (int i = 0; i < k; i++) {
        int at = i;
        for (; at > 0 && x[order[at - 1]] < x[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
}

/* out = W h: every element one chain over h, ascending */
static void project(const PairWeights *s, const float *hidden, float *out) {
    const int n = s->rank;
    int i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        vec sum[WIDE / LANES] = {{0}};
        for (int h = 0; h < s->hidden; h++)
            EACH(p, WIDE / LANES)
                sum[p] = fma_vec(spread(hidden[h]), *(const vec *)(s->projection + (long)h * n + i + p * LANES), sum[p]);
        EACH(p, WIDE / LANES) *(vec *)(out + i + p * LANES) = sum[p];
    }
    for (; i < n; i++) {
        out[i] = 0.0f;
        for (int h = 0; h < s->hidden; h++) out[i] = __builtin_fmaf(hidden[h], s->projection[(long)h * n + i], out[i]);
    }
}

/* One position: q, token [k] of it; before [k] the tokens of the position before. state, columns: room for a row of
 * `rank` and for [rank][WIDE] numbers. -> lines [k][WIDE]: log-probability of each candidate (column) after each */
static void score(const PairWeights *s, const float *hidden, const float *q, const int32_t *token,
                  const int32_t *before, float *state, float *columns, float (*lines)[WIDE]) {
    const int n = s->rank, k = s->k;
    float line[WIDE], projected[n];
    project(s, hidden, projected);
    memset(columns, 0, sizeof(float) * WIDE * (size_t)n);
    for (int b = 0; b < k; b++)
        for (int i = 0; i < n; i++) columns[i * WIDE + b] = s->successor[(long)token[b] * n + i];
    for (int b = 0; b < WIDE; b++) line[b] = b < k ? q[b] : -INFINITY;
    const float mass = log_sum_exp(line);
    for (int a = 0; a < k; a++) {
        const float *row = s->predecessor + (long)before[a] * n;
        for (int i = 0; i < n; i++) state[i] = row[i] * projected[i];
        vec sum[WIDE / LANES] = {{0}};
        for (int i = 0; i < n; i++)
            EACH(p, WIDE / LANES) sum[p] = fma_vec(spread(state[i]), *(const vec *)(columns + i * WIDE + p * LANES), sum[p]);
        EACH(p, WIDE / LANES) *(vec *)(lines[a] + p * LANES) = sum[p] + *(const vec *)(line + p * LANES);
        const float rest = log_sum_exp(lines[a]);
        for (int b = 0; b < k; b++) {
            const float p = lines[a][b] - rest + mass;
            lines[a][b] = p != p ? -INFINITY : p < 0 ? p : 0; /* no number: what had no mass to share */
        }
    }
}

/* logits [trees][depth][vocab], hidden [trees][depth][hidden], anchors [trees] -> logprobs, choice [trees][depth][k][k]
 * (by rank, after each candidate), tokens [trees][depth][k]. Of a tree with a cap only as many candidates count at each
 * depth: the best after the likeliest path. */
int pair_logprobs(const PairWeights *s, const float *logits, const float *hidden, const int32_t *anchors, int trees,
                  int depth, const TreeAsk *ask, float *logprobs, int32_t *choice, int32_t *tokens) {
    const int k = s->k, n = s->rank;
    if (k < 1 || k > MOST_WIDTH || n < 1 || depth < 1 || depth > MOST_DEPTH || trees < 0) return BAD_TREE;
    for (int t = 0; t < trees; t++)
        if (anchors[t] < 0 || anchors[t] >= s->vocab) return BAD_TREE;
    const size_t rows = (size_t)trees * (size_t)depth;
    float *room = malloc(sizeof(float) * (rows * (size_t)k + (size_t)n * (WIDE + 1)));
    if (!room) return NO_MEMORY;
    float *q = room + (size_t)n * (WIDE + 1);
    const int code = top_logprobs(logits, (int64_t)rows, s->vocab, k, q, tokens);
    for (int t = 0; t < trees && !code; t++) {
        int32_t before[MOST_WIDTH];
        for (int a = 0; a < k; a++) before[a] = anchors[t];
        for (int d = 0, likeliest = 0; d < depth; d++) {
            const long at = (long)t * depth + d;
            float lines[MOST_WIDTH][WIDE];
            int32_t *order = choice + at * k * k;
            score(s, hidden + at * s->hidden, q + at * k, tokens + at * k, before, room, room + n, lines);
            for (int a = 0; a < k; a++) sort_row(lines[a], k, order + a * k);
            const int32_t *best = order + likeliest * k, next = best[0];
            if (ask[t].cap > 0 && ask[t].cap < k) {
                for (int r = ask[t].cap; r < k; r++)
                    for (int a = 0; a < k; a++) lines[a][best[r]] = -INFINITY;
                for (int a = 0; a < k; a++) sort_row(lines[a], k, order + a * k);
            }
            for (int a = 0; a < k; a++)
                for (int r = 0; r < k; r++) logprobs[at * k * k + a * k + r] = lines[a][order[a * k + r]];
            likeliest = next;
            memcpy(before, tokens + at * k, sizeof(int32_t) * (size_t)k);
        }
    }
    free(room);
    return code;
}

/* A path that may be next. `code` has its ranks, five bits each from the top, so that numbers are in the paths' order. */
typedef struct {
    float sigma, above;
    uint64_t code;
    int32_t parent, depth, row, rank; /* row: the candidate before its last one */
} Path;

INLINE int sooner(const Path *a, const Path *b) {
    return a->sigma != b->sigma ? a->sigma > b->sigma : a->code < b->code;
}

static int push(Path *heap, int n, const float *logprobs, int k, Path fresh, uint64_t code) {
    const int shift = RANK_BITS * (MOST_DEPTH - 1 - fresh.depth);
    fresh.sigma = fresh.above + logprobs[((long)fresh.depth * k + fresh.row) * k + fresh.rank];
    fresh.code = code | (uint64_t)(fresh.rank + 1) << shift;
    if (!(fresh.sigma > -INFINITY)) return n; /* probability zero, and all that follow in the row */
    for (int i = n; ; i = (i - 1) / 2) {
        if (i == 0 || !sooner(&fresh, heap + (i - 1) / 2)) {
            heap[i] = fresh;
            return n + 1;
        }
        heap[i] = heap[(i - 1) / 2];
    }
}

static Path pop(Path *heap, int n) { /* n: what is left */
    const Path first = heap[0], last = heap[n];
    int i = 0;
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && sooner(heap + child + 1, heap + child)) child++;
        if (!sooner(heap + child, &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}

static int search(const float *q, const int32_t *choice, const int32_t *id, int depth, int k, int budget, Path *heap,
                  int32_t *tokens, int32_t *parents, float *sums) {
    int held = budget ? push(heap, 0, q, k, (Path){.above = 0.0f, .parent = -1}, 0) : 0, n = 0;
    for (; held && n < budget; n++) {
        const Path p = pop(heap, --held);
        const uint64_t prefix = p.code & ~(((uint64_t)1 << RANK_BITS * (MOST_DEPTH - p.depth)) - 1);
        const int candidate = choice[((long)p.depth * k + p.row) * k + p.rank];
        tokens[n] = id[p.depth * k + candidate];
        parents[n] = p.parent;
        sums[n] = p.sigma;
        Path next = p;
        if (++next.rank < k) held = push(heap, held, q, k, next, prefix);
        if (p.depth + 1 < depth)
            held = push(heap, held, q, k,
                        (Path){.above = p.sigma, .parent = n, .depth = p.depth + 1, .row = candidate}, p.code);
    }
    return n;
}

/* What `pair_logprobs` gives -> tokens, parents, logprobs [trees][nodes], counts [trees] */
int build_pair_trees(const float *logprobs, const int32_t *choice, const int32_t *ids, int trees, int depth, int k,
                     int nodes, const TreeAsk *ask, int32_t *tokens, int32_t *parents, float *sums, int32_t *counts) {
    if (depth < 1 || depth > MOST_DEPTH || k < 1 || k > MOST_WIDTH || nodes < 0 || nodes > 256) return BAD_TREE;
    for (int s = 0; s < trees; s++)
        if (ask[s].budget < 0 || ask[s].budget > nodes) return BAD_TREE;
    Path *heap = malloc(sizeof(Path) * ((size_t)nodes + 2));
    if (!heap) return NO_MEMORY;
    for (int s = 0; s < trees; s++) {
        const long at = (long)s * depth * k, to = (long)s * nodes;
        counts[s] = search(logprobs + at * k, choice + at * k, ids + at, depth, k, ask[s].budget, heap, tokens + to,
                           parents + to, sums + to);
    }
    free(heap);
    return FINE;
}
