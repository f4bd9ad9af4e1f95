/* From a choice of residents to the loads of a lap and their homes in the ring.
 * Invariants: loads are ordered by first use; every streamed unit has at least one load; a load's uses are
 * consecutive uses of its unit; a WRITTEN unit whose first use in a lap is not a load's, or on demand, has one renewal
 * there. No locks. Does not price anything. */
#include "core/plan.h"

#include <string.h>

#include "base/arith.h"

__extension__ typedef unsigned __int128 u128;

/* `resident` may be NULL: nothing streamable is. */
static bool unit_streams(const sthi_plan_world *w, const uint8_t *resident, uint32_t unit) {
    return w->kind[unit] == STHI_UNIT_STREAMABLE && !(resident && resident[unit]);
}

static bool streams(const sthi_plan_world *w, const uint8_t *resident, uint32_t use) {
    return unit_streams(w, resident, w->in->uses[use].unit);
}

static void tree_add(uint64_t *tree, uint32_t size, uint32_t at, uint64_t bytes) {
    for (uint32_t i = at + 1; i <= size; i += i & -i) tree[i] += bytes; /* may be a negative number */
}

static uint64_t tree_sum(const uint64_t *tree, uint32_t end) {
    uint64_t sum = 0;
    for (uint32_t i = end; i > 0; i -= i & -i) sum += tree[i];
    return sum;
}

/* distance[t]: bytes of the different units that stream between a unit's previous use and use t. Two laps,
 * each unit counted at its latest use, prefix sums in a binary indexed tree. */
static void measure_distances(sthi_pipe *p, const sthi_plan_world *w, const uint8_t *resident) {
    uint32_t n = p->use_count, size = 2 * n;
    memset(p->tree, 0, (size + 1) * sizeof *p->tree);
    for (uint32_t at = 0; at < size; at++) {
        uint32_t t = at < n ? at : at - n;
        if (!streams(w, resident, t)) continue;
        uint64_t bytes = w->in->units[w->in->uses[t].unit].bytes;
        if (at >= w->back[t]) {
            uint32_t before = at - w->back[t];
            p->distance[t] = tree_sum(p->tree, at) - tree_sum(p->tree, before + 1);
            tree_add(p->tree, size, before, 0 - bytes);
        }
        tree_add(p->tree, size, at, bytes);
    }
}

/* A unit that would never leave its place is loaded anew where that buys most room. */
static void force_one_load(sthi_pipe *p, const sthi_plan_world *w, uint32_t t) {
    uint32_t n = p->use_count, best = t, at = t;
    do {
        if (!p->held[at]) return;
        if (!sthi_still_held(w, at) && (sthi_still_held(w, best) || p->distance[at] > p->distance[best]))
            best = at;
        at = at >= w->back[at] ? at - w->back[at] : at + n - w->back[at];
    } while (at != t);
    p->held[best] = 0;
}

static void choose_holds(sthi_pipe *p, const sthi_plan_world *w, const uint8_t *resident, uint64_t hold,
                         const uint8_t *anew) {
    if (!w->reuse) {
        memset(p->held, 0, p->use_count);
        return;
    }
    measure_distances(p, w, resident);
    for (uint32_t t = 0; t < p->use_count; t++) {
        uint64_t bytes = w->in->units[w->in->uses[t].unit].bytes, room = p->distance[t] + bytes;
        bool wish = hold > 0 && (p->distance[t] == 0 || room <= hold) && !(anew && anew[t]);
        /* What is written between laps would only keep its place: it is copied again all the same. */
        if (wish && w->writes && t < w->back[t] && sthi_is_written(w->in, w->in->uses[t].unit)) wish = false;
        p->held[t] = wish || sthi_still_held(w, t);
    }
    for (uint32_t i = 0; i < w->order_count; i++)
        if (unit_streams(w, resident, w->order[i])) force_one_load(p, w, w->order_use[i]);
}

/* Uses of WRITTEN units that are served by what the lap before left on the device: the first of each. */
static void list_renewals(sthi_pipe *p, const sthi_plan_world *w) {
    const sth_plan_input *in = w->in;
    for (uint32_t k = 0; k < p->load_count; k++) p->written[k] = sthi_is_written(in, p->loads[k].unit);
    for (uint32_t t = 0; t < p->use_count; t++) {
        uint32_t u = in->uses[t].unit;
        bool first = t < w->back[t], planned = w->kind[u] != STHI_UNIT_DEMAND;
        if (!first || !planned || p->start_load[t] != STH_NONE || !sthi_is_written(in, u)) continue;
        uint32_t k = p->load_count + p->renewal_count++;
        p->loads[k] = (sthi_lap_load){.unit = u, .first_use = t, .bytes = in->units[u].bytes};
        p->written[k] = 1;
        p->start_load[t] = k;
    }
}

