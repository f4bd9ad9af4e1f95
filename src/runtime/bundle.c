/* Bundles: neighbouring small units that are planned, and copied, as one.
 *
 * Each copy costs the link some microseconds, so that copies of half a megabyte reach three quarters of its rate.
 * Units that follow each other in the order and lie one behind the other in the same pinned window of host memory
 * are given to the planner as one unit: they stay, or stream, together, their places lie beside each other as
 * their images do, and run.c fills them with one copy once all of their room may be taken. That is what the
 * planner says of a copy of that length: it starts when its place is free and serves its first use when it has ended.
 *
 * A bundle is no larger than it pays: see most_bytes. Towards the end of the order bundles become shorter by
 * halves: little is computed behind the last copy, and the planner has small pieces to fill the budget with.
 *
 * Invariants: in the order a bundle's units are used in a row wherever one of them is, in their order or in the
 * reverse; a bundle's bytes are the sum of its units'. Pure arithmetic but for the look at windows. Lock held. */
#include "runtime/bundle.h"

#include <math.h>

#include "base/memory.h"
#include "core/plan.h"
#include "load/together.h"
#include "state/state.h"

enum { MOST_UNITS = STHI_REQUEST_CAP / 2 };
/* What a copy costs beside its bytes: seen on PCIe 5, in graphs and out of them (docs/figures.md). */
static const double COPY_NS = 3000;

/* The ring has to hold two bundles, one that is used and one that is copied: 2 r bytes fewer stay. S bytes that stream
 * take S / r copies, which cost o bytes each. 2 r + S o / r is least where r = sqrt(S o / 2). */
static uint64_t most_bytes(const sth_plan_input *in) {
    uint64_t used = 0;
    for (uint32_t i = 0; i < in->unit_count; i++)
        if (!(in->units[i].flags & STH_UNIT_ON_DEMAND)) used += in->units[i].bytes;
    if (used <= in->budget) return 0;
    double best = sqrt((double)(used - in->budget) * in->link_bytes_per_s * COPY_NS / 1e9 / 2);
    uint64_t most = sthi_most_together(in->budget);
    return best < (double)most ? (uint64_t)best : most;
}

/* ---- which units */

typedef struct maker {
    const sth_runtime *rt;
    const sth_plan_input *in;
    uint64_t most, left; /* bytes of a bundle; of units of the order that are in none yet */
    uint32_t *head;      /* [unit_count] the first unit, in the order, of its bundle; STH_NONE: not looked at */
    uint32_t *rank;      /* [unit_count] its number in there */
    uint32_t *size;      /* [unit_count] by head: units; 0: it is no bundle */
    const uint8_t **lowest; /* [unit_count] by head: where its images begin */
} maker;

static bool may_join(const maker *m, uint32_t unit) {
    bool plain = !(m->in->units[unit].flags & ~(uint32_t)(STH_UNIT_WRITTEN | STH_UNIT_PRESENT));
    return m->rt->units[unit].direct && !m->rt->units[unit].segments && plain;
}

/* Where the image of b lies: 1 behind that of a, -1 before it, 0 elsewhere. */
static int way_to(const sthi_unit *a, const sthi_unit *b) {
    if (sthi_images_join(a, b)) return 1;
    return sthi_images_join(b, a) ? -1 : 0;
}

/* The images of the bundle from `first` on, with `unit`, in a row: up or down in memory. */
static bool goes_on(const maker *m, uint32_t first, uint32_t last, uint32_t unit, uint64_t bytes, int *way) {
    const sthi_unit *a = &m->rt->units[last], *b = &m->rt->units[unit];
    int here = way_to(a, b);
    if (!here || (*way && here != *way)) return false;
    const uint8_t *from = here > 0 ? m->rt->units[first].host : b->host;
    if (!sthi_one_window(m->rt, b, from, bytes)) return false;
    *way = here;
    return true;
}

