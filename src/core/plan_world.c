/* Checks a planner's input and digests it: what may stream, how often each unit is used, how many bytes
 * there are, how many of them no plan can avoid to move, and how long any step takes.
 * Invariant: after init every sum of sizes or times in the world fits its type. No locks.
 * Does not choose anything. */
#include "core/plan.h"

#include <math.h>
#include <stdlib.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"

#define INVALID(...) sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, __VA_ARGS__)

void sthi_plan_input_init(sth_plan_input *in) {
    *in = (sth_plan_input){
        .size = sizeof *in,
        .copy_overhead_ns = 2200,
        .chunk_bytes = 8u << 20,
        .ring_granularity = 512,
        .held_at_once = 1,
        .read_ahead_bytes = 64u << 20,
        .expand_bytes_per_s = 1e12,
    };
}

static sth_status check_settings(const sth_plan_input *in) {
    if (in->size != sizeof *in)
        return INVALID("the plan input was not set up by sth_plan_input_init of this version");
    if ((in->unit_count && !in->units) || (in->use_count && !in->uses))
        return INVALID("the plan input has a count of units or uses but no array");
    if (in->unit_count >= STH_NONE || in->use_count >= STH_NONE / 4)
        return INVALID("the plan input has more units or uses than the planner can number");
    if (!(in->link_bytes_per_s > 0) || !isfinite(in->link_bytes_per_s))
        return INVALID("link_bytes_per_s is %g; it must be positive and finite", in->link_bytes_per_s);
    if (!(in->disk_bytes_per_s >= 0) || !isfinite(in->disk_bytes_per_s))
        return INVALID("disk_bytes_per_s is %g; it must be finite, and 0 or more", in->disk_bytes_per_s);
    if (!(in->expand_bytes_per_s > 0))
        return INVALID("expand_bytes_per_s is %g; it must be positive", in->expand_bytes_per_s);
    if (in->copy_overhead_ns < 0) return INVALID("copy_overhead_ns is negative");
    if (in->chunk_bytes == 0) return INVALID("chunk_bytes is 0; it must be positive");
    if (in->ring_granularity == 0) return INVALID("ring_granularity is 0; it must be positive");
    if (in->held_at_once == 0) return INVALID("held_at_once is 0; it must be at least 1");
    return STH_OK;
}

static sth_status check_units(const sth_plan_input *in) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        if (in->units[i].bytes % STHI_ALIGN)
            return INVALID("unit %u has %llu bytes; sizes are multiples of %u", i,
                           (unsigned long long)in->units[i].bytes, STHI_ALIGN);
        if (in->units[i].transfer_bytes > in->units[i].bytes)
            return INVALID("unit %u has %llu bytes and sends %llu over the link; give as many or fewer", i,
                           (unsigned long long)in->units[i].bytes, (unsigned long long)in->units[i].transfer_bytes);
        if (in->units[i].packed_bytes % STHI_ALIGN || in->units[i].packed_bytes > in->units[i].bytes)
            return INVALID("unit %u has %llu bytes and %llu where it stays packed; give a multiple of %u, and no more",
                           i, (unsigned long long)in->units[i].bytes, (unsigned long long)in->units[i].packed_bytes,
                           STHI_ALIGN);
        if (!sthi_add_u64(sum, in->units[i].bytes, &sum) || sum > INT64_MAX)
            return INVALID("the sizes of all units together overflow at unit %u", i);
    }
    uint64_t rounded;
    if (!sthi_round_up(sum, in->ring_granularity, &rounded) || rounded > INT64_MAX)
        return INVALID("ring_granularity is too large");
    return STH_OK;
}

static sth_status check_uses(const sth_plan_input *in, int64_t *out_compute_ns) {
    int64_t sum = 0;
    for (uint32_t t = 0; t < in->use_count; t++) {
        const sth_plan_use *use = &in->uses[t];
        if (use->unit >= in->unit_count)
            return INVALID("use %u names unit %u of %u", t, use->unit, in->unit_count);
        if (use->compute_ns < 0 || use->gap_ns < 0) return INVALID("use %u has a negative time", t);
        if (use->held > in->use_count)
            return INVALID("use %u holds its unit for %u uses of the step's %u", t, use->held, in->use_count);
        if (__builtin_add_overflow(sum, use->compute_ns, &sum) ||
            __builtin_add_overflow(sum, use->gap_ns, &sum) || sum > INT64_MAX / 64)
            return INVALID("the times of all uses together overflow at use %u", t);
    }
    *out_compute_ns = sum;
    return STH_OK;
}

