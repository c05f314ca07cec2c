/* From a block's logits to a tree: the best tokens of each depth, then the best-first search of kernels/tree_build.py
 * (`tree_build_heap`), whose trees these are bit for bit. */
#include "walk.h"
#include "target.h"

/* The k best of a row by (-x, id), which are distinct whatever the row holds. What is no number comes last. */
static void best_of(const float *x, int vocab, int k, int32_t *id) {
    int n = 0;
    float least = -INFINITY;
    for (int i = 0; i < vocab; i += 16) {
        if (n == k) { /* most of a row is below what is already there */
            ivec any = {0};
            EACH(p, PARTS) any |= *(const vec *)(x + i + p * LANES) > spread(least);
            int some = 0;
            EACH(j, LANES) some |= any[j];
            if (!some) continue;
        }
        for (int j = i; j < i + 16; j++) {
            const float a = x[j] == x[j] ? x[j] : -INFINITY;
            if (n == k && !(a > least)) continue;
            int at = n < k ? n++ : k - 1;
            for (; at > 0 && !(x[id[at - 1]] >= a); at--) id[at] = id[at - 1];
            id[at] = j;
            least = x[id[n - 1]] == x[id[n - 1]] ? x[id[n - 1]] : -INFINITY;
        }
    }
}

/* log of the sum of exponentials, less the largest, which is `high` */
float log_sum(const float *x, int vocab, float high) {
    vec sum[PARTS] = {{0}};
    for (int i = 0; i < vocab; i += 16)
        EACH(p, PARTS) sum[p] += exp_vec(*(const vec *)(x + i + p * LANES) - spread(high));
    return (float)-minus_log(fold(sum));
}

static int ranked(const float *x, int vocab) { /* no NaN, and a largest number */
    ivec wrong = {0}, finite = {0};
    for (int i = 0; i < vocab; i += LANES) {
        const vec a = *(const vec *)(x + i);
        wrong |= (a != a) | (a == spread(INFINITY));
        finite |= a > spread(-INFINITY);
    }
    int bad = 0, good = 0;
    for (int i = 0; i < LANES; i++) bad |= wrong[i], good |= finite[i];
    return good && !bad;
}

/* logits [rows][vocab] -> logprobs, tokens [rows][k], best first; -inf in rows that cannot be ranked */
int top_logprobs(const float *logits, int64_t rows, int vocab, int k, float *logprobs, int32_t *tokens) {
    if (k < 1 || k > vocab || vocab % 16) return BAD_TREE;
    for (; rows-- > 0; logits += vocab, logprobs += k, tokens += k) {
        best_of(logits, vocab, k, tokens);
        const int whole = ranked(logits, vocab);
        const float high = logits[tokens[0]], rest = whole ? log_sum(logits, vocab, high) : 0;
        for (int i = 0; i < k; i++) {
            const float q = logits[tokens[i]] - high - rest;
            logprobs[i] = !whole ? -INFINITY : q < 0 ? q : 0;
        }
    }
    return FINE;
}

/* A prefix that may be next: its ranks, the sum of their log-probabilities, and that without the last one */
typedef struct {
    float sigma, base;
    int parent, depth;
    const uint8_t *rank;
} Prefix;

INLINE int earlier(const Prefix *a, const Prefix *b) {
    if (a->sigma != b->sigma) return a->sigma > b->sigma;
    const int order = memcmp(a->rank, b->rank, (size_t)(a->depth < b->depth ? a->depth : b->depth));
    return order ? order < 0 : a->depth < b->depth;
}

static void push(Prefix *heap, int n, Prefix fresh) {
    for (; n > 0 && earlier(&fresh, heap + (n - 1) / 2); n = (n - 1) / 2) heap[n] = heap[(n - 1) / 2];
    heap[n] = fresh;
}

static Prefix pop(Prefix *heap, int n) { /* n: what is left */
    const Prefix first = heap[0], last = heap[n];
    int i = 0;
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && earlier(heap + child + 1, heap + child)) child++;
        if (!earlier(heap + child, &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return first;
}

/* logprobs, tokens [depth][k] -> nodes in best-first order; how many. heap [budget + 2]; ranks [2 budget + 2][depth] */
static int build(const float *q, const int32_t *id, int depth, int k, TreeAsk ask, Prefix *heap, uint8_t *ranks,
                 int32_t *tokens, int32_t *parents, float *logprobs) {
    const int most = ask.cap > 0 && ask.cap < k ? ask.cap : k;
    int held = 1, n = 0;
    memset(ranks, 0, (size_t)depth);
    heap[0] = (Prefix){0.0f + q[0], 0.0f, -1, 1, ranks};
    ranks += depth;
    for (; held && n < ask.budget; n++) {
        const Prefix p = pop(heap, --held);
        const int d = p.depth - 1, last = p.rank[d];
        tokens[n] = id[d * k + last];
        parents[n] = p.parent;
        logprobs[n] = p.sigma;
        if (last + 1 < most) {
            memcpy(ranks, p.rank, (size_t)depth);
            ranks[d]++;
            push(heap, held++, (Prefix){p.base + q[d * k + last + 1], p.base, p.parent, p.depth, ranks});
            ranks += depth;
        }
        if (p.depth < depth) {
            memcpy(ranks, p.rank, (size_t)depth);
            ranks[d + 1] = 0;
            push(heap, held++, (Prefix){p.sigma + q[(d + 1) * k], p.sigma, n, p.depth + 1, ranks});
            ranks += depth;
        }
    }
    return n;
}

/* logprobs, tokens [trees][depth][k] -> tokens, parents, logprobs [trees][nodes], counts [trees] */
int build_trees(const float *logprobs, const int32_t *ids, int trees, int depth, int k, int nodes, const TreeAsk *ask,
                int32_t *tokens, int32_t *parents, float *sums, int32_t *counts) {
    if (depth < 1 || k < 1 || k > 256 || nodes < 0 || nodes > 256) return BAD_TREE;
    for (int s = 0; s < trees; s++)
        if (ask[s].budget < 0 || ask[s].budget > nodes) return BAD_TREE;
    const size_t prefixes = (size_t)nodes + 2;
    Prefix *heap = malloc(prefixes * (sizeof(Prefix) + 2 * (size_t)depth));
    if (!heap) return NO_MEMORY;
    for (int s = 0; s < trees; s++) {
        const long at = (long)s * depth * k, to = (long)s * nodes;
        counts[s] = build(logprobs + at, ids + at, depth, k, ask[s], heap, (uint8_t *)(heap + prefixes), tokens + to,
                          parents + to, sums + to);
    }
    free(heap);
    return FINE;
}
