/* The planner's entry points: make a plan, price one that is given, say the smallest budget.
 * Invariants: a plan's prediction is what sthi_plan_predict says for the same input; resident bytes, ring and
 * demand bytes never exceed the budget. No locks. plan_search.c searches, plan_pipe.c prices. */
#include "core/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"

/* Smallest choice with everything streamable streamed ---------------------------------------------- */

static uint64_t longest_held(const sth_plan_input *in) {
    uint64_t most = in->held_at_once;
    for (uint32_t t = 0; t < in->use_count; t++) most = sthi_max_u64(most, in->uses[t].held);
    return most;
}

/* The longest stretch of loads, in order, of which the first is not yet let go when the last is needed. */
static uint64_t widest_span(const sthi_pipe *p, const sth_plan_input *in) {
    uint64_t widest = 0, longest = longest_held(in);
    for (uint32_t k = 0; k < p->load_count; k++) {
        uint64_t sum = 0, here = 0;
        for (uint32_t back = 0; back < p->load_count; back++) {
            uint32_t j = k >= back ? k - back : k + p->load_count - back;
            uint64_t needed_at = p->loads[k].first_use + (j > k ? (uint64_t)p->use_count : 0);
            sum += p->loads[j].bytes;
            if (p->loads[j].last_use + longest - 1 < needed_at) break;
            if (sthi_let_go(in, p->loads[j].last_use) >= needed_at) here = sum;
        }
        widest = sthi_max_u64(widest, here);
    }
    return widest;
}

static bool choice_runs(sthi_pipe *p, const sth_plan_input *in, const sthi_choice *choice) {
    return sthi_pipe_place(p, in, choice->ring, choice->homes) &&
           sthi_pipe_simulate(p, in, choice->ring, 0).runs;
}

/* Tries rings from `ring` up to `most` in steps of 1/32 until one runs. */
static bool grow_until_it_runs(sthi_pipe *p, const sth_plan_input *in, uint64_t ring, uint64_t most,
                               sthi_homes homes, sthi_choice *out) {
    uint64_t grain = in->ring_granularity;
    while (ring <= most) {
        *out = (sthi_choice){ring, 0, homes};
        if (choice_runs(p, in, out)) return true;
        uint64_t step = sthi_max_u64(grain, ring / 32);
        ring += step + (grain - step % grain) % grain;
    }
    return false;
}

/* The smallest ring through which everything streamable can run; 0 if nothing can stream. */
static uint64_t smallest_ring(const sthi_plan_world *w, sthi_pipe *p, sthi_choice *out_choice) {
    const sth_plan_input *in = w->in;
    uint64_t ring;
    *out_choice = (sthi_choice){0};
    if (w->order_count == 0) return 0;
    sthi_pipe_build_loads(p, w, NULL, 0, NULL);
    ring = sthi_max_u64(w->largest, widest_span(p, in));
    if (!sthi_round_up(ring, in->ring_granularity, &ring)) return 0;
    uint64_t most = 3 * ring + in->ring_granularity;
    bool found = grow_until_it_runs(p, in, ring, most, STHI_HOMES_ROW, out_choice);
    if (in->ring_mapped_twice && p->load_bytes >= ring) {
        uint64_t turns = p->load_bytes / ring, even = (p->load_bytes + turns - 1) / turns;
        sthi_choice stretched = {0, 0, STHI_HOMES_EVEN};
        if (sthi_round_up(even, in->ring_granularity, &stretched.ring) &&
            (!found || stretched.ring < out_choice->ring) && choice_runs(p, in, &stretched)) {
            *out_choice = stretched;
            found = true;
        }
    }
    if (w->holds) {
        sthi_choice apart;
        if (found) most = out_choice->ring - 1;
        if (!sthi_round_up(sthi_max_u64(w->largest, sthi_pipe_most_held(p, in)), in->ring_granularity, &ring)) return 0;
        if (grow_until_it_runs(p, in, ring, most, STHI_HOMES_APART, &apart)) {
            *out_choice = apart;
            found = true;
        }
    }
    return found ? out_choice->ring : 0;
}

