/* Issue: turns requests into places, copies and events. Everything here only enqueues; what waits is a
 * demand load of a staged unit, which drops the lock while it reads. Meanwhile its slot is incomplete, which
 * keeps others from the slot and from its extent. */
#include "load/issue.h"

#include "load/bundle.h"
#include "load/expand.h"
#include "load/feed.h"
#include "load/fingerprint.h"
#include "load/lanes.h"
#include "load/read/reader.h"
#include "load/slots.h"
#include "runtime/geometry.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/timing.h"
#include "state/state.h"

uint32_t sthi_distance(const sth_runtime *rt, uint32_t unit) {
    uint32_t t = rt->units[unit].first_use, whole = rt->order.count + 1;
    if (t == STH_NONE) return whole;
    uint32_t first = t;
    while (t != STH_NONE && t < rt->program.cursor) t = rt->order.next[t];
    return t != STH_NONE ? t - rt->program.cursor + 1 : first + rt->order.count - rt->program.cursor + 1;
}

/* Copy intervals: a run of copies that do not wait for a place in between is timed as one. */
static void interval_begin(sth_runtime *rt, uint32_t unit, sth_stream stream) {
    sthi_timed_step *t = rt->timing.now;
    if (!t) return;
    if (t->copies == t->copy_cap) {
        rt->timing.too_short = true;
        return;
    }
    t->copy[t->copies].unit = unit;
    t->copy[t->copies].last = t->copy[t->copies].joined = false;
    t->copy[t->copies].demand = stream == rt->copies.demand_stream;
    t->copy_open = sthi_timing_record(rt, &t->copy[t->copies].begin, stream);
}

void sthi_interval_end(sth_runtime *rt) {
    sthi_timed_step *t = rt->timing.now;
    if (!t || !t->copy_open) return;
    t->copy_open = false;
    sth_stream stream = t->copy[t->copies].demand ? rt->copies.demand_stream : rt->copies.stream;
    if (sthi_timing_record(rt, &t->copy[t->copies].end, stream)) t->copies++;
}

/* Through the conductor, when there is one. */
static sth_status copy_by_lane(sth_runtime *rt, sthi_lane *lane, uint32_t unit, sth_devptr to, const uint8_t *from,
                               uint64_t bytes, sth_stream stream) {
    sthi_way way = sthi_ask_lane(rt, lane, unit, bytes);
    if (rt->timing.now && !rt->timing.now->copy_open) interval_begin(rt, unit, stream);
    sth_status rc = STH_OK;
    for (uint64_t at = 0; at < bytes && rc == STH_OK; at += way.piece)
        rc = STHI_DEV(rt, copy_h2d, to + at, from + at, sthi_min_u64(way.piece, bytes - at), stream);
    sthi_lane_end(lane, way.flight);
    return rc;
}

sth_status sthi_copy_bytes(sth_runtime *rt, uint32_t unit, sth_devptr to, const uint8_t *from, uint64_t bytes,
                           sth_stream stream) {
    sthi_lane *lane = stream == rt->copies.demand_stream ? rt->copies.demand_lane : rt->copies.lane;
    if (lane && rt->graph.state != STHI_GRAPH_CAPTURING) { /* when a graph is launched is not known here */
        STHI_TRY(copy_by_lane(rt, lane, unit, to, from, bytes, stream));
    } else {
        if (rt->timing.now && !rt->timing.now->copy_open) interval_begin(rt, unit, stream);
        STHI_TRY(STHI_DEV(rt, copy_h2d, to, from, bytes, stream));
    }
    if (stream == rt->copies.stream) rt->graph.copy_number++;
    rt->stats.h2d_bytes += bytes;
    if (rt->timing.now && rt->timing.now->copy_open) rt->timing.now->copied_bytes += bytes;
    rt->current.h2d_bytes += (double)bytes;
    return STH_OK;
}

sth_stream sthi_copies_on(const sth_runtime *rt, int32_t slot) {
    sth_stream writer = rt->sync[slot].filled_by;
    return rt->expand.stream && writer == rt->expand.stream ? rt->copies.stream : writer;
}

