/* Issue: turns requests into places, copies and events. Everything here only enqueues; the one place that
 * waits is a demand load of a staged unit, which drops the lock while it reads.
 *
 * A chunk is copied into a range only after the copy stream waits for the last use of whoever had it, and
 * slots are taken only when nobody leases them and no planned use of theirs is left. */
#include "stream/engine.h"

sth_status sthi_event_take(sth_runtime *rt, sthi_event **out) {
    if (rt->event_count) {
        *out = rt->events[--rt->event_count];
        return STH_OK;
    }
    return STHI_DEV(rt, event_create, false, out);
}

void sthi_event_give(sth_runtime *rt, sthi_event *event) {
    if (!event) return;
    if (rt->event_count < rt->event_cap) rt->events[rt->event_count++] = event;
    else STHI_DEV(rt, event_destroy, event);
}

uint32_t sthi_distance(const sth_runtime *rt, uint32_t unit) {
    uint32_t t = rt->units[unit].first_use, whole = rt->order_count + 1;
    if (t == STH_NONE) return whole;
    uint32_t first = t;
    while (t != STH_NONE && t < rt->cursor) t = rt->order_next[t];
    return t != STH_NONE ? t - rt->cursor + 1 : first + rt->order_count - rt->cursor + 1;
}

/* Makes stream `behind` wait for all that touches the slot: its copy and the uses that have ended. */
static sth_status wait_for_slot(sth_runtime *rt, int32_t slot, sth_stream behind) {
    sthi_slot_sync *y = &rt->sync[slot];
    if (y->ready && y->filled_by != behind) STHI_TRY(STHI_DEV(rt, stream_wait, behind, y->ready));
    for (uint32_t i = 0; i < y->user_count; i++)
        if (y->released[i]) STHI_TRY(STHI_DEV(rt, stream_wait, behind, y->released[i]));
    return STH_OK;
}

static void forget_users(sth_runtime *rt, sthi_slot_sync *y) {
    for (uint32_t i = 0; i < y->user_count; i++) {
        sthi_event_give(rt, y->released[i]);
        y->released[i] = NULL;
    }
    y->user_count = 0;
}

/* The record goes; the unit is no longer on the device. */
static void close_slot(sth_runtime *rt, int32_t slot, sth_unit_state by_way_of) {
    sthi_slot_sync *y = &rt->sync[slot];
    sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    forget_users(rt, y);
    sthi_event_give(rt, y->ready);
    y->ready = NULL;
    y->timed_use = STH_NONE;
    if (u->state == STH_UNIT_STATE_GPU_READY) (void)sthi_unit_move(&u->state, by_way_of, u->name);
    (void)sthi_unit_move(&u->state, STH_UNIT_STATE_UNLOADED, u->name);
    u->slot = STHI_NO_SLOT;
    if (rt->last_writable_slot == (uint32_t)slot) rt->last_writable_slot = STH_NONE;
    sthi_slot_close(&rt->places, slot);
}

sth_status sthi_evict(sth_runtime *rt, int32_t slot, sth_stream behind) {
    sthi_slot *s = &rt->places.slots[slot];
    STHI_TRY(wait_for_slot(rt, slot, behind));
    if (rt->device->ops->poison) {
        sthi_extent *e = &rt->places.extents[s->extent];
        STHI_DEV(rt, poison, e->base + s->offset, s->claimed, behind);
    }
    close_slot(rt, slot, STH_UNIT_STATE_EVICTING);
    rt->stats.evictions++;
    rt->current.evictions++;
    return STH_OK;
}

static sth_status open_slot(sth_runtime *rt, uint32_t unit, uint32_t extent, uint64_t offset, sth_stream by,
                            int32_t *out) {
    sthi_unit *u = &rt->units[unit];
    int32_t slot = sthi_slot_open(&rt->places, unit, extent, offset, u->bytes);
    if (slot == STHI_NO_SLOT)
        return sthi_fail(STH_INTERNAL, NULL, 0, u->name, "no record left for a place of unit '%s'", u->name);
    sthi_slot_sync *y = &rt->sync[slot];
    y->filled_by = by;
    y->user_count = 0;
    y->timed_use = STH_NONE;
    sth_status rc = sthi_event_take(rt, &y->ready);
    if (rc == STH_OK) rc = sthi_unit_move(&u->state, STH_UNIT_STATE_HOST_STAGED, u->name);
    if (rc != STH_OK) {
        sthi_event_give(rt, y->ready);
        y->ready = NULL;
        sthi_slot_close(&rt->places, slot);
        return rc;
    }
    u->slot = slot;
    *out = slot;
    return STH_OK;
}