void sthi_pipe_index_loads(sthi_pipe *p, const sthi_plan_world *w) {
    const sth_plan_input *in = w->in;
    uint32_t n = p->use_count;
    for (uint32_t t = 0; t < n; t++) p->start_load[t] = p->free_load[t] = STH_NONE;
    p->load_bytes = 0;
    p->renewal_count = p->ahead = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        p->start_load[p->loads[k].first_use] = k;
        uint32_t freed = (uint32_t)(sthi_let_go(in, p->loads[k].last_use) % n);
        p->free_next[k] = p->free_load[freed];
        p->free_load[freed] = k;
        p->load_bytes += p->loads[k].bytes;
    }
    p->writes = w->writes;
    if (p->writes) list_renewals(p, w);
}

void sthi_pipe_build_loads(sthi_pipe *p, const sthi_plan_world *w, const uint8_t *resident, uint64_t hold,
                           const uint8_t *anew) {
    uint32_t n = p->use_count;
    choose_holds(p, w, resident, hold, anew);
    p->load_count = 0;
    for (uint32_t t = 0; t < n; t++) {
        p->use_load[t] = STH_NONE;
        if (!streams(w, resident, t) || p->held[t]) continue;
        uint32_t u = w->in->uses[t].unit;
        p->loads[p->load_count] =
            (sthi_lap_load){.unit = u, .first_use = t, .last_use = t, .bytes = w->in->units[u].bytes};
        p->use_load[t] = p->load_count++;
    }
    /* Two laps, so that a unit held over the step's end finds the load of the step before. */
    for (uint32_t at = 0; w->reuse && at < 2 * n; at++) {
        uint32_t t = at < n ? at : at - n;
        if (!streams(w, resident, t) || !p->held[t] || p->use_load[t] != STH_NONE) continue;
        uint32_t before = t >= w->back[t] ? t - w->back[t] : t + n - w->back[t];
        uint32_t k = p->use_load[before];
        if (k == STH_NONE) continue;
        p->use_load[t] = k;
        p->loads[k].last_use += w->back[t];
    }
    sthi_pipe_index_loads(p, w);
}

static void place_even(sthi_pipe *p, uint64_t ring) {
    uint64_t turns = (p->load_bytes + ring - 1) / ring, before = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        uint64_t at = (uint64_t)((u128)before * turns * ring / p->load_bytes);
        p->loads[k].offset = at / STHI_ALIGN * STHI_ALIGN % ring;
        before += p->loads[k].bytes;
    }
}

/* Where a load goes that continues forwards (or backwards) from the head. */
static uint64_t next_place(uint64_t ring, bool twice, uint64_t head, uint64_t bytes, bool back) {
    if (!back) {
        return !twice && bytes > ring - head ? 0 : head;
    }
    if (bytes <= head) return head - bytes;
    return twice ? ring - (bytes - head) : ring - bytes;
}

static uint64_t head_after(uint64_t ring, uint64_t offset, uint64_t bytes, bool back) {
    if (back) return offset;
    return bytes >= ring - offset ? bytes - (ring - offset) : offset + bytes;
}

static void place_row(sthi_pipe *p, uint64_t ring, bool twice) {
    uint64_t head = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        p->loads[k].offset = next_place(ring, twice, head, p->loads[k].bytes, false);
        head = head_after(ring, p->loads[k].offset, p->loads[k].bytes, false);
    }
}

/* Two laps on the tape decide where the row turns; the second lap's turns, taken from offset 0, give the
 * homes. held[] is reused for them: 1 means that the load continues backwards. */
static void place_turning(sthi_pipe *p, const sth_plan_input *in, uint64_t ring) {
    bool twice = in->ring_mapped_twice, back = false;
    uint64_t head = 0;
    sthi_tape_reset(p, ring);
    for (uint32_t owner = 0; owner < 2 * p->load_count; owner++) {
        const sthi_lap_load *load = &p->loads[owner % p->load_count];
        uint64_t on = next_place(ring, twice, head, load->bytes, back);
        uint64_t turned = next_place(ring, twice, head, load->bytes, !back);
        int64_t on_free = sthi_tape_latest(p, in, ring, on, load->bytes);
        if (sthi_tape_latest(p, in, ring, turned, load->bytes) < on_free) {
            back = !back;
            on = turned;
        }
        p->held[owner % p->load_count] = back;
        sthi_tape_write(p, ring, on, load->bytes, owner, false);
        head = head_after(ring, on, load->bytes, back);
    }
    head = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        p->loads[k].offset = next_place(ring, twice, head, p->loads[k].bytes, p->held[k]);
        head = head_after(ring, p->loads[k].offset, p->loads[k].bytes, p->held[k]);
    }
}

bool sthi_pipe_place(sthi_pipe *p, const sth_plan_input *in, uint64_t ring, sthi_homes homes) {
    for (uint32_t k = 0; k < p->load_count; k++)
        if (p->loads[k].bytes > ring) return false;
    if (p->load_count == 0) return true;
    if (homes == STHI_HOMES_EVEN)
        place_even(p, ring);
    else if (homes == STHI_HOMES_TURNING)
        place_turning(p, in, ring);
    else if (homes == STHI_HOMES_APART)
        return sthi_pipe_place_apart(p, in, ring);
    else
        place_row(p, ring, in->ring_mapped_twice);
    return true;
}