/* Enqueues the copy of a piece whose range is claimed, and its expansion; `from` are its bytes. */
static sth_status copy_piece(sth_runtime *rt, int32_t slot, const sthi_piece_of *p, const uint8_t *from) {
    const sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    sth_devptr to = rt->places.extents[s->extent].base + s->offset + p->begin;
    if (sthi_packed_on_link(rt, u)) STHI_TRY(sthi_expand_piece(rt, slot, p, from));
    else STHI_TRY(sthi_copy_bytes(rt, s->unit, to, from, p->bytes, rt->sync[slot].filled_by));
    if (u->state == STH_UNIT_STATE_HOST_STAGED)
        STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_PREFETCHING, u->name));
    return STH_OK;
}

/* Claims a piece of a unit's pinned image, and adds to it what follows as long as the copy waits for nothing more: each
 * copy costs the link some microseconds. */
static sth_status claim_run(sth_runtime *rt, int32_t slot, sthi_piece_of *p) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    STHI_TRY(sthi_claim_range(rt, slot, p->begin, p->bytes));
    if (sthi_packed_on_link(rt, u)) return STH_OK;
    uint64_t most = sthi_run_bytes(rt), end, next;
    for (; (end = p->begin + p->bytes) < u->bytes; p->bytes += next) {
        next = sthi_min_u64(rt->copies.chunk, u->bytes - end);
        if (p->bytes + next > most || !sthi_range_free(rt, slot, end, next)) break;
    }
    p->from_bytes = p->bytes;
    sthi_slot *s = &rt->places.slots[slot];
    s->claimed = sthi_max_u64(s->claimed, end); /* what is free needs no more */
    return STH_OK;
}

/* The whole unit from its pinned image. */
static sth_status copy_direct(sth_runtime *rt, int32_t slot) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    sthi_piece_of p;
    for (uint64_t begin = 0; begin < u->bytes; begin += p.bytes) {
        p = sthi_next_piece(rt, u, begin);
        STHI_TRY(claim_run(rt, slot, &p));
        STHI_TRY(copy_piece(rt, slot, &p, u->host + p.from));
    }
    return STH_OK;
}

static sth_status complete_slot(sth_runtime *rt, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    sthi_interval_end(rt);
    STHI_TRY(STHI_DEV(rt, event_record, rt->sync[slot].ready, rt->sync[slot].filled_by));
    rt->sync[slot].copy_number = rt->graph.copy_number;
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_GPU_READY, u->name));
    s->complete = true;
    u->copies++;
    sthi_timed_step *t = rt->timing.now;
    if (t && t->copies && t->copy[t->copies - 1].unit == s->unit) t->copy[t->copies - 1].last = true;
    rt->stats.copies++;
    sthi_master_read(rt, s->unit, sthi_copies_on(rt, slot));
    return STH_OK;
}

/* The read job for the next chunk of the request at the queue's head; NULL if it is not begun. */
static sthi_job *job_for(sth_runtime *rt, uint64_t begin) {
    if (rt->slabs.job_head == rt->slabs.job_tail) return NULL;
    sthi_job *j = &rt->slabs.jobs[rt->slabs.job_head % rt->slabs.count];
    if (!j->cancelled && j->ticket == rt->queue.head && j->begin == begin) return j;
    /* Later requests were read first (this unit was on the device then, and has left since). */
    if (!j->cancelled) sthi_reads_rewind(rt);
    return NULL;
}

/* Stays at the queue's head until its unit is asked for, which tries again, or the step ends. */
static sthi_issue fail_request(sth_runtime *rt, sthi_request *r) {
    r->failed = true;
    if (r->slot != STHI_NO_SLOT) sthi_abandon_slot(rt, r->slot);
    r->slot = STHI_NO_SLOT;
    return STHI_ISSUE_FAILED;
}