/* A load that cannot be finished: what was copied is dead, ordered behind an event on its stream. */
static void abandon_slot(sth_runtime *rt, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    if (s->claimed) {
        /* Chunks are on their way: whoever takes the range must wait for them on the same stream. The
         * stream itself keeps that order for the next load on it; for others, wait here once. */
        sthi_slot_sync *y = &rt->sync[slot];
        sth_stream other = y->filled_by == rt->copy_stream ? rt->demand_stream : rt->copy_stream;
        if (STHI_DEV(rt, event_record, y->ready, y->filled_by) == STH_OK)
            (void)STHI_DEV(rt, stream_wait, other, y->ready);
    }
    close_slot(rt, slot, STH_UNIT_STATE_EVICTING);
}

static bool takeable(const sthi_slot *s) { return !s->leases && !s->uses_left && s->complete; }

static bool range_takeable(sth_runtime *rt, const sthi_slot *s, uint64_t begin, uint64_t bytes) {
    const sthi_extent *e = &rt->places.extents[s->extent];
    uint64_t at = (s->offset + begin) % (e->wraps ? e->bytes : UINT64_MAX);
    int32_t self = (int32_t)(s - rt->places.slots), id = STHI_NO_SLOT;
    while ((id = sthi_places_touching(&rt->places, s->extent, at, bytes, self, id)) != STHI_NO_SLOT)
        if (!takeable(&rt->places.slots[id])) return false;
    return true;
}

static sth_status clear_range(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes) {
    const sthi_slot *s = &rt->places.slots[slot];
    const sthi_extent *e = &rt->places.extents[s->extent];
    uint64_t at = (s->offset + begin) % (e->wraps ? e->bytes : UINT64_MAX);
    int32_t id;
    while ((id = sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT)) != STHI_NO_SLOT)
        STHI_TRY(sthi_evict(rt, id, rt->sync[slot].filled_by));
    return STH_OK;
}

/* Copy intervals: a run of copies that do not wait for a place in between is timed as one. */
static void interval_begin(sth_runtime *rt, uint32_t unit, sth_stream stream) {
    sthi_timed_step *t = rt->timing;
    if (!t || t->copies == t->copy_cap) return;
    t->copy[t->copies].unit = unit;
    t->copy_open = sthi_timing_record(rt, &t->copy[t->copies].begin, stream);
    t->copy_stream = stream;
}

void sthi_interval_end(sth_runtime *rt) {
    sthi_timed_step *t = rt->timing;
    if (!t || !t->copy_open) return;
    t->copy_open = false;
    if (sthi_timing_record(rt, &t->copy[t->copies].end, t->copy_stream)) t->copies++;
}

static bool range_is_clear(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes) {
    const sthi_slot *s = &rt->places.slots[slot];
    const sthi_extent *e = &rt->places.extents[s->extent];
    uint64_t at = (s->offset + begin) % (e->wraps ? e->bytes : UINT64_MAX);
    return sthi_places_touching(&rt->places, s->extent, at, bytes, slot, STHI_NO_SLOT) == STHI_NO_SLOT;
}

/* Enqueues the copy of [begin, begin+bytes) of the place from `from` (already offset). */
static sth_status copy_chunk(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes, const uint8_t *from) {
    sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    const sthi_extent *e = &rt->places.extents[s->extent];
    sth_stream stream = rt->sync[slot].filled_by;
    if (!range_is_clear(rt, slot, begin, bytes)) {
        sthi_interval_end(rt);
        STHI_TRY(clear_range(rt, slot, begin, bytes));
    }
    if (rt->timing && !rt->timing->copy_open) interval_begin(rt, s->unit, stream);
    STHI_TRY(STHI_DEV(rt, copy_h2d, e->base + s->offset + begin, from, bytes, stream));
    if (s->claimed < begin + bytes) s->claimed = begin + bytes;
    if (u->state == STH_UNIT_STATE_HOST_STAGED)
        STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_PREFETCHING, u->name));
    rt->stats.h2d_bytes += bytes;
    rt->current.h2d_bytes += (double)bytes;
    return STH_OK;
}

/* The whole unit from its pinned image. */
static sth_status copy_direct(sth_runtime *rt, int32_t slot) {
    const sthi_unit *u = &rt->units[rt->places.slots[slot].unit];
    for (uint64_t begin = 0; begin < u->bytes; begin += rt->chunk)
        STHI_TRY(copy_chunk(rt, slot, begin, sthi_min_u64(rt->chunk, u->bytes - begin), u->host + begin));
    return STH_OK;
}

