/* Draws one token a row, seeded and filtered, and follows the draws down a tree: the law of kernels/sample.py.
 *
 * The noise is computed as there, from the same words rounded to the same u; what differs is the last bit of an
 * exponential or a logarithm, which here is this file's on every machine and there the libraries'.
 */
#include "walk.h"
#include "target.h"

/* log(1 + f) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...), s = f / (2 + f), with f exact where y is near 1 */
double minus_log(double y) {
    uint64_t bits;
    memcpy(&bits, &y, sizeof bits);
    int k = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    memcpy(&y, &bits, sizeof y);
    if (y > 1.4142135623730951) {
        y *= 0.5;
        k++;
    }
    const double f = y - 1.0, s = f / (2.0 + f), z = s * s;
    double sum = 1.0 / 23.0;
    for (int i = 21; i > 0; i -= 2) sum = __builtin_fma(sum, z, 1.0 / i);
    return -__builtin_fma(k, 0.69314718055994531, 2.0 * s * sum);
}

/* Philox4x32-10 at (block, position, sample, 0) */
INLINE void philox(uint32_t block, const Walk *law, uint32_t position, uint32_t *word) {
    uint32_t a = block, b = position, c = law->sample_index, d = 0;
    uint32_t low = (uint32_t)law->seed, high = (uint32_t)(law->seed >> 32);
    for (int i = 0; i < 10; i++) {
        const uint64_t p = (uint64_t)a * 0xD2511F53u, q = (uint64_t)c * 0xCD9E8D57u;
        a = (uint32_t)(q >> 32) ^ b ^ low;
        b = (uint32_t)q;
        c = (uint32_t)(p >> 32) ^ d ^ high;
        d = (uint32_t)p;
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    word[0] = a, word[1] = b, word[2] = c, word[3] = d;
}

INLINE float uniform(uint32_t word) {
    const float u = ((float)word + 0.5f) * 0x1p-32f, most = 1.0f - 0x1p-24f;
    return u < most ? u : most;
}

typedef struct {
    double ratio;
    int token;
} Winner;

/* -log(1 - u) >= u: a token whose u alone is too large needs no logarithm. Equal ratios: the lowest id. */
INLINE void race(Winner *w, int token, uint32_t word, double weight) {
    const double u = uniform(word);
    if (!(u <= w->ratio * weight * 1.000001) || weight == 0) return;
    const double ratio = minus_log(1.0 - u) / weight;
    if (ratio < w->ratio || (ratio == w->ratio && token < w->token)) *w = (Winner){ratio, token};
}

/* The first of the largest logits; -1 where it is not finite, or one is no number. n is a multiple of 16. */
static int top_of(const float *x, int n) {
    vec top = spread(-INFINITY);
    ivec wrong = {0};
    for (int i = 0; i < n; i += LANES) {
        const vec a = *(const vec *)(x + i);
        wrong |= a != a;
        top = choose(a > top, a, top);
    }
    float high = top[0];
    for (int i = 0; i < LANES; i++) {
        if (wrong[i]) return -1;
        high = top[i] > high ? top[i] : high;
    }
    if (high == INFINITY || high == -INFINITY) return -1;
    for (int i = 0; i < n; i++)
        if (x[i] == high) return i;
    return -1;
}

INLINE int before(const float *x, int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); }

static void sift(const float *x, int *heap, int n, int i) {
    const int id = heap[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(x, heap[child + 1], heap[child])) child++;
        if (before(x, id, heap[child])) break;
        heap[i] = heap[child];
    }
    heap[i] = id;
}

/* Logits below this cannot be kept: by top-p, all of them together weigh too little. Half a unit more than rounding. */
static double floor_of(const Walk *law, int limited, float peak, double total, int vocab) {
    const double t = MOST(law->temperature, 1e-30f);
    if (limited) return -INFINITY;
    if (law->top_p < 1) return peak - t * (minus_log((1 - law->top_p) * total / vocab) + 0.5);
    return peak - t * (minus_log(MOST(law->min_p, 1e-30f)) + 0.5);
}