/* Static policy: cost of taking a slot. Far and large goes first. */
static double static_cost(void *context, const sthi_slot *s) {
    sth_runtime *rt = context;
    uint32_t far = sthi_distance(rt, s->unit);
    /* What the lookahead itself wants must stay, or prefetches would evict each other. */
    if (s->leases || !s->complete || far <= rt->options.prefetch_window) return -1;
    return 1.0 / ((double)far * (double)s->bytes);
}

static sthi_issue start_request(sth_runtime *rt, sthi_request *r) {
    sthi_place home = {r->extent, r->offset};
    if (r->extent == STH_NONE &&
        !sthi_places_choose(&rt->places, rt->units[r->unit].bytes, static_cost, rt, &home))
        return STHI_ISSUE_NO_PLACE;
    bool packed = sthi_packed_on_link(rt, &rt->units[r->unit]);
    sth_stream writer = packed ? rt->expand.stream : rt->copies.stream;
    if (sthi_open_slot(rt, r->unit, home.extent, home.offset, writer, &r->slot) != STH_OK)
        return fail_request(rt, r);
    return STHI_ISSUE_DONE;
}

static const uint8_t *slab_bytes(sth_runtime *rt, sth_slab slab, uint32_t shift) {
    return (const uint8_t *)sthi_pool_slab_address(rt->slabs.pool, slab) + shift;
}

/* What becomes of a request whose unit is on the device now. */
static void note_loaded(sth_runtime *rt, const sthi_request *r) {
    rt->places.slots[r->slot].uses_left = r->uses;
    rt->places.slots[r->slot].resident = r->resident;
    rt->sync[r->slot].lap = r->lap;
}

/* Carries the request at the queue's head as far as it goes now. */
static sthi_issue issue_head(sth_runtime *rt, sthi_request *r) {
    sthi_unit *u = &rt->units[r->unit];
    if (r->slot == STHI_NO_SLOT) {
        if (u->slot != STHI_NO_SLOT) { /* loaded on demand meanwhile: that copy serves */
            rt->places.slots[u->slot].uses_left += r->uses;
            rt->sync[u->slot].lap = r->lap;
            return STHI_ISSUE_DONE;
        }
        sthi_issue started = start_request(rt, r);
        if (started != STHI_ISSUE_DONE) return started;
    }
    sthi_slot *s = &rt->places.slots[r->slot];
    while (s->claimed < u->bytes) {
        sthi_piece_of p = sthi_next_piece(rt, u, s->claimed);
        if (!sthi_range_takeable(rt, r->slot, p.begin, p.bytes)) return STHI_ISSUE_NO_PLACE;
        sthi_job *job = r->staged ? job_for(rt, p.begin) : NULL;
        if (r->staged && (!job || job->state == STHI_JOB_READING)) return STHI_ISSUE_NOT_READ;
        if (job && job->state == STHI_JOB_FAILED) return fail_request(rt, r);
        sth_status claimed = job ? sthi_claim_range(rt, r->slot, p.begin, p.bytes) : claim_run(rt, r->slot, &p);
        if (claimed != STH_OK) return fail_request(rt, r);
        const uint8_t *from = job ? slab_bytes(rt, job->slab, job->shift) : u->host + p.from;
        if (copy_piece(rt, r->slot, &p, from) != STH_OK) return fail_request(rt, r);
        if (job) {
            sthi_slab_fly(rt, job->slab, rt->copies.stream);
            rt->slabs.job_head++;
            sthi_readers_wake(rt);
        }
    }
    if (complete_slot(rt, r->slot) != STH_OK) return fail_request(rt, r);
    note_loaded(rt, r);
    return STHI_ISSUE_DONE;
}

static sthi_request *request(sth_runtime *rt, uint64_t number) {
    return &rt->queue.requests[number % STHI_REQUEST_CAP];
}

static void leave_queue(sth_runtime *rt) {
    rt->queue.head++;
    sthi_jobs_cancel(rt, rt->queue.head);
    sthi_cond_broadcast(&rt->changed);
}

