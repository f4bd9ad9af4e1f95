/* Homes for loads of which some are held beside later ones. A row of places has room for all that streams meanwhile;
 * here what is held lies apart, each where nothing else lies as long as it is held, and the row runs on between.
 * No locks. Does not price anything. */
#include "core/plan.h"

enum { MOST_HELD = 128 }; /* more of them in a step are a row */

static uint64_t let_go(const sthi_pipe *p, const sth_plan_input *in, uint32_t k) {
    return sthi_let_go(in, p->loads[k].last_use);
}

static bool meet_at(const sthi_pipe *p, const sth_plan_input *in, uint32_t a, uint32_t b, uint64_t lap) {
    return p->loads[a].first_use <= let_go(p, in, b) + lap && p->loads[b].first_use + lap <= let_go(p, in, a);
}

/* Whether both are on the device at once, in one lap or in two that follow each other. */
static bool meet(const sthi_pipe *p, const sth_plan_input *in, uint32_t a, uint32_t b) {
    return meet_at(p, in, a, b, 0) || meet_at(p, in, a, b, p->use_count) || meet_at(p, in, b, a, p->use_count);
}

static uint64_t end_of(const sthi_pipe *p, uint32_t k) { return p->loads[k].offset + p->loads[k].bytes; }

/* list[0..count) by offset. */
static void insert_by_offset(const sthi_pipe *p, uint32_t *list, uint32_t count, uint32_t k) {
    uint32_t i = count;
    for (; i > 0 && p->loads[list[i - 1]].offset > p->loads[k].offset; i--) list[i] = list[i - 1];
    list[i] = k;
}

/* The first place from `at` on where none of the list lies while load k is there. */
static uint64_t first_gap(const sthi_pipe *p, const sth_plan_input *in, const uint32_t *list, uint32_t count,
                          uint32_t k, uint64_t at) {
    for (uint32_t i = 0; i < count && p->loads[list[i]].offset < at + p->loads[k].bytes; i++)
        if (end_of(p, list[i]) > at && meet(p, in, k, list[i])) at = end_of(p, list[i]);
    return at;
}

typedef bool before(const sthi_pipe *p, const sth_plan_input *in, uint32_t a, uint32_t b);

static bool is_larger(const sthi_pipe *p, const sth_plan_input *in, uint32_t a, uint32_t b) {
    (void)in;
    return p->loads[a].bytes > p->loads[b].bytes;
}

/* What is held longest lies at the ring's start, where it parts nothing. */
static bool is_held_longer(const sthi_pipe *p, const sth_plan_input *in, uint32_t a, uint32_t b) {
    return let_go(p, in, a) - p->loads[a].first_use > let_go(p, in, b) - p->loads[b].first_use;
}

static uint32_t list_held(const sthi_pipe *p, const sth_plan_input *in, before *first, uint32_t *list) {
    uint32_t count = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        if (let_go(p, in, k) == p->loads[k].first_use) continue;
        if (count == MOST_HELD) return 0;
        uint32_t i = count++;
        for (; i > 0 && first(p, in, k, list[i - 1]); i--) list[i] = list[i - 1];
        list[i] = k;
    }
    return count;
}

static bool place_at(sthi_pipe *p, uint64_t ring, uint32_t k, uint64_t at) {
    if (at > ring || p->loads[k].bytes > ring - at) return false;
    p->loads[k].offset = at;
    return true;
}

static bool place_in_order(sthi_pipe *p, const sth_plan_input *in, uint64_t ring, before *first) {
    uint32_t held[MOST_HELD], placed[MOST_HELD], count = list_held(p, in, first, held);
    uint64_t head = 0;
    if (!count) return false;
    for (uint32_t i = 0; i < count; i++) { /* each as low as it can be */
        if (!place_at(p, ring, held[i], first_gap(p, in, placed, i, held[i], 0))) return false;
        insert_by_offset(p, placed, i, held[i]);
    }
    for (uint32_t k = 0; k < p->load_count; k++) {
        if (let_go(p, in, k) != p->loads[k].first_use) continue;
        if (!place_at(p, ring, k, first_gap(p, in, placed, count, k, head)) &&
            !place_at(p, ring, k, first_gap(p, in, placed, count, k, 0)))
            return false;
        head = end_of(p, k);
    }
    return true;
}

bool sthi_pipe_place_apart(sthi_pipe *p, const sth_plan_input *in, uint64_t ring) {
    return place_in_order(p, in, ring, is_held_longer) || place_in_order(p, in, ring, is_larger);
}

uint64_t sthi_pipe_most_held(sthi_pipe *p, const sth_plan_input *in) {
    uint64_t *change = p->tree, now = 0, most = 0; /* by use: bytes that come, less those that have gone */
    for (uint32_t t = 0; t < p->use_count; t++) change[t] = 0;
    for (uint32_t k = 0; k < p->load_count; k++) {
        uint64_t gone = let_go(p, in, k) + 1;
        now += gone >= p->use_count ? p->loads[k].bytes : 0; /* from the lap before; its end takes them off */
        change[p->loads[k].first_use] += p->loads[k].bytes;
        change[gone % p->use_count] -= p->loads[k].bytes;
    }
    for (uint32_t t = 0; t < p->use_count; t++) {
        now += change[t];
        most = now > most ? now : most;
    }
    return most;
}