static sth_status complete_slot(sth_runtime *rt, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    sthi_interval_end(rt);
    STHI_TRY(STHI_DEV(rt, event_record, rt->sync[slot].ready, rt->sync[slot].filled_by));
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_GPU_READY, u->name));
    s->complete = true;
    s->stale = false;
    u->copies++;
    if (rt->timing) u->h2d_count++;
    rt->stats.copies++;
    if (u->flags & STH_UNIT_WRITABLE) rt->last_writable_slot = (uint32_t)slot;
    return STH_OK;
}

/* The read job for the next chunk of the request at the queue's head; NULL if it is not begun. */
static sthi_job *job_for(sth_runtime *rt, uint64_t begin) {
    if (rt->job_head == rt->job_tail) return NULL;
    sthi_job *j = &rt->jobs[rt->job_head % rt->slab_count];
    if (!j->cancelled && j->ticket == rt->queue_head && j->begin == begin) return j;
    /* Later requests were read first (this unit was on the device then, and has left since): in order again. */
    if (!j->cancelled) sthi_reads_rewind(rt);
    return NULL;
}

static sthi_issue fail_request(sth_runtime *rt, sthi_request *r) {
    sthi_error_save(&r->error);
    r->failed = true;
    if (r->slot != STHI_NO_SLOT) abandon_slot(rt, r->slot);
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
    if (open_slot(rt, r->unit, home.extent, home.offset, rt->copy_stream, &r->slot) != STH_OK)
        return fail_request(rt, r);
    return STHI_ISSUE_DONE;
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
        uint64_t begin = s->claimed, bytes = sthi_min_u64(rt->chunk, u->bytes - begin);
        if (!range_takeable(rt, s, begin, bytes)) return STHI_ISSUE_NO_PLACE;
        sthi_job *job = r->staged ? job_for(rt, begin) : NULL;
        if (r->staged && (!job || job->state == STHI_JOB_READING)) return STHI_ISSUE_NOT_READ;
        if (job && job->state == STHI_JOB_FAILED) {
            sthi_error_restore(&job->error);
            return fail_request(rt, r);
        }
        const uint8_t *from = job ? sthi_pool_slab_address(rt->pool, job->slab) : u->host + begin;
        if (copy_chunk(rt, r->slot, begin, bytes, from) != STH_OK) return fail_request(rt, r);
        if (job) {
            sthi_slab_fly(rt, job->slab, rt->copy_stream);
            rt->job_head++;
            sthi_cond_broadcast(&rt->changed); /* readers sleep while every slab is in use */
        }
    }
    if (complete_slot(rt, r->slot) != STH_OK) return fail_request(rt, r);
    s->uses_left = r->uses;
    s->resident = r->resident;
    rt->sync[r->slot].lap = r->lap;
    return STHI_ISSUE_DONE;
}

void sthi_pump(sth_runtime *rt) {
    for (;;) {
        sthi_feed(rt);
        if (rt->queue_head == rt->queue_tail) return;
        sthi_request *r = &rt->queue[rt->queue_head % STHI_REQUEST_CAP];
        if (r->failed) return; /* stays until its unit is asked for, or the step ends */
        sthi_issue result = issue_head(rt, r);
        rt->head_state = result;
        if (result != STHI_ISSUE_DONE) {
            if (result == STHI_ISSUE_FAILED) sthi_cond_broadcast(&rt->changed);
            return;
        }
        rt->queue_head++;
        sthi_jobs_cancel(rt, rt->queue_head);
        sthi_cond_broadcast(&rt->changed);
    }
}

void sthi_cancel_queue(sth_runtime *rt) {
    for (uint64_t n = rt->queue_head; n < rt->queue_tail; n++) {
        sthi_request *r = &rt->queue[n % STHI_REQUEST_CAP];
        if (r->resident) rt->resident_next = 0;
        else if (r->planned && r->sequence < rt->next_load) rt->next_load = r->sequence;
        if (r->slot != STHI_NO_SLOT) abandon_slot(rt, r->slot);
        r->slot = STHI_NO_SLOT;
    }
    rt->queue_head = rt->queue_tail;
    sthi_jobs_cancel(rt, rt->queue_head);
    sthi_cond_broadcast(&rt->changed);
}

/* Demand loads: planned copies and residents are taken only when nothing cheaper is there. */
static double demand_cost(void *context, const sthi_slot *s) {
    sth_runtime *rt = context;
    if (s->leases || !s->complete) return -1;
    double far = (double)sthi_distance(rt, s->unit);
    return (double)s->bytes / far * (s->uses_left ? 4.0 : 1.0);
}

