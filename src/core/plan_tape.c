/* The tape: which load wrote each byte of the ring last, as a circular list of spans in address order.
 * A cursor stays at the last write, so that a ring filled in order costs O(1) a write.
 * Invariants: spans cover [0, ring) without gaps; boundaries lie at offsets that some load starts or ends at.
 * No locks. Does not know about time. */
#include "core/plan.h"

#include "base/arith.h"

static uint32_t new_span(sthi_pipe *p) {
    uint32_t i = p->span_spare;
    if (i != STH_NONE) {
        p->span_spare = p->spans[i].next;
        return i;
    }
    return p->span_count++;
}

static void drop_span(sthi_pipe *p, uint32_t i) {
    sthi_span *s = &p->spans[i];
    p->spans[s->prev].next = s->next;
    p->spans[s->next].prev = s->prev;
    s->next = p->span_spare;
    p->span_spare = i;
}

void sthi_tape_reset(sthi_pipe *p, uint64_t ring) {
    p->spans[0] = (sthi_span){.start = 0, .end = ring, .owner = STHI_OWNER_NONE, .prev = 0, .next = 0};
    p->span_count = 1;
    p->span_spare = STH_NONE;
    p->span_cursor = 0;
}

/* The span that holds the byte. */
static uint32_t find_span(sthi_pipe *p, uint64_t at) {
    uint32_t i = p->span_cursor;
    while (at >= p->spans[i].end) i = p->spans[i].next;
    while (at < p->spans[i].start) i = p->spans[i].prev;
    return i;
}

/* Makes a boundary at `at` and returns the span that starts there. */
static uint32_t cut(sthi_pipe *p, uint64_t at) {
    uint32_t i = find_span(p, at);
    if (p->spans[i].start == at) return i;
    uint32_t n = new_span(p);
    sthi_span *s = &p->spans[i], *t = &p->spans[n];
    *t = (sthi_span){.start = at, .end = s->end, .owner = s->owner, .prev = i, .next = s->next};
    p->spans[s->next].prev = n;
    s->end = at;
    s->next = n;
    return n;
}

static void note_dep(sthi_pipe *p, uint64_t end, uint32_t owner, bool fresh) {
    uint32_t load = owner == STHI_OWNER_NONE ? p->load_count : owner % p->load_count;
    if (!fresh && p->deps[p->dep_count - 1].load == load) {
        p->deps[p->dep_count - 1].end = end;
        return;
    }
    p->deps[p->dep_count++] = (sthi_dep){.end = end, .load = load};
}

/* Writes [offset, offset + bytes), which does not wrap; `done` bytes of the load lie before it. */
static void write_part(sthi_pipe *p, uint64_t ring, uint64_t offset, uint64_t bytes, uint32_t owner,
                       bool record, uint64_t done) {
    uint64_t end = offset + bytes;
    if (end < ring) (void)cut(p, end);
    uint32_t first = cut(p, offset);
    p->span_cursor = first;
    if (record) note_dep(p, done + p->spans[first].end - offset, p->spans[first].owner, done == 0);
    while (p->spans[first].end < end) {
        uint32_t gone = p->spans[first].next;
        if (record) note_dep(p, done + p->spans[gone].end - offset, p->spans[gone].owner, false);
        p->spans[first].end = p->spans[gone].end;
        drop_span(p, gone);
    }
    p->spans[first].owner = owner;
}

void sthi_tape_write(sthi_pipe *p, uint64_t ring, uint64_t offset, uint64_t bytes, uint32_t owner,
                     bool record) {
    uint64_t head = sthi_min_u64(bytes, ring - offset);
    write_part(p, ring, offset, head, owner, record, 0);
    if (bytes > head) write_part(p, ring, 0, bytes - head, owner, record, head);
}

int64_t sthi_tape_latest(sthi_pipe *p, const sth_plan_input *in, uint64_t ring, uint64_t offset, uint64_t bytes) {
    uint32_t i = find_span(p, offset);
    uint64_t left = bytes, at = offset;
    int64_t latest = -1;
    for (;;) {
        const sthi_span *s = &p->spans[i];
        if (s->owner != STHI_OWNER_NONE) {
            uint64_t lap = s->owner / p->load_count;
            uint64_t use = p->loads[s->owner % p->load_count].last_use + lap * p->use_count;
            int64_t free_at = (int64_t)sthi_let_go(in, use);
            if (free_at > latest) latest = free_at;
        }
        uint64_t here = s->end - at;
        if (here >= left) return latest;
        left -= here;
        at = s->end == ring ? 0 : s->end;
        i = s->next;
    }
}
