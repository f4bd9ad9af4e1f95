/* Places: extents, slots, ranges that wrap, and the choice of a place against a search of every start. */
#include "base/fault.h"
#include "base/memory.h"
#include "core/places.h"
#include "support/check.h"

#include <string.h>

enum { EXTENTS = 4, SLOTS = 16 };

static void open_places(sthi_places *p) { assert_ok(sthi_places_init(p, EXTENTS, SLOTS)); }

static void assert_sound(const sthi_places *p) {
    const char *why;
    if (!sthi_places_check(p, &why)) fail_msg("%s", why);
}

static int32_t full_slot(sthi_places *p, uint32_t unit, uint32_t extent, uint64_t offset, uint64_t bytes) {
    int32_t id = sthi_slot_open(p, unit, extent, offset, bytes);
    assert_int_not_equal(id, STHI_NO_SLOT);
    p->slots[id].claimed = bytes;
    p->slots[id].complete = true;
    return id;
}

static void extents_are_counted_and_used_again(void **state) {
    (void)state;
    sthi_places p;
    open_places(&p);
    for (uint64_t i = 0; i < EXTENTS; i++) {
        assert_int_equal(sthi_places_add_extent(&p, 4096 * i, 100 + i, false), i);
        assert_int_equal(p.extent_end, i + 1);
    }
    assert_int_equal(sthi_places_add_extent(&p, 1, 1, false), -1);
    assert_int_equal(sthi_places_total(&p), 406);
    sthi_places_drop_extent(&p, 1);
    assert_int_equal(sthi_places_total(&p), 305);
    assert_int_equal(sthi_places_add_extent(&p, 8, 1000, true), 1);
    assert_int_equal(sthi_places_total(&p), 1305);
    assert_int_equal(p.extent_end, EXTENTS);
    assert_sound(&p);
    sthi_places_drop_extent(&p, 2);
    p.extents[2].slots = 9; /* what a record in nobody's use holds is nothing to anybody */
    assert_sound(&p);
    sthi_places_fini(&p);
    assert_true(!p.extents && !p.slots && !p.free_slots && !p.extent_end && !p.free_count);
    sthi_places_fini(&p); /* again is fine */
}

static void slot_records_run_out_and_come_back(void **state) {
    (void)state;
    sthi_places p;
    open_places(&p);
    (void)sthi_places_add_extent(&p, 0, 1000, false);
    int32_t ids[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++) ids[i] = full_slot(&p, i, 0, 10 * i, 10);
    assert_int_equal(sthi_slot_open(&p, 99, 0, 500, 10), STHI_NO_SLOT);
    assert_sound(&p);
    uint64_t generation = p.slots[ids[5]].generation;
    sthi_slot_close(&p, ids[5]);
    assert_false(p.slots[ids[5]].live);
    assert_sound(&p);
    int32_t again = sthi_slot_open(&p, 99, 0, 500, 10);
    assert_int_equal(again, ids[5]);
    assert_int_not_equal(p.slots[again].generation, generation);
    for (uint32_t i = 0; i < SLOTS; i++) {
        sthi_slot_close(&p, ids[(i + 3) % SLOTS]); /* from the middle, both ends last */
        assert_sound(&p);
    }
    assert_int_equal(p.extents[0].slots, 0);
    assert_int_equal(p.extents[0].first_slot, STHI_NO_SLOT);
    assert_sound(&p);
    sthi_places_fini(&p);
}

/* Against the bytes themselves. */
static void ranges_touch_when_they_share_a_byte(void **state) {
    (void)state;
    enum { N = 7 };
    for (int wraps = 0; wraps < 2; wraps++)
        for (uint64_t a = 0; a < N; a++)
            for (uint64_t an = 0; an <= (wraps ? N : N - a); an++)
                for (uint64_t b = 0; b < N; b++)
                    for (uint64_t bn = 0; bn <= (wraps ? N : N - b); bn++) {
                        sthi_extent e = {.bytes = N, .wraps = wraps};
                        bool mine[N] = {false}, shared = false;
                        for (uint64_t i = 0; i < an; i++) mine[(a + i) % N] = true;
                        for (uint64_t i = 0; i < bn; i++) shared = shared || mine[(b + i) % N];
                        assert_int_equal(sthi_ranges_touch(&e, a, an, b, bn), shared);
                    }
}

static void touching_walks_claimed_ranges_only(void **state) {
    (void)state;
    sthi_places p;
    open_places(&p);
    (void)sthi_places_add_extent(&p, 0, 100, true);
    int32_t a = full_slot(&p, 0, 0, 0, 20), b = full_slot(&p, 1, 0, 90, 8);
    int32_t under_way = sthi_slot_open(&p, 2, 0, 40, 30);
    p.slots[under_way].claimed = 10;
    int found_a = 0, found_b = 0, found = 0;
    int32_t id = STHI_NO_SLOT;
    while ((id = sthi_places_touching(&p, 0, 95, 10, STHI_NO_SLOT, id)) != STHI_NO_SLOT) {
        found_a += id == a;
        found_b += id == b;
        found++;
    }
    assert_int_equal(found, 2);
    assert_true(found_a == 1 && found_b == 1);
    assert_int_equal(sthi_places_touching(&p, 0, 95, 10, a, STHI_NO_SLOT), b);
    assert_int_equal(sthi_places_touching(&p, 0, 45, 1, STHI_NO_SLOT, STHI_NO_SLOT), under_way);
    assert_int_equal(sthi_places_touching(&p, 0, 50, 20, STHI_NO_SLOT, STHI_NO_SLOT), STHI_NO_SLOT);
    sthi_places_fini(&p);
}

static double by_unit(void *context, const sthi_slot *s) {
    (void)context;
    return s->leases ? -1 : (double)s->unit;
}

