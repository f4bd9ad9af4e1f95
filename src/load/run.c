/* Neighbours by one copy: requests from the queue's head on, whose images and places lie side by
 * side. Lock held. */
#include "load/run.h"

#include "load/copy.h"
#include "load/fill.h"
#include "load/interval.h"
#include "load/queue.h"
#include "load/slots.h"
#include "load/together.h"
#include "state/state.h"

typedef struct run {
    uint32_t count;
    bool back;        /* each lies before the one in front of it in the queue, not behind it */
    uint64_t bytes;
    const uint8_t *from;
    uint64_t offset;  /* in the extent */
} run;

/* The next request is for the same bundle, or for a resident like this one, and neither has begun. */
static bool goes_along(const sth_runtime *rt, const sthi_request *a, const sthi_request *b) {
    const sthi_unit *u = &rt->units[a->unit], *v = &rt->units[b->unit];
    bool bundled = u->bundle != STH_NONE && u->bundle == v->bundle && a->planned && b->planned && a->lap == b->lap;
    bool begun = a->slot != STHI_NO_SLOT || b->slot != STHI_NO_SLOT;
    bool there = u->slot != STHI_NO_SLOT || v->slot != STHI_NO_SLOT;
    bool direct = !a->staged && !b->staged && !b->failed;
    return (bundled || (a->resident && b->resident)) && !begun && !there && direct && a->extent == b->extent;
}

static bool places_join(const sth_runtime *rt, const sthi_request *a, const sthi_request *b) {
    const sthi_extent *e = &rt->places.extents[a->extent];
    uint64_t end = a->offset + rt->units[a->unit].bytes;
    return (e->wraps ? end % e->bytes : end) == b->offset && sthi_images_join(&rt->units[a->unit], &rt->units[b->unit]);
}

/* The first `count` of them. */
static run run_of(sth_runtime *rt, uint32_t count, bool back) {
    if (!count) return (run){0};
    const sthi_request *lowest = sthi_request_at(rt, rt->queue.head + (back ? count - 1 : 0));
    run n = {.count = count, .back = back, .from = rt->units[lowest->unit].host, .offset = lowest->offset};
    for (uint32_t i = 0; i < count; i++) n.bytes += rt->units[sthi_request_at(rt, rt->queue.head + i)->unit].bytes;
    return n;
}

static run find_run(sth_runtime *rt) {
    const sthi_request *r = sthi_request_at(rt, rt->queue.head);
    uint64_t bytes = rt->units[r->unit].bytes, most = r->resident ? sthi_most_together(rt->options.budget) : UINT64_MAX;
    bool back = false;
    uint32_t count = 1;
    for (; rt->queue.head + count < rt->queue.tail; count++) {
        const sthi_request *next = sthi_request_at(rt, rt->queue.head + count);
        bytes += rt->units[next->unit].bytes;
        if (bytes > most || !goes_along(rt, r, next)) break;
        bool on = places_join(rt, r, next), before = places_join(rt, next, r);
        if (!on && !before) break;
        if (count == 1) back = !on;
        else if (back ? !before : !on) break;
        r = next;
    }
    if (count == 1) return (run){.count = 1};
    run n = run_of(rt, count, back);
    return sthi_one_window(rt, &rt->units[r->unit], n.from, n.bytes) ? n : (run){.count = 1};
}

/* As many of them, from the queue's head on, as there is room for. */
static uint32_t takeable_part(sth_runtime *rt, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const sthi_request *r = sthi_request_at(rt, rt->queue.head + i);
        if (!sthi_place_takeable(rt, r->extent, r->offset, rt->units[r->unit].bytes)) return i;
    }
    return count;
}

/* Slots for those that get one: 0 is a failure. */
static uint32_t open_run(sth_runtime *rt, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        sthi_request *r = sthi_request_at(rt, rt->queue.head + i);
        if (sthi_open_slot(rt, r->unit, r->extent, r->offset, rt->copies.stream, &r->slot) != STH_OK) return i;
    }
    return count;
}

static sth_status copy_run(sth_runtime *rt, const run *n) {
    uint32_t extent = sthi_request_at(rt, rt->queue.head)->extent, first = sthi_request_at(rt, rt->queue.head)->unit;
    for (uint32_t i = n->count; i-- > 0;) { /* whoever was used last first: in a graph its end tells of the others' */
        const sthi_request *r = sthi_request_at(rt, rt->queue.head + i);
        STHI_TRY(sthi_claim_range(rt, r->slot, 0, rt->units[r->unit].bytes));
    }
    for (uint32_t i = 0; i < n->count; i++) { /* before the copy: where it fails a part may be under way */
        sthi_unit *u = &rt->units[sthi_request_at(rt, rt->queue.head + i)->unit];
        STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_PREFETCHING, u->name));
    }
    sth_devptr to = rt->places.extents[extent].base + n->offset;
    return sthi_copy_bytes(rt, first, to, n->from, n->bytes, rt->copies.stream);
}

/* All of the run are copied by one call; the last one is left to whoever asked. Where something fails, those that have
 * their event by then are there, the next one has failed, and the rest has not begun. */
static sthi_issue issue_run(sth_runtime *rt, const run *wanted) {
    uint32_t opened = open_run(rt, wanted->count);
    if (!opened) return sthi_request_fail(rt, sthi_request_at(rt, rt->queue.head));
    run n = run_of(rt, opened, wanted->back);
    uint64_t head = rt->queue.head, end = head + n.count;
    uint32_t timed = rt->timing.now ? rt->timing.now->copies : 0;
    sth_status rc = copy_run(rt, &n);
    for (uint64_t i = head; i < end && rc == STH_OK; i++) {
        sthi_request *r = sthi_request_at(rt, i);
        rc = sthi_slot_complete(rt, r->slot);
        if (rc != STH_OK) break;
        sthi_request_loaded(rt, r);
        if (i > head) {
            rt->stats.joined_copies++;
            if (rt->timing.now && rt->timing.now->copies > timed) sthi_interval_join(rt, r->unit);
        }
        if (i + 1 < end) sthi_queue_leave(rt);
    }
    if (rc == STH_OK) return STHI_ISSUE_DONE;
    sthi_error_copy why;
    sthi_error_save(&why);
    for (uint64_t i = rt->queue.head + 1; i < end; i++) sthi_request_abandon(rt, i);
    sthi_issue failed = sthi_request_fail(rt, sthi_request_at(rt, rt->queue.head));
    (void)sthi_error_restore(&why);
    return failed;
}

bool sthi_issue_with_others(sth_runtime *rt, const sthi_request *r, uint32_t wanted, sthi_issue *out) {
    run n = find_run(rt);
    if (n.count > 1 && !sthi_place_takeable(rt, r->extent, n.offset, n.bytes)) {
        bool now = wanted != STH_NONE && rt->units[wanted].state != STH_UNIT_STATE_GPU_READY;
        if (!r->resident && !now) {
            *out = STHI_ISSUE_NO_PLACE;
            return true;
        }
        n = run_of(rt, takeable_part(rt, n.count), n.back);
    }
    if (n.count < 2) return false;
    *out = issue_run(rt, &n);
    return true;
}