/* The bundle that begins with the first use of its unit at `t`. */
static void gather(maker *m, uint32_t t) {
    const sth_plan_use *uses = m->in->uses;
    uint32_t first = uses[t].unit, last = first;
    uint64_t bytes = m->in->units[first].bytes, most = sthi_min_u64(m->most, m->left / 2);
    int way = 0;
    m->head[first] = first;
    m->size[first] = 1;
    for (uint32_t k = t + 1; may_join(m, first) && k < m->in->use_count && m->size[first] < MOST_UNITS; k++) {
        uint32_t unit = uses[k].unit;
        uint64_t more = bytes + m->in->units[unit].bytes;
        bool alike = !((m->in->units[unit].flags ^ m->in->units[first].flags) & ~(uint32_t)STH_UNIT_PRESENT);
        if (m->head[unit] != STH_NONE || !may_join(m, unit) || !alike || more > most) break;
        if (!goes_on(m, first, last, unit, more, &way)) break;
        m->head[unit] = first;
        m->rank[unit] = m->size[first]++;
        bytes = more;
        last = unit;
    }
    m->left -= bytes;
}

/* Whether the uses from `t` on are those of a whole bundle, forwards or backwards. */
static bool in_a_row(const maker *m, uint32_t t) {
    uint32_t head = m->head[m->in->uses[t].unit], size = m->size[head];
    if (size > m->in->use_count - t) return false;
    bool back = m->rank[m->in->uses[t].unit] != 0;
    for (uint32_t k = 0; k < size; k++) {
        uint32_t unit = m->in->uses[t + k].unit;
        if (m->head[unit] != head || m->rank[unit] != (back ? size - 1 - k : k)) return false;
    }
    return true;
}

/* Those that are used in another way somewhere are none. Their head's size is 0 then, and each stands for itself. */
static void part_others(maker *m) {
    for (uint32_t t = 0; t < m->in->use_count;) {
        uint32_t head = m->head[m->in->uses[t].unit];
        bool whole = m->size[head] && in_a_row(m, t);
        if (!whole) m->size[head] = 0;
        t += whole ? m->size[head] : 1;
    }
    for (uint32_t i = 0; i < m->in->unit_count; i++)
        if (m->head[i] == STH_NONE || !m->size[m->head[i]]) m->head[i] = i, m->rank[i] = 0;
}

/* Behind the use of a bundle that begins at `t`. */
static uint32_t next_use(const maker *m, uint32_t t) {
    uint32_t size = m->size[m->head[m->in->uses[t].unit]];
    return t + (size ? size : 1);
}

static void maker_fini(maker *m) {
    sthi_free(m->head);
    sthi_free(m->rank);
    sthi_free(m->size);
    sthi_free(m->lowest);
}

/* False: memory is out. */
static bool maker_init(maker *m, const sth_runtime *rt, const sth_plan_input *in, uint64_t most) {
    *m = (maker){.rt = rt, .in = in, .most = most};
    m->head = sthi_alloc(in->unit_count * sizeof *m->head);
    m->rank = sthi_zalloc(in->unit_count, sizeof *m->rank);
    m->size = sthi_zalloc(in->unit_count, sizeof *m->size);
    m->lowest = sthi_zalloc(in->unit_count, sizeof *m->lowest);
    if (!m->head || !m->rank || !m->size || !m->lowest) {
        maker_fini(m);
        return false;
    }
    for (uint32_t i = 0; i < in->unit_count; i++) {
        m->head[i] = STH_NONE;
        if (rt->units[i].first_use != STH_NONE) m->left += in->units[i].bytes;
    }
    return true;
}

/* ---- what the planner is given */

void sthi_bundles_destroy(sthi_bundles *b) {
    if (!b) return;
    sthi_plan_destroy(b->plan);
    sthi_free(b->of_unit);
    sthi_free(b->place);
    sthi_free(b->units);
    sthi_free(b->uses);
    sthi_free(b->begin);
    sthi_free(b);
}