/* Cost of a range, byte by byte; -1 when it may not go. */
static double cost_of(const sthi_places *p, uint32_t extent, uint64_t at, uint64_t bytes) {
    double sum = 0;
    for (int32_t id = 0; id < SLOTS; id++) {
        const sthi_slot *s = &p->slots[id];
        bool touches = s->live && s->extent == extent && at < s->offset + s->claimed &&
                       s->offset < at + bytes;
        if (touches && s->leases) return -1;
        if (touches) sum += s->unit;
    }
    return sum;
}

static double best_of_all(const sthi_places *p, uint64_t bytes) {
    double best = -1;
    for (uint32_t x = 0; x < EXTENTS; x++)
        for (uint64_t at = 0; !p->extents[x].closing && at + bytes <= p->extents[x].bytes; at++) {
            double c = cost_of(p, x, at, bytes);
            if (c >= 0 && (best < 0 || c < best)) best = c;
        }
    return best;
}

static uint64_t roll(uint64_t *seed, uint64_t below) {
    *seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (*seed >> 33) % below;
}

static void fill_by_chance(sthi_places *p, uint64_t *seed) {
    for (uint32_t x = 0; x < EXTENTS; x++) {
        uint64_t bytes = 10 + roll(seed, 60), at = 0;
        (void)sthi_places_add_extent(p, 4096 * x, bytes, false);
        bool closing = roll(seed, 6) == 0;
        while (p->free_count && (at += roll(seed, 8)) < bytes) {
            uint64_t n = 1 + roll(seed, 20);
            if (at + n > bytes) n = bytes - at;
            int32_t id = full_slot(p, (uint32_t)roll(seed, 9), x, at, n);
            p->slots[id].leases = roll(seed, 5) == 0;
            at += n;
        }
        p->extents[x].closing = closing; /* no slot is opened in it any more */
    }
}

static void the_cheapest_place_is_chosen(void **state) {
    (void)state;
    uint64_t seed = 7;
    int placed = 0, refused = 0;
    for (int round = 0; round < 3000; round++) {
        sthi_places p;
        open_places(&p);
        fill_by_chance(&p, &seed);
        assert_sound(&p);
        uint64_t bytes = 1 + roll(&seed, 40);
        double best = best_of_all(&p, bytes);
        sthi_place place;
        bool found = sthi_places_choose(&p, bytes, by_unit, NULL, &place);
        assert_int_equal(found, best >= 0);
        if (found) {
            assert_false(p.extents[place.extent].closing);
            assert_true(place.offset + bytes <= p.extents[place.extent].bytes);
            assert_true(cost_of(&p, place.extent, place.offset, bytes) == best);
            placed++;
        } else {
            refused++;
        }
        sthi_places_fini(&p);
    }
    assert_true(placed > 100 && refused > 100);
}

/* Each broken rule is noticed, and named. `wraps`: in an extent that is mapped twice. */
static void check_notices(void **state) {
    (void)state;
    static const struct {
        int fault;
        bool wraps;
        const char *why;
    } table[] = {
        {0, false, "overlap"}, {1, false, "past its extent"}, {2, false, "not all of it is claimed"},
        {3, false, "leased before"}, {4, false, "count differ"}, {5, false, "not its own"}, {6, false, "not its own"},
        {7, true, "past its extent"}, {8, true, "past its extent"}, {9, true, "past its extent"},
        {10, true, "lead back"}, {11, false, "count differ"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        sthi_places p;
        const char *why;
        open_places(&p);
        (void)sthi_places_add_extent(&p, 0, 100, table[i].wraps);
        (void)sthi_places_add_extent(&p, 4096, 100, table[i].wraps);
        int32_t a = full_slot(&p, 0, 0, 0, 20), b = full_slot(&p, 1, 0, 20, 20), c = full_slot(&p, 2, 1, 0, 100);
        assert_true(sthi_places_check(&p, &why) && !*why);
        switch (table[i].fault) {
        case 0: p.slots[b].offset = 19; break;
        case 1: p.slots[b].offset = 90; break;
        case 2: p.slots[a].claimed = 19; break;
        case 3: p.slots[a].complete = false, p.slots[a].leases = 1; break;
        case 4: p.extents[0].slots = 3; break;
        case 5: p.slots[a].extent = 1; break;
        case 6: p.slots[a].live = false; break;
        case 7: p.slots[b].offset = 100; break; /* the first byte that is not there */
        case 8: p.slots[c].bytes = p.slots[c].claimed = 101; break;
        case 9: p.slots[c].bytes = 50; break; /* of which 100 are claimed */
        case 10: p.slots[a].prev = c; break;
        default: p.extents[1].slots = 0; /* not the first extent */
        }
        assert_false(sthi_places_check(&p, &why));
        if (!strstr(why, table[i].why)) fail_msg("fault %d gave: %s", table[i].fault, why);
        sthi_places_fini(&p);
    }
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    uint64_t n = 1;
    for (bool failed = true; failed; n++) {
        sthi_places p;
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = sthi_places_init(&p, EXTENTS, SLOTS);
        sthi_fault_disarm_all();
        failed = rc != STH_OK;
        if (failed) assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY), assert_int_equal(sth_last_error()->native_code, 0);
        else sthi_places_fini(&p);
        assert_int_equal(sthi_alloc_live(), live);
    }
    assert_int_equal(n, 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(extents_are_counted_and_used_again),
        cmocka_unit_test(slot_records_run_out_and_come_back),
        cmocka_unit_test(ranges_touch_when_they_share_a_byte),
        cmocka_unit_test(touching_walks_claimed_ranges_only),
        cmocka_unit_test(the_cheapest_place_is_chosen),
        cmocka_unit_test(check_notices),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests_name("places", tests, NULL, NULL);
}