/* Times are whole numbers in the end, and the search subtracts them. */
static sth_status check_rates(const sth_plan_input *in) {
    double bytes = 0;
    for (uint32_t t = 0; t < in->use_count; t++) bytes += (double)sthi_wire_bytes(in, in->uses[t].unit);
    double ns = bytes * 1e9 / in->link_bytes_per_s + (double)in->use_count * (double)in->copy_overhead_ns;
    if (in->disk_bytes_per_s > 0) ns += bytes * 1e9 / in->disk_bytes_per_s;
    if (ns <= (double)(INT64_MAX / 64)) return STH_OK;
    return INVALID("the copies of a step take %g ns at these rates, which is longer than can be counted: "
                   "link_bytes_per_s is %g, disk_bytes_per_s %g, copy_overhead_ns %lld", ns, in->link_bytes_per_s,
                   in->disk_bytes_per_s, (long long)in->copy_overhead_ns);
}

static sthi_unit_kind kind_of(const sth_plan_unit *unit) {
    if (unit->flags & STH_UNIT_KEEP) return STHI_UNIT_FIXED;
    if (unit->flags & STH_UNIT_ON_DEMAND) return STHI_UNIT_DEMAND;
    return unit->bytes == 0 ? STHI_UNIT_FIXED : STHI_UNIT_STREAMABLE;
}

/* Fills back[] and unit_uses[]; `seen` holds the latest use of each unit. */
static void link_uses(sthi_plan_world *w, uint32_t *seen) {
    const sth_plan_input *in = w->in;
    for (uint32_t i = 0; i < in->unit_count; i++) seen[i] = STH_NONE;
    for (uint32_t t = 0; t < in->use_count; t++) {
        w->unit_uses[in->uses[t].unit]++;
        seen[in->uses[t].unit] = t;
    }
    /* seen[] now holds each unit's last use: the one before its first of the next step. */
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t before = seen[in->uses[t].unit];
        w->back[t] = before >= t ? in->use_count - (before - t) : t - before;
        seen[in->uses[t].unit] = t;
    }
}

bool sthi_still_held(const sthi_plan_world *w, uint32_t use) {
    uint64_t now = (uint64_t)use + w->in->use_count; /* a lap on, so that the use before it is not below 0 */
    return sthi_let_go(w->in, now - w->back[use]) >= now;
}

/* A unit whose uses lie so close that callers never let go of it cannot be loaded anew. */
static void fix_held_units(sthi_plan_world *w, uint32_t *let_go) {
    const sth_plan_input *in = w->in;
    for (uint32_t i = 0; i < in->unit_count; i++) let_go[i] = 0;
    for (uint32_t t = 0; t < in->use_count; t++)
        if (!sthi_still_held(w, t)) let_go[in->uses[t].unit] = 1;
    for (uint32_t i = 0; i < in->unit_count; i++)
        if (w->kind[i] == STHI_UNIT_STREAMABLE && w->unit_uses[i] && !let_go[i]) w->kind[i] = STHI_UNIT_FIXED;
}