/* ---- neighbours by one copy: `count` requests from the queue's head on, whose images and places lie side by side */

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
    const sthi_request *lowest = request(rt, rt->queue.head + (back ? count - 1 : 0));
    run n = {.count = count, .back = back, .from = rt->units[lowest->unit].host, .offset = lowest->offset};
    for (uint32_t i = 0; i < count; i++) n.bytes += rt->units[request(rt, rt->queue.head + i)->unit].bytes;
    return n;
}

static run find_run(sth_runtime *rt) {
    const sthi_request *r = request(rt, rt->queue.head);
    uint64_t bytes = rt->units[r->unit].bytes, most = r->resident ? sthi_most_together(rt->options.budget) : UINT64_MAX;
    bool back = false;
    uint32_t count = 1;
    for (; rt->queue.head + count < rt->queue.tail; count++) {
        const sthi_request *next = request(rt, rt->queue.head + count);
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
        const sthi_request *r = request(rt, rt->queue.head + i);
        if (!sthi_place_takeable(rt, r->extent, r->offset, rt->units[r->unit].bytes)) return i;
    }
    return count;
}

static void abandon(sth_runtime *rt, uint64_t number) {
    sthi_request *r = request(rt, number);
    if (r->slot != STHI_NO_SLOT) sthi_abandon_slot(rt, r->slot);
    r->slot = STHI_NO_SLOT;
}

/* Slots for those that get one: 0 is a failure. */
static uint32_t open_run(sth_runtime *rt, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        sthi_request *r = request(rt, rt->queue.head + i);
        if (sthi_open_slot(rt, r->unit, r->extent, r->offset, rt->copies.stream, &r->slot) != STH_OK) return i;
    }
    return count;
}

static sth_status copy_run(sth_runtime *rt, const run *n) {
    uint32_t extent = request(rt, rt->queue.head)->extent, first = request(rt, rt->queue.head)->unit;
    for (uint32_t i = n->count; i-- > 0;) { /* whoever was used last first: in a graph its end tells of the others' */
        const sthi_request *r = request(rt, rt->queue.head + i);
        STHI_TRY(sthi_claim_range(rt, r->slot, 0, rt->units[r->unit].bytes));
    }
    for (uint32_t i = 0; i < n->count; i++) { /* before the copy: where it fails a part may be under way */
        sthi_unit *u = &rt->units[request(rt, rt->queue.head + i)->unit];
        STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_PREFETCHING, u->name));
    }
    sth_devptr to = rt->places.extents[extent].base + n->offset;
    return sthi_copy_bytes(rt, first, to, n->from, n->bytes, rt->copies.stream);
}

/* A unit's share of the interval before it. */
static void join_interval(sth_runtime *rt, uint32_t unit) {
    sthi_timed_step *t = rt->timing.now;
    if (t->copies == t->copy_cap) {
        rt->timing.too_short = true;
        return;
    }
    sthi_timed_copy *c = &t->copy[t->copies++];
    c->unit = unit;
    c->last = c->joined = true;
    c->demand = false;
}

/* All of the run are copied by one call; the last one is left to whoever asked. Where something fails, those that have
 * their event by then are there, the next one has failed, and the rest has not begun. */
static sthi_issue issue_run(sth_runtime *rt, const run *wanted) {
    uint32_t opened = open_run(rt, wanted->count);
    if (!opened) return fail_request(rt, request(rt, rt->queue.head));
    run n = run_of(rt, opened, wanted->back);
    uint64_t head = rt->queue.head, end = head + n.count;
    uint32_t timed = rt->timing.now ? rt->timing.now->copies : 0;
    sth_status rc = copy_run(rt, &n);
    for (uint64_t i = head; i < end && rc == STH_OK; i++) {
        sthi_request *r = request(rt, i);
        rc = complete_slot(rt, r->slot);
        if (rc != STH_OK) break;
        note_loaded(rt, r);
        if (i > head) {
            rt->stats.joined_copies++;
            if (rt->timing.now && rt->timing.now->copies > timed) join_interval(rt, r->unit);
        }
        if (i + 1 < end) leave_queue(rt);
    }
    if (rc == STH_OK) return STHI_ISSUE_DONE;
    sthi_error_copy why;
    sthi_error_save(&why);
    for (uint64_t i = rt->queue.head + 1; i < end; i++) abandon(rt, i);
    sthi_issue failed = fail_request(rt, request(rt, rt->queue.head));
    (void)sthi_error_restore(&why);
    return failed;
}

