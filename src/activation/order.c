/* Prediction and choice.
 *
 * Each save has a number in its pass. As passes look alike, the number stands for the same tensor in the next
 * one; a save of another size under the same number is not predicted. The plan for the next pass is what was
 * spilled or dropped in this one, chosen anew: first what can be computed again, which reads and writes the device's
 * memory about as much as the copies out and back would, and takes neither link nor host memory; then by benefit:
 * bytes times the time until they are asked for, and only where the link can bring them out and back in that time. */
#include "activation/order.h"

#include <stdlib.h>

#include "base/memory.h"

enum { SEARCHED = 2048 }; /* questions ahead among which one that came is looked for */

static void trace_fini(sthi_trace *t) {
    sthi_free(t->saved);
    sthi_free(t->asked);
    *t = (sthi_trace){0};
}

void sthi_order_fini(sthi_order *o) {
    trace_fini(&o->now);
    trace_fini(&o->last);
}

bool sthi_order_save(sthi_order *o, sthi_saved saved, uint32_t *out_ordinal) {
    sthi_trace *t = &o->now;
    if (t->count == t->room) {
        uint32_t room = t->room ? t->room * 2 : 64;
        sthi_saved *more = sthi_realloc(t->saved, room, sizeof *more);
        if (!more) return false;
        t->saved = more;
        t->room = room;
    }
    *out_ordinal = t->count;
    t->saved[t->count++] = saved;
    return true;
}

bool sthi_order_plan_says_go(const sthi_order *o, uint32_t ordinal, uint64_t bytes) {
    const sthi_trace *t = &o->last;
    return ordinal < t->count && t->saved[ordinal].plan && t->saved[ordinal].bytes == bytes;
}

void sthi_order_ask(sthi_order *o, uint32_t ordinal, int64_t now_ns) {
    sthi_trace *t = &o->now, *last = &o->last;
    if (ordinal < t->count && !t->saved[ordinal].asked_ns) t->saved[ordinal].asked_ns = now_ns;
    if (t->asked_count == t->asked_room) {
        uint32_t room = t->asked_room ? t->asked_room * 2 : 64;
        uint32_t *more = sthi_realloc(t->asked, room, sizeof *more);
        if (more) {
            t->asked = more;
            t->asked_room = room;
        }
    }
    if (t->asked_count < t->asked_room) t->asked[t->asked_count++] = ordinal;
    if (ordinal < o->lowest) o->lowest = ordinal;
    uint32_t end = last->asked_count - o->cursor < SEARCHED ? last->asked_count : o->cursor + SEARCHED;
    for (uint32_t i = o->cursor; i < end; i++) /* from here on: skipped ones are not expected again */
        if (last->asked[i] == ordinal) {
            o->cursor = i + 1;
            return;
        }
}

bool sthi_order_next(const sthi_order *o, uint32_t n, uint32_t *out_ordinal) {
    const sthi_trace *last = &o->last;
    if (last->asked_count) {
        if (n >= last->asked_count - o->cursor) return false;
        *out_ordinal = last->asked[o->cursor + n];
        return true;
    }
    uint32_t end = o->lowest < o->now.count ? o->lowest : o->now.count;
    if (n >= end) return false;
    *out_ordinal = end - 1 - n;
    return true;
}

/* ---- the plan */

typedef struct candidate {
    bool recomputable;
    double benefit;
    uint32_t ordinal;
} candidate;

static int by_benefit(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->recomputable != y->recomputable) return x->recomputable ? -1 : 1;
    if (x->benefit != y->benefit) return x->benefit < y->benefit ? 1 : -1;
    return x->ordinal < y->ordinal ? -1 : x->ordinal > y->ordinal;
}

/* What did not go and would not be back in time is no candidate. */
static bool worth(const sthi_saved *s, double link) {
    if (s->recomputable) return true;
    if (s->passing || !s->asked_ns) return s->gone;
    double away = (double)(s->asked_ns - s->saved_ns) * 1e-9;
    return s->gone || link <= 0 || away > 2 * (double)s->bytes / link;
}

static void plan(sthi_trace *t, double link) {
    uint64_t wanted = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < t->count; i++) {
        t->saved[i].plan = t->saved[i].gone;
        if (t->saved[i].gone) wanted += t->saved[i].bytes;
    }
    wanted -= wanted < t->spare ? wanted : t->spare;
    candidate *list = t->count ? sthi_zalloc(t->count, sizeof *list) : NULL;
    if (!list) return; /* as before */
    for (uint32_t i = 0; i < t->count; i++) {
        const sthi_saved *s = &t->saved[i];
        if (!worth(s, link)) continue;
        /* Never asked for: it was dropped, and the later it was saved the sooner. */
        double away = s->asked_ns ? (double)(s->asked_ns - s->saved_ns) : 0;
        list[count++] = (candidate){s->recomputable, (double)s->bytes * away, i};
    }
    qsort(list, count, sizeof *list, by_benefit);
    for (uint32_t i = 0; i < t->count; i++) t->saved[i].plan = false;
    for (uint32_t i = 0; i < count && wanted; i++) {
        sthi_saved *s = &t->saved[list[i].ordinal];
        s->plan = true;
        wanted -= wanted < s->bytes ? wanted : s->bytes;
    }
    sthi_free(list);
}

void sthi_order_pass(sthi_order *o, double link) {
    if (o->now.asked_count) {
        plan(&o->now, link);
        sthi_trace old = o->last;
        o->last = o->now;
        o->now = old;
    }
    o->now.count = o->now.asked_count = 0;
    o->now.spare = UINT64_MAX;
    o->cursor = 0;
    o->lowest = UINT32_MAX;
}