/* The ids that the filters keep, heaviest first, into the end of heap [vocab]; how many. w: weights */
static int keep(const Walk *law, const float *x, const float *w, float peak, int vocab, int *heap) {
    const int limited = law->top_k > 0 && law->top_k < vocab, nucleus = law->top_p < 1;
    double total = 0, mass = 0;
    if (nucleus && !limited)
        for (int i = 0; i < vocab; i++) total += w[i];
    const double low = floor_of(law, limited, peak, total, vocab);
    int n = 0, kept = 0;
    for (int i = 0; i < vocab; i++)
        if (x[i] >= low) heap[n++] = i;
    for (int i = n / 2; i-- > 0;) sift(x, heap, n, i);
    const int most = limited ? law->top_k : n, all = n;
    while (kept < most && kept < all && (limited || !nucleus || mass < law->top_p * total)) {
        const int id = heap[0];
        if (!limited && law->min_p > 0 && w[id] < law->min_p) break;
        mass += w[id];
        heap[0] = heap[--n];
        sift(x, heap, n, 0);
        heap[all - ++kept] = id;
    }
    const int *first = heap + all - 1; /* the kept ones, downwards */
    if (limited && nucleus) {
        const double wanted = law->top_p * mass;
        double reached = 0;
        int i = 0;
        while (i < kept && reached < wanted) reached += w[first[-i++]];
        kept = i;
    }
    while (kept > 1 && law->min_p > 0 && w[first[1 - kept]] < law->min_p) kept--;
    memmove(heap, first - kept + 1, sizeof(int) * (size_t)kept);
    return kept;
}

/* The token that is drawn from a row, or -1. w [vocab], heap [vocab]: room */
static int draw(const Walk *law, const float *x, int vocab, uint32_t position, float *w, int *heap) {
    const int top = top_of(x, vocab);
    if (top < 0 || !(law->temperature > 0)) return top;
    const vec peak = spread(x[top]), t = spread(MOST(law->temperature, 1e-30f));
    for (int i = 0; i < vocab; i += LANES) *(vec *)(w + i) = exp_vec((*(const vec *)(x + i) - peak) / t);
    Winner winner = {INFINITY, vocab};
    uint32_t word[4];
    if ((law->top_k > 0 && law->top_k < vocab) || law->top_p < 1 || law->min_p > 0) {
        const int n = keep(law, x, w, x[top], vocab, heap);
        for (int i = 0; i < n; i++) {
            philox((uint32_t)heap[i] / 4, law, position, word);
            race(&winner, heap[i], word[heap[i] % 4], w[heap[i]]);
        }
    } else
        for (int i = 0; i < vocab; i += 4) {
            philox((uint32_t)i / 4, law, position, word);
            for (int j = 0; j < 4; j++) race(&winner, i + j, word[j], w[i + j]);
        }
    return winner.token;
}

/* Walks from each anchor down, as long as a child carries the token that was drawn at its parent. words: of each walk
 * its rows' parents, then their tokens; room: 2 * vocab floats; out: of each walk the path's length, the draw at its
 * last row, the path [rows]. FINE, or what is wrong with the walk, or with the row of logits, *bad. */
int walk_trees(const float *logits, int64_t rows, int vocab, int walks, const Walk *walk, const int32_t *words,
               float *room, int32_t *out, int32_t *bad) {
    for (*bad = 0; *bad < walks; ++*bad) {
        const Walk *at = walk + *bad;
        if (vocab % 16 || at->first < 0 || at->rows < 1 || (int64_t)at->first + at->rows > rows) return BAD_WALK;
    }
    for (; walks-- > 0; walk++) {
        const int32_t *parents = words, *tokens = words + walk->rows;
        int row = 0, length = 1, token = 0;
        out[2] = 0;
        for (int next = 0; next >= 0; row = next >= 0 ? next : row) {
            const float *x = logits + (int64_t)(walk->first + row) * vocab;
            token = draw(walk, x, vocab, walk->position + (uint32_t)(length - 1), room, (int *)(room + vocab));
            *bad = walk->first + row;
            if (token < 0) return BAD_LOGITS;
            next = -1;
            for (int i = row + 1; i < walk->rows && next < 0; i++)
                if (parents[i] == row && tokens[i] == token) next = i;
            if (next >= 0) out[2 + length++] = next;
        }
        out[0] = length;
        out[1] = token;
        words += 2 * walk->rows;
        out += 2 + walk->rows;
    }
    return FINE;
}