/* The queue's head, with what may go along; false: it goes alone. A bundle waits until there is room for all of it, as
 * its plan says, unless somebody waits for a unit that is not there yet. */
__attribute__((noinline)) /* or each look at the queue pays for its frame */
static bool issue_with_others(sth_runtime *rt, const sthi_request *r, uint32_t wanted, sthi_issue *out) {
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

void sthi_pump_for(sth_runtime *rt, uint32_t wanted) {
    for (;;) {
        sthi_feed(rt);
        if (rt->queue.head == rt->queue.tail) return;
        sthi_request *r = request(rt, rt->queue.head);
        if (r->failed) return;
        bool alone = !r->resident && !rt->planned.bundles;
        if (alone || !issue_with_others(rt, r, wanted, &rt->queue.head_state)) rt->queue.head_state = issue_head(rt, r);
        /* Readers may have passed it over: its unit was on the device then. */
        if (rt->queue.head_state == STHI_ISSUE_NOT_READ) sthi_readers_wake(rt);
        if (rt->queue.head_state != STHI_ISSUE_DONE) return;
        leave_queue(rt);
    }
}

void sthi_cancel_queue(sth_runtime *rt) {
    for (uint64_t n = rt->queue.head; n < rt->queue.tail; n++) {
        sthi_request *r = &rt->queue.requests[n % STHI_REQUEST_CAP];
        if (r->resident) rt->program.resident_next = 0;
        else if (r->kept) rt->program.kept_next = 0;
        else if (r->planned && r->sequence < rt->program.next_load) rt->program.next_load = r->sequence;
        abandon(rt, n);
    }
    rt->queue.head = rt->queue.tail;
    sthi_jobs_cancel(rt, rt->queue.head);
    sthi_cond_broadcast(&rt->changed);
}

/* Demand loads: planned copies and residents are taken only when nothing cheaper is there. */
static double demand_cost(void *context, const sthi_slot *s) {
    sth_runtime *rt = context;
    if (s->leases || !s->complete) return -1;
    double far = (double)sthi_distance(rt, s->unit);
    return (double)s->bytes / far * (s->uses_left ? 4.0 : 1.0);
}

/* So much that a place of `bytes` is found wherever the leases lie: each keeps its extent, and parts what is left.
 * No more than all units need. */
static uint64_t room_beside_leases(const sth_runtime *rt, uint64_t bytes) {
    uint64_t parts = 1, all = 0;
    for (uint32_t i = 0; i < rt->places.slot_cap; i++)
        if (rt->places.slots[i].live && rt->places.slots[i].leases) parts += 2;
    for (uint32_t i = 0; i < rt->unit_count; i++) all += rt->units[i].bytes;
    return sthi_min_u64(rt->leases.bytes + parts * bytes, all);
}

static sth_status find_place(sth_runtime *rt, uint32_t unit, sthi_place *out) {
    sthi_unit *u = &rt->units[unit];
    if (u->resident && rt->program.on) {
        /* Its home may hold what strayed there; take it back if nobody is using it. */
        *out = (sthi_place){u->home.extent, u->home.offset};
        int32_t id = STHI_NO_SLOT;
        bool free_now = true;
        while ((id = sthi_places_touching(&rt->places, out->extent, out->offset, u->bytes, STHI_NO_SLOT,
                                          id)) != STHI_NO_SLOT)
            if (demand_cost(rt, &rt->places.slots[id]) < 0) free_now = false;
        if (free_now) return STH_OK;
    }
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    /* A load half way holds its range; without it there may be room. */
    sthi_cancel_queue(rt);
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    STHI_TRY(sthi_rearrange(rt, u->bytes));
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    return sthi_no_place_error(rt, unit, room_beside_leases(rt, u->bytes));
}

/* Piece by piece: read into a slab with the lock dropped, copy, next. */
static sth_status copy_staged(sth_runtime *rt, int32_t slot) {
    uint32_t unit = rt->places.slots[slot].unit;
    uint64_t total = rt->units[unit].bytes;
    rt->current.host_waits++;
    sthi_piece_of p;
    for (uint64_t begin = 0; begin < total; begin += p.bytes) {
        p = sthi_next_piece(rt, &rt->units[unit], begin);
        sth_slab slab;
        STHI_TRY(sthi_slab_wait(rt, &slab));
        uint32_t shift = 0;
        sth_status rc = sthi_read_slab(rt, unit, p.from, p.from_bytes, slab, &shift);
        if (rc == STH_OK) rc = copy_piece(rt, slot, &p, slab_bytes(rt, slab, shift));
        if (rc != STH_OK) {
            (void)sthi_pool_release(rt->slabs.pool, &slab, 1);
            sthi_readers_wake(rt);
            return rc;
        }
        sthi_slab_fly(rt, slab, rt->sync[slot].filled_by);
    }
    return STH_OK;
}

/* Fills an open slot of the demand stream; the slot is gone when that fails. */
static sth_status fill_slot(sth_runtime *rt, int32_t slot) {
    sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    sthi_interval_end(rt);
    sth_status rc = sthi_claim_range(rt, slot, 0, u->bytes); /* all of it, before the lock is dropped */
    if (rc == STH_OK) rc = u->direct ? copy_direct(rt, slot) : copy_staged(rt, slot);
    if (rc == STH_OK) rc = complete_slot(rt, slot);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        sthi_abandon_slot(rt, slot);
        (void)sthi_error_restore(&why);
    }
    sthi_cond_broadcast(&rt->changed); /* other threads may wait for the same unit */
    return rc;
}