/* Rings never need more than everything resident does. */
static uint64_t smallest_room(const sthi_plan_world *w, sthi_pipe *p, sthi_choice *choice) {
    uint64_t ring = smallest_ring(w, p, choice);
    return ring == 0 ? w->stream_bytes : sthi_min_u64(ring, w->stream_bytes);
}

sth_status sthi_plan_smallest(const sth_plan_input *in, uint64_t *out_budget) {
    sthi_plan_world w;
    sthi_pipe p;
    sthi_choice choice;
    STHI_TRY(sthi_plan_world_init(&w, in));
    sth_status status = sthi_pipe_init(&p, in->use_count);
    if (status == STH_OK) {
        *out_budget = sthi_plus(sthi_plus(w.fixed_bytes, w.demand_bytes), smallest_room(&w, &p, &choice));
        sthi_pipe_fini(&p);
    }
    sthi_plan_world_fini(&w);
    return status;
}

/* Predictions -------------------------------------------------------------------------------------- */

static sth_bound bound_of(double step, double compute, double link, double disk) {
    if (step <= 1.01 * compute) return STH_BOUND_COMPUTE;
    if (disk >= link && disk >= 0.97 * step) return STH_BOUND_DISK;
    return link >= 0.97 * step ? STH_BOUND_LINK : STH_BOUND_RING;
}

/* `p` holds the plan's loads. */
static sth_status predict(sthi_pipe *p, const sthi_plan_world *w, const sth_plan *plan,
                          sth_prediction *out) {
    const sth_plan_input *in = w->in;
    sthi_price price = sthi_pipe_simulate(p, in, plan->ring_bytes, INFINITY);
    if (!price.runs)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "the plan cannot run: a load waits for a use that comes after its own");
    sth_prediction r = {.compute_ns = w->compute_ns, .ring_bytes = plan->ring_bytes};
    r.step_ns = (int64_t)llround(fmax(price.step_ns, (double)w->compute_ns));
    r.link_ns = (int64_t)llround(price.link_ns);
    r.disk_ns = (int64_t)llround(price.disk_ns);
    r.stall_ns = r.step_ns - r.compute_ns;
    for (uint32_t k = 0; k < p->load_count + p->renewal_count; k++) {
        uint64_t wire = sthi_wire_bytes(in, p->loads[k].unit);
        r.bytes_per_step += wire;
        if (in->units[p->loads[k].unit].flags & STH_UNIT_FROM_DISK) r.disk_bytes_per_step += wire;
    }
    r.total_bytes = w->used_bytes;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        bool packed = in->units[i].flags & STHI_UNIT_STAYS_PACKED;
        if (packed) r.packed_bytes += in->units[i].packed_bytes;
        if (plan->resident[i]) r.resident_bytes += in->units[i].bytes;
        if (!plan->resident[i] && !packed && w->kind[i] == STHI_UNIT_STREAMABLE) r.streamed_bytes += in->units[i].bytes;
    }
    uint64_t set_aside = sthi_plus(w->fixed_bytes, w->demand_bytes), least = 0;
    uint64_t room = in->budget > set_aside ? in->budget - set_aside : 0;
    STHI_TRY(sthi_plan_least_bytes(w, room, &least));
    r.lower_bound_ns = (int64_t)sthi_plan_least_ns(w, room, least);
    double link = fmax(price.link_ns, w->renewed_ns); /* for what is written the link waits, and compute for the link */
    r.bound_by = bound_of((double)r.step_ns, (double)w->compute_ns, link, price.disk_ns);
    *out = r;
    return STH_OK;
}