/* As many bundles, and uses of them, as there will be. */
static sthi_bundles *allocate(const maker *m) {
    const sth_plan_input *in = m->in;
    sthi_bundles *b = sthi_zalloc(1, sizeof *b);
    if (!b) return NULL;
    for (uint32_t i = 0; i < in->unit_count; i++) b->unit_count += m->head[i] == i;
    for (uint32_t t = 0; t < in->use_count; t = next_use(m, t)) b->use_count++;
    b->of_unit = sthi_alloc(in->unit_count * sizeof *b->of_unit);
    b->place = sthi_zalloc(in->unit_count, sizeof *b->place);
    b->units = sthi_zalloc(b->unit_count, sizeof *b->units);
    b->uses = sthi_zalloc(b->use_count, sizeof *b->uses);
    b->begin = sthi_zalloc(b->use_count + 1, sizeof *b->begin);
    if (b->of_unit && b->place && b->units && b->uses && b->begin) return b;
    sthi_bundles_destroy(b);
    return NULL;
}

/* Bundles are numbered as their first units are. */
static void number(sthi_bundles *b, maker *m) {
    const sth_plan_input *in = m->in;
    uint32_t count = 0, uses = 0;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        uint32_t head = m->head[i];
        if (head == i) b->of_unit[i] = count++;
        const uint8_t *host = m->rt->units[i].host;
        if (!m->lowest[head] || host < m->lowest[head]) m->lowest[head] = host;
    }
    for (uint32_t i = 0; i < in->unit_count; i++) {
        uint32_t head = m->head[i], n = b->of_unit[i] = b->of_unit[head];
        b->units[n].bytes += in->units[i].bytes;
        b->units[n].transfer_bytes += in->units[i].transfer_bytes;
        if (m->size[head] < 2) {
            b->units[n].packed_bytes = in->units[i].packed_bytes;
            b->units[n].flags |= in->units[i].flags & (STH_UNIT_EITHER | STH_UNIT_EXPANDED);
            continue;
        }
        b->place[i] = (uint32_t)(m->rt->units[i].host - m->lowest[head]);
        b->largest = sthi_max_u64(b->largest, b->units[n].bytes);
    }
    for (uint32_t t = 0; t < in->use_count; t = next_use(m, t)) b->begin[uses++] = t;
    b->begin[uses] = in->use_count;
}

sth_status sthi_bundles_make(const sth_runtime *rt, const sth_plan_input *in, sthi_bundles **out) {
    *out = NULL;
    uint64_t most = in->use_count ? most_bytes(in) : 0;
    if (most < 2 * (uint64_t)STHI_ALIGN) return STH_OK;
    maker m;
    sthi_bundles *b = NULL;
    if (maker_init(&m, rt, in, most)) {
        for (uint32_t t = 0; t < in->use_count; t++)
            if (m.head[in->uses[t].unit] == STH_NONE) gather(&m, t);
        part_others(&m);
        b = allocate(&m);
        if (b) number(b, &m);
        maker_fini(&m);
    }
    if (!b) return sthi_no_memory(NULL, "a plan; free host memory");
    if (b->largest) *out = b;
    else sthi_bundles_destroy(b); /* each stands for itself */
    return STH_OK;
}

static uint32_t use_at(const sthi_bundles *b, uint64_t t) {
    uint32_t low = 0, high = b->use_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (b->begin[middle] <= t) low = middle;
        else high = middle;
    }
    return low;
}

/* The uses of a bundle's units in a row are one; it is let go with the last of what they hold. */
static sth_plan_use join_uses(const sthi_bundles *b, const sth_plan_input *in, uint32_t n) {
    uint32_t begin = b->begin[n], end = b->begin[n + 1], held = 1;
    sth_plan_use joined = {.unit = b->of_unit[in->uses[begin].unit], .gap_ns = in->uses[end - 1].gap_ns};
    for (uint32_t t = begin; t < end; t++) {
        uint64_t last = t + (in->uses[t].held ? in->uses[t].held : in->held_at_once) - 1;
        uint32_t at = use_at(b, last % in->use_count) + (last >= in->use_count ? b->use_count : 0);
        if (at - n + 1 > held) held = at - n + 1;
        joined.compute_ns += in->uses[t].compute_ns + (t + 1 < end ? in->uses[t].gap_ns : 0);
    }
    joined.held = held < b->use_count ? held : b->use_count;
    return joined;
}