static void sum_up(sthi_plan_world *w) {
    const sth_plan_input *in = w->in;
    uint64_t largest_demand = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        uint64_t bytes = in->units[i].bytes;
        if (w->kind[i] == STHI_UNIT_STREAMABLE && w->unit_uses[i] == 0) w->kind[i] = STHI_UNIT_UNUSED;
        if (w->kind[i] == STHI_UNIT_DEMAND) largest_demand = sthi_max_u64(largest_demand, bytes);
        if (w->kind[i] == STHI_UNIT_FIXED) {
            w->fixed_bytes += bytes;
            if (w->unit_uses[i]) w->used_bytes += bytes;
        }
        if (in->units[i].flags & STHI_UNIT_STAYS_PACKED) w->fixed_bytes += in->units[i].packed_bytes;
        if (w->kind[i] == STHI_UNIT_STREAMABLE) {
            double share = (double)sthi_wire_bytes(in, i) / (double)bytes;
            if (share < w->cheapest) w->cheapest = share;
            if (share > w->dearest) w->dearest = share;
            w->stream_bytes += bytes;
            if (sthi_from_disk(in, i)) w->disk_bytes += bytes;
            if (sthi_is_written(in, i)) w->written_bytes += bytes;
            w->used_bytes += bytes;
            if (w->unit_uses[i] > 1) w->reuse = true;
            if (bytes > w->largest) {
                w->largest = bytes;
                w->largest_unit = i;
            }
        }
    }
    uint32_t demand_units = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) demand_units += w->kind[i] == STHI_UNIT_DEMAND;
    uint32_t held = in->held_at_once < demand_units ? in->held_at_once : demand_units;
    if (!sthi_mul_u64(largest_demand, held, &w->demand_bytes) || w->demand_bytes > INT64_MAX)
        w->demand_bytes = INT64_MAX; /* more than any budget that could hold it */
}

/* A use of the last of what is written comes after all of that has crossed the link in this step, and before all of the
 * compute that follows. */
static void bound_by_writes(sthi_plan_world *w) {
    const sth_plan_input *in = w->in;
    double copied = 0, left = (double)w->compute_ns;
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t u = in->uses[t].unit;
        if (t < w->back[t] && w->kind[u] != STHI_UNIT_DEMAND && sthi_is_written(in, u)) {
            uint64_t wire = sthi_wire_bytes(in, u);
            if (w->kind[u] == STHI_UNIT_FIXED) w->renewed_bytes += wire;
            uint64_t bytes = in->units[u].bytes, chunks = bytes / in->chunk_bytes + (bytes % in->chunk_bytes != 0);
            copied += (double)wire * 1e9 / in->link_bytes_per_s + (double)chunks * (double)in->copy_overhead_ns;
            w->renewed_ns = fmax(w->renewed_ns, copied + left);
            w->writes = true;
        }
        left -= (double)in->uses[t].compute_ns + (double)in->uses[t].gap_ns;
    }
}

static void limit_ring(sthi_plan_world *w) {
    const sth_plan_input *in = w->in;
    uint64_t set_aside = w->fixed_bytes + w->demand_bytes;
    uint64_t room = in->budget > set_aside ? in->budget - set_aside : 0;
    w->least_ring = sthi_min_u64(in->least_ring_bytes, room);
    w->least_ring -= w->least_ring % in->ring_granularity;
}

static void list_streamable(sthi_plan_world *w, uint32_t *seen) {
    const sth_plan_input *in = w->in;
    for (uint32_t i = 0; i < in->unit_count; i++) seen[i] = 0;
    for (uint32_t t = 0; t < in->use_count; t++) {
        uint32_t u = in->uses[t].unit;
        if (w->kind[u] != STHI_UNIT_STREAMABLE) continue;
        w->holds = w->holds || sthi_let_go(in, t) > t;
        if (seen[u]) continue;
        seen[u] = 1;
        w->order[w->order_count] = u;
        w->order_use[w->order_count++] = t;
    }
}

sth_status sthi_plan_world_init(sthi_plan_world *w, const sth_plan_input *in) {
    int64_t compute_ns = 0;
    STHI_TRY(check_settings(in));
    STHI_TRY(check_units(in));
    STHI_TRY(check_uses(in, &compute_ns));
    STHI_TRY(check_rates(in));
    *w = (sthi_plan_world){.in = in, .compute_ns = compute_ns, .cheapest = 1};
    for (uint32_t i = 0; in->change_steps && i < in->unit_count; i++)
        w->changes = w->changes || (in->units[i].flags & STH_UNIT_PRESENT);
    w->kind = sthi_zalloc(in->unit_count, sizeof *w->kind);
    w->unit_uses = sthi_zalloc(in->unit_count, sizeof *w->unit_uses);
    w->back = sthi_zalloc(in->use_count, sizeof *w->back);
    w->order = sthi_zalloc(in->use_count, sizeof *w->order);
    w->order_use = sthi_zalloc(in->use_count, sizeof *w->order_use);
    uint32_t *seen = sthi_zalloc(in->unit_count, sizeof *seen);
    if (!w->kind || !w->unit_uses || !w->back || !w->order || !w->order_use || !seen) {
        sthi_free(seen);
        sthi_plan_world_fini(w);
        return sthi_no_memory(NULL, "a plan of %u uses; free host memory", in->use_count);
    }
    for (uint32_t i = 0; i < in->unit_count; i++) w->kind[i] = (uint8_t)kind_of(&in->units[i]);
    link_uses(w, seen);
    fix_held_units(w, seen);
    sum_up(w);
    list_streamable(w, seen);
    limit_ring(w);
    bound_by_writes(w);
    sthi_free(seen);
    return STH_OK;
}