/* Copies a plan's loads into the pipe, or says what is wrong with them. */
static const char *take_plan(sthi_pipe *p, const sth_plan_input *in, const sth_plan *plan) {
    uint32_t n = in->use_count;
    if (plan->unit_count != in->unit_count || plan->use_count != n) return "it is for other units or uses";
    if (plan->load_count > n) return "it has more loads than uses";
    for (uint32_t k = 0; k < plan->load_count; k++) {
        const sth_plan_load *load = &plan->loads[k];
        if (load->unit >= in->unit_count || load->first_use >= n || load->last_use >= n)
            return "a load names a unit or use that does not exist";
        if (k > 0 && load->first_use <= plan->loads[k - 1].first_use) return "its loads are out of order";
        uint64_t bytes = in->units[load->unit].bytes, ring = plan->ring_bytes;
        if (bytes == 0 || bytes > ring || load->ring_offset >= ring) return "a load lies outside its ring";
        if (!in->ring_mapped_twice && load->ring_offset > ring - bytes)
            return "a load runs past the end of a ring that is mapped once";
        uint64_t last = load->last_use + (load->last_use < load->first_use ? (uint64_t)n : 0);
        p->loads[k] = (sthi_lap_load){.unit = load->unit, .first_use = load->first_use, .last_use = last,
                                      .bytes = bytes, .offset = load->ring_offset};
    }
    for (uint32_t t = 0; t < n; t++) {
        uint32_t k = plan->use_load[t];
        if (k != STH_NONE && (k >= plan->load_count || p->loads[k].unit != in->uses[t].unit))
            return "a use is served by a load of another unit";
        p->use_load[t] = k;
    }
    p->load_count = plan->load_count;
    return NULL;
}

sth_status sthi_plan_predict_as_it_is(const sth_plan_input *in, const sth_plan *plan, sth_prediction *out) {
    sthi_plan_world w;
    sthi_pipe p;
    STHI_TRY(sthi_plan_world_init(&w, in));
    sth_status status = sthi_pipe_init(&p, in->use_count);
    if (status == STH_OK) {
        const char *wrong = take_plan(&p, in, plan);
        if (!wrong) sthi_pipe_index_loads(&p, &w);
        status = wrong ? sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "the plan does not fit: %s", wrong)
                       : predict(&p, &w, plan, out);
        sthi_pipe_fini(&p);
    }
    sthi_plan_world_fini(&w);
    return status;
}

/* Making a plan ------------------------------------------------------------------------------------ */

static sth_status out_of_memory(void) {
    return sthi_no_memory(NULL, "a plan; free host memory");
}

sth_plan *sthi_plan_alloc(const sth_plan_input *in, uint32_t load_count) {
    sth_plan *plan = sthi_zalloc(1, sizeof *plan);
    if (!plan) return NULL;
    *plan = (sth_plan){.unit_count = in->unit_count, .use_count = in->use_count, .load_count = load_count};
    plan->resident = sthi_zalloc(in->unit_count, sizeof *plan->resident);
    plan->packed = sthi_zalloc(in->unit_count, sizeof *plan->packed);
    plan->plain = sthi_zalloc(in->unit_count, sizeof *plan->plain);
    plan->loads = sthi_zalloc(load_count, sizeof *plan->loads);
    plan->use_load = sthi_zalloc(in->use_count, sizeof *plan->use_load);
    if (plan->resident && plan->packed && plan->plain && plan->loads && plan->use_load) return plan;
    sthi_plan_destroy(plan);
    return NULL;
}

const char *sthi_bound_name(sth_bound bound) {
    static const char *const names[] = {"compute", "link", "ring", "disk"};
    return (unsigned)bound < sizeof names / sizeof *names ? names[bound] : "unknown";
}

void sthi_plan_destroy(sth_plan *plan) {
    if (!plan) return;
    sthi_free(plan->resident);
    sthi_free(plan->packed);
    sthi_free(plan->plain);
    sthi_free(plan->loads);
    sthi_free(plan->use_load);
    sthi_free(plan);
}

/* The largest unit that streams, or where the rest alone is too much the largest of the rest. */
static uint32_t unit_at_fault(const sthi_plan_world *w) {
    const sth_plan_input *in = w->in;
    uint32_t unit = w->largest_unit;
    uint64_t bytes = 0;
    if (in->budget >= sthi_plus(w->fixed_bytes, w->demand_bytes) && w->order_count > 0) return unit;
    for (uint32_t i = 0; i < in->unit_count; i++) {
        bool set_aside = w->kind[i] == STHI_UNIT_FIXED || w->kind[i] == STHI_UNIT_DEMAND;
        if (!set_aside || in->units[i].bytes <= bytes) continue;
        unit = i;
        bytes = in->units[i].bytes;
    }
    return unit;
}