sth_status sthi_demand_load(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    sthi_place place;
    int32_t slot;
    STHI_TRY(find_place(rt, unit, &place));
    STHI_TRY(sthi_open_slot(rt, unit, place.extent, place.offset, rt->copies.demand_stream, &slot));
    rt->stats.demand_loads++;
    if (rt->program.on && !(u->flags & STH_UNIT_ON_DEMAND)) rt->step.strays++;
    STHI_TRY(fill_slot(rt, slot));
    rt->places.slots[slot].resident = u->resident && place.extent == u->home.extent &&
                                      place.offset == u->home.offset;
    return STH_OK;
}

sth_status sthi_load_home(sth_runtime *rt, uint32_t unit) {
    const sthi_unit *u = &rt->units[unit];
    int32_t slot;
    STHI_TRY(sthi_open_slot(rt, unit, u->home.extent, u->home.offset, rt->copies.demand_stream, &slot));
    STHI_TRY(fill_slot(rt, slot));
    rt->places.slots[slot].resident = true;
    return STH_OK;
}

sth_status sthi_refresh(sth_runtime *rt, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    if (s->leases && atomic_load(&rt->sync[slot].drops) >= s->leases) { /* its end could not be noted: again */
        sthi_drain_drops(rt);
        if (s->leases && sthi_error_last()->status != STH_OK) return sthi_error_last()->status;
    }
    if (s->leases)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, u->name,
                         "unit '%s' was written while its copy on the device is in use; end that use first "
                         "(an output that is a view of the weight also counts)", u->name);
    STHI_TRY(sthi_fingerprint_take(rt, s->unit));
    STHI_TRY(sthi_wait_for_slot(rt, slot, rt->copies.demand_stream));
    sthi_forget_users(rt, slot);
    rt->sync[slot].filled_by = rt->copies.demand_stream;
    rt->sync[slot].arrived = false;
    s->complete = s->stale = false; /* a write that comes while it is read makes it stale again */
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_EVICTING, u->name));
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_HOST_STAGED, u->name));
    return fill_slot(rt, slot);
}