void sthi_plan_world_fini(sthi_plan_world *w) {
    sthi_free(w->kind);
    sthi_free(w->unit_uses);
    sthi_free(w->back);
    sthi_free(w->order);
    sthi_free(w->order_use);
}

static int compare_sizes(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The smallest ring that a plan within `room` can have: units larger than it must all be resident. */
static uint64_t least_ring(const sthi_plan_world *w, uint64_t room, uint64_t *sizes) {
    for (uint32_t i = 0; i < w->order_count; i++) sizes[i] = w->in->units[w->order[i]].bytes;
    qsort(sizes, w->order_count, sizeof *sizes, compare_sizes);
    uint64_t above = w->stream_bytes;
    for (uint32_t i = 0; i < w->order_count; i++) {
        above -= sizes[i];
        bool last_of_size = i + 1 == w->order_count || sizes[i + 1] > sizes[i];
        if (last_of_size && sizes[i] <= room && above <= room - sizes[i]) return sizes[i];
    }
    return w->largest;
}

/* What of the room can hold bytes from the step before that are still right. */
static uint64_t room_for_unwritten(const sthi_plan_world *w, uint64_t room) {
    return sthi_min_u64(room, w->stream_bytes - w->written_bytes);
}

/* Cuts the step into stretches that each touch every streamable unit, and sums what each must bring in:
 * a stretch that touches D bytes starts with at most `room` of them, the first one with unwritten ones only. */
static uint64_t bytes_by_stretches(const sthi_plan_world *w, uint64_t room, uint64_t *seen) {
    uint64_t sum = 0, touched = 0, stretch = 1, kept = room_for_unwritten(w, room);
    for (uint32_t i = 0; i < w->in->unit_count; i++) seen[i] = 0;
    for (uint32_t t = 0; t < w->in->use_count; t++) {
        uint32_t u = w->in->uses[t].unit;
        if (w->kind[u] != STHI_UNIT_STREAMABLE || seen[u] == stretch) continue;
        seen[u] = stretch;
        touched += w->in->units[u].bytes;
        if (touched < w->stream_bytes) continue;
        sum += touched - kept;
        kept = sthi_min_u64(room, w->stream_bytes);
        touched = 0;
        stretch++;
    }
    return touched > kept ? sum + (touched - kept) : sum;
}

sth_status sthi_plan_least_bytes(const sthi_plan_world *w, uint64_t room, uint64_t *out_bytes) {
    if (w->stream_bytes <= room) {
        *out_bytes = w->written_bytes;
        return STH_OK;
    }
    uint64_t *scratch = sthi_zalloc(w->in->unit_count, sizeof *scratch);
    if (!scratch) return sthi_no_memory(NULL, "a plan; free host memory");
    uint64_t ring = least_ring(w, room, scratch);
    uint64_t once = w->stream_bytes - room_for_unwritten(w, room > ring ? room - ring : 0);
    *out_bytes = sthi_max_u64(once, bytes_by_stretches(w, room, scratch));
    sthi_free(scratch);
    return STH_OK;
}

double sthi_plan_least_ns(const sthi_plan_world *w, uint64_t room, uint64_t least_bytes) {
    const sth_plan_input *in = w->in;
    double bytes = w->cheapest * (double)least_bytes + (double)w->renewed_bytes;
    double least = fmax(fmax((double)w->compute_ns, w->renewed_ns), bytes * 1e9 / in->link_bytes_per_s);
    if (w->disk_bytes <= room) return least;
    return fmax(least, w->cheapest * (double)(w->disk_bytes - room) * 1e9 / in->disk_bytes_per_s);
}