static sth_status too_small(const sthi_plan_world *w, uint64_t smallest) {
    const sth_plan_input *in = w->in;
    char name[32], has[40], needs[40], least[40];
    uint32_t unit = unit_at_fault(w);
    snprintf(name, sizeof name, "unit %u", unit);
    return sthi_fail(STH_BUDGET_TOO_SMALL, NULL, 0, name,
                     "unit %u needs %llu bytes (%s) on the device; with what is held beside it the smallest "
                     "budget that works is %llu bytes (%s), and this one has %llu (%s)",
                     unit, (unsigned long long)in->units[unit].bytes,
                     sthi_format_size(in->units[unit].bytes, needs, sizeof needs),
                     (unsigned long long)smallest, sthi_format_size(smallest, least, sizeof least),
                     (unsigned long long)in->budget, sthi_format_size(in->budget, has, sizeof has));
}

/* Chooses residents; on return the pipe holds the loads at their homes. */
static sth_status choose(const sthi_plan_world *w, sthi_pipe *p, uint8_t *resident, uint64_t *out_ring) {
    const sth_plan_input *in = w->in;
    sthi_choice smallest;
    uint64_t set_aside = sthi_plus(w->fixed_bytes, w->demand_bytes), least = 0;
    uint64_t needs = smallest_room(w, p, &smallest);
    if (in->budget < set_aside || in->budget - set_aside < needs) return too_small(w, sthi_plus(set_aside, needs));
    uint64_t room = in->budget - set_aside;
    if (w->stream_bytes > room) {
        STHI_TRY(sthi_plan_least_bytes(w, room, &least));
        return sthi_plan_search(w, p, room, &smallest, least, resident, out_ring);
    }
    for (uint32_t i = 0; i < w->order_count; i++) resident[w->order[i]] = 1;
    sthi_pipe_build_loads(p, w, resident, 0, NULL);
    *out_ring = 0;
    return STH_OK;
}

static sth_status write_plan(const sthi_plan_world *w, sthi_pipe *p, const uint8_t *resident,
                             uint64_t ring, sth_plan **out_plan) {
    const sth_plan_input *in = w->in;
    sth_plan *plan = sthi_plan_alloc(in, p->load_count);
    if (!plan) return out_of_memory();
    plan->ring_bytes = ring;
    plan->demand_bytes = w->demand_bytes;
    plan->ring_mapped_twice = in->ring_mapped_twice;
    for (uint32_t i = 0; i < in->unit_count; i++)
        plan->resident[i] = resident[i] || w->kind[i] == STHI_UNIT_FIXED;
    for (uint32_t k = 0; k < p->load_count; k++) {
        const sthi_lap_load *load = &p->loads[k];
        plan->loads[k] = (sth_plan_load){.unit = load->unit,
                                         .first_use = load->first_use,
                                         .last_use = (uint32_t)(load->last_use % in->use_count),
                                         .ring_offset = load->offset};
    }
    if (in->use_count) memcpy(plan->use_load, p->use_load, in->use_count * sizeof *plan->use_load);
    sth_status status = predict(p, w, plan, &plan->prediction);
    if (status != STH_OK) {
        sthi_plan_destroy(plan);
        return status;
    }
    *out_plan = plan;
    return STH_OK;
}

static sth_status plan_world(const sthi_plan_world *w, sthi_pipe *p, sth_plan **out_plan) {
    uint8_t *resident = sthi_zalloc(w->in->unit_count, sizeof *resident);
    if (!resident) return out_of_memory();
    uint64_t ring;
    sth_status status = choose(w, p, resident, &ring);
    if (status == STH_OK) status = write_plan(w, p, resident, ring, out_plan);
    sthi_free(resident);
    return status;
}

sth_status sthi_plan_create_as_it_is(const sth_plan_input *in, sth_plan **out_plan) {
    sthi_plan_world w;
    sthi_pipe p;
    STHI_TRY(sthi_plan_world_init(&w, in));
    sth_status status = sthi_pipe_init(&p, in->use_count);
    if (status == STH_OK) {
        status = plan_world(&w, &p, out_plan);
        sthi_pipe_fini(&p);
    }
    sthi_plan_world_fini(&w);
    return status;
}