/* As units are by now: some may have been written, or have moved, since the bundles were made. A bundle is present
 * where all of it is. */
static void join_flags(sthi_bundles *b, const sth_plan_input *in) {
    for (uint32_t n = 0; n < b->unit_count; n++) b->units[n].flags = STH_UNIT_PRESENT;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        uint32_t *flags = &b->units[b->of_unit[i]].flags, here = in->units[i].flags;
        *flags = ((*flags | here) & ~(uint32_t)STH_UNIT_PRESENT) | (*flags & here & STH_UNIT_PRESENT);
    }
}

void sthi_bundles_input(sthi_bundles *b, const sth_plan_input *in, sth_plan_input *out) {
    join_flags(b, in);
    for (uint32_t n = 0; n < b->use_count; n++) b->uses[n] = join_uses(b, in, n);
    *out = *in;
    out->units = b->units;
    out->unit_count = b->unit_count;
    out->uses = b->uses;
    out->use_count = b->use_count;
    out->chunk_bytes = sthi_max_u64(in->chunk_bytes, b->largest); /* a bundle is copied in one piece */
}

/* ---- and what comes of it */

/* The load of each unit of the n-th load's bundle, from `at` on. */
static void part_load(const sthi_bundles *b, const sth_plan_input *in, const sth_plan_load *load, sth_plan *out,
                      uint32_t at) {
    uint32_t first = b->begin[load->first_use], count = b->begin[load->first_use + 1] - first;
    uint32_t last = b->begin[load->last_use];
    for (uint32_t k = 0; k < count; k++) {
        uint32_t unit = in->uses[first + k].unit;
        bool same_way = in->uses[last].unit == in->uses[first].unit;
        out->loads[at + k] = (sth_plan_load){.unit = unit, .first_use = first + k,
                                             .last_use = last + (same_way ? k : count - 1 - k),
                                             .ring_offset = (load->ring_offset + b->place[unit]) % out->ring_bytes};
    }
}

/* The use of a unit is served by its own part of the load that serves its bundle's. */
static void part_uses(const sthi_bundles *b, const sth_plan_input *in, const uint32_t *part, sth_plan *out) {
    for (uint32_t n = 0; n < b->use_count; n++) {
        uint32_t load = b->plan->use_load[n], begin = b->begin[n], end = b->begin[n + 1];
        for (uint32_t t = begin; t < end; t++) {
            out->use_load[t] = STH_NONE;
            if (load == STH_NONE) continue;
            bool same_way = out->loads[part[load]].unit == in->uses[begin].unit;
            out->use_load[t] = part[load] + (same_way ? t - begin : end - 1 - t);
        }
    }
}

sth_status sthi_bundles_part(const sthi_bundles *b, const sth_plan_input *in, sth_plan **out) {
    const sth_plan *plan = b->plan;
    uint32_t *part = sthi_alloc((plan->load_count + 1) * sizeof *part), loads = 0;
    for (uint32_t i = 0; part && i < plan->load_count; i++) {
        part[i] = loads;
        loads += b->begin[plan->loads[i].first_use + 1] - b->begin[plan->loads[i].first_use];
    }
    sth_plan *whole = part ? sthi_plan_alloc(in, loads) : NULL;
    if (!whole) {
        sthi_free(part);
        return sthi_no_memory(NULL, "a plan; free host memory");
    }
    whole->ring_bytes = plan->ring_bytes;
    whole->ring_mapped_twice = plan->ring_mapped_twice;
    whole->demand_bytes = plan->demand_bytes;
    whole->prediction = plan->prediction;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        whole->resident[i] = plan->resident[b->of_unit[i]];
        whole->packed[i] = plan->packed[b->of_unit[i]];
        whole->plain[i] = plan->plain[b->of_unit[i]];
    }
    for (uint32_t i = 0; i < plan->load_count; i++) part_load(b, in, &plan->loads[i], whole, part[i]);
    part_uses(b, in, part, whole);
    sthi_free(part);
    *out = whole;
    return STH_OK;
}
