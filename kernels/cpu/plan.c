/* Reading a step's plan. Everything that is used as an index later is checked here. */
#include "target.h"
#include <stdlib.h>

static void *grow(void *old, long *room, long wanted, size_t size) {
    if (wanted <= *room) return old;
    void *fresh = realloc(old, (size_t)(wanted * 2) * size);
    if (fresh) *room = wanted * 2;
    return fresh;
}
#define GROW(p, room, n) \
    do { void *fresh_ = grow(p, &(room), n, sizeof *(p)); if (!fresh_) return NO_MEMORY; (p) = fresh_; } while (0)

#define CHECK(holds, code_, row_, value_)                                          \
    if (!(holds)) {                                                                \
        *fault = (Fault){code_, s, (int32_t)(row_), (int32_t)(value_)};            \
        return code_;                                                              \
    }

static int read_rows(Plan *plan, const Model *m, const Sequence *q, int s, Fault *fault) {
    for (int r = 0; r < q->rows; r++) {
        const int token = q->tokens[r], parent = q->parents[r];
        CHECK(token >= 0 && token < m->tokens, BAD_TOKEN, r, token)
        CHECK(parent >= -1 && parent < r, BAD_PARENT, r, parent)
        Row *row = plan->row + q->first + r;
        *row = (Row){s, 0, r == 0};
        if (parent >= 0) {
            const Row *above = plan->row + q->first + parent;
            row->depth = above->depth + 1;
            row->straight = above->straight;
            if (above->straight == row->depth && r == row->depth) row->straight++;
        }
        CHECK((int64_t)q->prefix + row->depth < m->positions, BAD_POSITION, r, q->prefix + row->depth)
    }
    return FINE;
}

static int read_sequence(Plan *plan, const Model *m, int64_t pages, const Sequence *q, int s, Fault *fault) {
    CHECK((int64_t)q->prefix + q->rows <= (int64_t)q->pages * PAGE, BAD_SLOT, -1, q->pages)
    for (int i = 0; i < q->pages; i++) CHECK(q->page[i] >= 0 && q->page[i] < pages, BAD_PAGE, i, q->page[i])
    int last = -1;
    for (int i = 0; i < q->wanted; i++) {
        CHECK(q->want[i] > last && q->want[i] < q->rows, BAD_WANT, i, q->want[i])
        last = q->want[i];
        plan->want[plan->wanted++] = q->first + last;
    }
    return read_rows(plan, m, q, s, fault);
}

int plan_read(Plan *plan, const Model *m, int64_t pages, const int32_t *words, int64_t length, Fault *fault) {
    int s = -1;
    CHECK(length >= 1 && words[0] >= 1 && 1 + 4 * (int64_t)words[0] <= length, BAD_PLAN, -1, length)
    plan->sequences = words[0];
    GROW(plan->sequence, plan->sequence_room, plan->sequences);
    int64_t at = 1 + 4 * (int64_t)plan->sequences, rows = 0, wanted = 0;
    for (s = 0; s < plan->sequences; s++) {
        const int32_t *h = words + 1 + 4 * s;
        CHECK(h[0] >= 0 && h[0] < m->positions, BAD_PREFIX, -1, h[0])
        CHECK(h[1] >= 1, BAD_ROWS, -1, h[1])
        CHECK(h[2] >= 0, BAD_PAGES, -1, h[2])
        CHECK(h[3] >= 0 && h[3] <= h[1], BAD_WANT, -1, h[3])
        const int32_t *from = words + at;
        at += 2 * (int64_t)h[1] + h[2] + h[3];
        CHECK(at <= length, BAD_PLAN, -1, length)
        plan->sequence[s] = (Sequence){h[0], h[1], (int)rows, h[2], h[3], from, from + h[1], from + 2 * (long)h[1],
                                         from + 2 * (long)h[1] + h[2]};
        rows += h[1];
        wanted += h[3];
    }
    CHECK(at == length && rows < 1 << 24, BAD_PLAN, -1, length)
    GROW(plan->row, plan->row_room, rows);
    GROW(plan->want, plan->want_room, wanted + 1);
    plan->rows = (int)rows;
    plan->wanted = 0;
    for (s = 0; s < plan->sequences; s++) {
        const int code = read_sequence(plan, m, pages, plan->sequence + s, s, fault);
        if (code) return code;
    }
    return FINE;
}

void plan_free(Plan *plan) {
    free(plan->sequence);
    free(plan->row);
    free(plan->want);
}