static sth_status find_place(sth_runtime *rt, uint32_t unit, sthi_place *out) {
    sthi_unit *u = &rt->units[unit];
    if (u->resident && rt->program_on) {
        /* Its home may hold what strayed there; take it back if nobody is using it. */
        *out = (sthi_place){u->home_extent, u->home_offset};
        int32_t id = STHI_NO_SLOT;
        bool free_now = true;
        while ((id = sthi_places_touching(&rt->places, out->extent, out->offset, u->bytes, STHI_NO_SLOT, id)) !=
               STHI_NO_SLOT)
            if (demand_cost(rt, &rt->places.slots[id]) < 0) free_now = false;
        if (free_now) return STH_OK;
    }
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    /* A load half way holds its range; without it there may be room. */
    sthi_cancel_queue(rt);
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    STHI_TRY(sthi_rearrange(rt, u->bytes));
    if (sthi_places_choose(&rt->places, u->bytes, demand_cost, rt, out)) return STH_OK;
    return sthi_budget_error(rt, unit, rt->leased_bytes + u->bytes);
}

/* Chunk by chunk: read into a slab with the lock dropped, copy, next. */
static sth_status demand_staged(sth_runtime *rt, int32_t slot) {
    uint32_t unit = rt->places.slots[slot].unit;
    uint64_t total = rt->units[unit].bytes;
    rt->current.host_waits++;
    for (uint64_t begin = 0; begin < total; begin += rt->chunk) {
        uint64_t bytes = sthi_min_u64(rt->chunk, total - begin);
        sth_slab slab;
        STHI_TRY(sthi_slab_wait(rt, &slab));
        sthi_unlock(&rt->lock);
        sth_status rc = sthi_read_range(rt, unit, begin, bytes, sthi_pool_slab_address(rt->pool, slab));
        sthi_lock(&rt->lock);
        if (rc == STH_OK) rc = copy_chunk(rt, slot, begin, bytes, sthi_pool_slab_address(rt->pool, slab));
        if (rc != STH_OK) {
            (void)sthi_pool_release(rt->pool, &slab, 1);
            return rc;
        }
        sthi_slab_fly(rt, slab, rt->sync[slot].filled_by);
    }
    return STH_OK;
}

sth_status sthi_demand_load(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    sthi_place place;
    int32_t slot;
    STHI_TRY(find_place(rt, unit, &place));
    STHI_TRY(open_slot(rt, unit, place.extent, place.offset, rt->demand_stream, &slot));
    rt->stats.demand_loads++;
    sth_status rc = clear_range(rt, slot, 0, u->bytes);
    if (rc == STH_OK) rt->places.slots[slot].claimed = u->bytes; /* all of it, before the lock is dropped */
    sthi_interval_end(rt);
    if (rc == STH_OK) rc = u->direct ? copy_direct(rt, slot) : demand_staged(rt, slot);
    if (rc == STH_OK) rc = complete_slot(rt, slot);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        abandon_slot(rt, slot);
        sthi_cond_broadcast(&rt->changed);
        return sthi_error_restore(&why);
    }
    rt->places.slots[slot].resident = u->resident && place.extent == u->home_extent &&
                                      place.offset == u->home_offset;
    sthi_cond_broadcast(&rt->changed);
    return STH_OK;
}

sth_status sthi_refresh(sth_runtime *rt, int32_t slot) {
    sthi_slot *s = &rt->places.slots[slot];
    sthi_unit *u = &rt->units[s->unit];
    if (s->leases)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, u->name,
                         "unit '%s' was written while its copy on the device is in use; end that use first "
                         "(an output that is a view of the weight also counts)", u->name);
    sthi_slot_sync *y = &rt->sync[slot];
    STHI_TRY(wait_for_slot(rt, slot, rt->demand_stream));
    forget_users(rt, y);
    y->filled_by = rt->demand_stream;
    s->complete = false;
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_EVICTING, u->name));
    STHI_TRY(sthi_unit_move(&u->state, STH_UNIT_STATE_HOST_STAGED, u->name));
    sthi_interval_end(rt);
    sth_status rc = u->direct ? copy_direct(rt, slot) : demand_staged(rt, slot);
    if (rc == STH_OK) rc = complete_slot(rt, slot);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        abandon_slot(rt, slot);
        return sthi_error_restore(&why);
    }
    sthi_cond_broadcast(&rt->changed);
    return STH_OK;
}
