/* Layouts: what lies somewhere stays where there is room, nothing overlaps, and the room is never exceeded. */
#include <string.h>

#include "base/fault.h"
#include "base/random.h"
#include "core/layout.h"
#include "stagehand/plan.h"
#include "support/check.h"

enum { MOST = 40 };

typedef struct rig {
    sthi_laid units[MOST], before[MOST];
    uint64_t extents[2 * MOST];
    sthi_layout l;
} rig;

static uint64_t sum_of(const uint64_t *bytes, uint32_t count) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++) sum += bytes[i];
    return sum;
}

static uint64_t bytes_of_units(const rig *r) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < r->l.unit_count; i++) sum += r->units[i].bytes;
    return sum;
}

static void find(rig *r) {
    r->l.units = r->units;
    r->l.extents = r->extents;
    memcpy(r->before, r->units, sizeof r->before);
    assert_ok(sthi_layout_find(&r->l));
}

static uint32_t moved(const rig *r) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < r->l.unit_count; i++)
        count += r->before[i].extent != r->units[i].extent || r->before[i].offset != r->units[i].offset;
    return count;
}

static void check(const rig *r) {
    uint32_t all = r->l.extent_count + r->l.new_count;
    assert_true(sum_of(r->extents, all) <= r->l.room);
    for (uint32_t i = 0; i < r->l.unit_count; i++) {
        const sthi_laid *a = &r->units[i];
        assert_true(a->extent < all && a->offset + a->bytes <= r->extents[a->extent]);
        for (uint32_t k = 0; k < i; k++) {
            const sthi_laid *b = &r->units[k];
            bool apart = a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset;
            assert_true(a->extent != b->extent || apart);
        }
    }
}

static void new_units_lie_in_extents_of_about_the_target(void **state) {
    (void)state;
    rig r = {.l = {.unit_count = 5, .room = 1000, .target = 300}};
    static const uint64_t bytes[5] = {100, 200, 50, 400, 100};
    for (int i = 0; i < 5; i++) r.units[i] = (sthi_laid){.bytes = bytes[i], .extent = STH_NONE};
    find(&r);
    check(&r);
    assert_int_equal(r.l.new_count, 4); /* 100 and 200; 50; 400; 100 */
    assert_int_equal(sum_of(r.extents, 4), 850);
}

/* Two extents of 300: one unit leaves each; of what comes one fits a hole. */
static rig changed(uint64_t room) {
    rig r = {.l = {.unit_count = 4, .extent_count = 2, .room = room, .target = 300}, .extents = {300, 300}};
    r.units[0] = (sthi_laid){.bytes = 100, .extent = 0, .offset = 0};
    r.units[1] = (sthi_laid){.bytes = 200, .extent = 1, .offset = 100};
    r.units[2] = (sthi_laid){.bytes = 150, .extent = STH_NONE};
    r.units[3] = (sthi_laid){.bytes = 120, .extent = STH_NONE};
    return r;
}

static void what_is_there_stays_and_holes_are_filled(void **state) {
    (void)state;
    rig r = changed(720);
    find(&r);
    check(&r);
    assert_int_equal(moved(&r), 2);
    assert_int_equal(r.units[2].extent, 0);
    assert_int_equal(r.units[2].offset, 100);
    assert_int_equal(r.units[3].extent, 2);
    assert_int_equal(r.extents[2], 120);
}

/* Where that is more than the room, the extent that wastes most is given up, and what lay there fills the other one. */
static void an_extent_with_large_holes_is_given_up_first(void **state) {
    (void)state;
    rig r = changed(700);
    find(&r);
    check(&r);
    assert_int_equal(r.extents[1], 0);
    assert_int_equal(r.units[0].offset, 0);
    assert_int_equal(r.units[0].extent + r.units[1].extent, 0);
    assert_int_equal(r.units[1].offset, 100);
}

static void an_empty_extent_goes(void **state) {
    (void)state;
    rig r = {.l = {.unit_count = 1, .extent_count = 2, .room = 500, .target = 300}, .extents = {300, 200}};
    r.units[0] = (sthi_laid){.bytes = 200, .extent = 1, .offset = 0};
    find(&r);
    check(&r);
    assert_int_equal(moved(&r), 0);
    assert_int_equal(r.extents[0], 0);
}

static void memory_that_is_out_is_an_error(void **state) {
    (void)state;
    for (uint64_t n = 1; n <= 5; n++) {
        rig r = changed(600);
        r.l.units = r.units;
        r.l.extents = r.extents;
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        assert_status(sthi_layout_find(&r.l), STH_OUT_OF_HOST_MEMORY);
        sthi_fault_disarm_all();
        assert_int_equal(r.units[2].extent, STH_NONE);
    }
}

static uint32_t below(uint64_t *index, uint32_t n) { return (uint32_t)(sthi_random64(7, (*index)++) % n); }

/* The layout of the plan before, of which some units stay, and others come. */
static void next_plan(rig *r, uint64_t *index) {
    uint32_t extents = r->l.extent_count + r->l.new_count;
    sthi_laid stays[MOST];
    uint32_t count = 0;
    for (uint32_t i = 0; i < r->l.unit_count; i++)
        if (below(index, 4)) stays[count++] = r->units[i];
    while (count < MOST && below(index, 8))
        stays[count++] = (sthi_laid){.bytes = 50 * (1 + below(index, 8)), .extent = STH_NONE};
    memcpy(r->units, stays, sizeof stays);
    /* Extents that went have no number any more. */
    uint32_t number[2 * MOST], kept = 0;
    for (uint32_t x = 0; x < extents; x++) {
        number[x] = kept;
        if (r->extents[x]) r->extents[kept++] = r->extents[x];
    }
    for (uint32_t i = 0; i < count; i++)
        if (r->units[i].extent != STH_NONE) r->units[i].extent = number[r->units[i].extent];
    r->l = (sthi_layout){.unit_count = count, .extent_count = kept, .target = 100 + below(index, 900)};
    r->l.room = bytes_of_units(r) + below(index, 2) * below(index, 2000);
}

static void plans_that_follow_each_other_keep_the_rules(void **state) {
    (void)state;
    uint64_t index = 0;
    rig r = {.l = {0}};
    for (unsigned round = 0; round < cases_to_try(2000); round++) {
        next_plan(&r, &index);
        uint64_t had = sum_of(r.extents, r.l.extent_count), loose = 0;
        for (uint32_t i = 0; i < r.l.unit_count; i++) loose += r.units[i].extent == STH_NONE ? r.units[i].bytes : 0;
        uint32_t fresh = 0;
        for (uint32_t i = 0; i < r.l.unit_count; i++) fresh += r.units[i].extent == STH_NONE;
        find(&r);
        check(&r);
        if (had + loose <= r.l.room) assert_int_equal(moved(&r), fresh); /* nothing has to move */
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(new_units_lie_in_extents_of_about_the_target),
        cmocka_unit_test(what_is_there_stays_and_holes_are_filled),
        cmocka_unit_test(an_extent_with_large_holes_is_given_up_first),
        cmocka_unit_test(an_empty_extent_goes),
        cmocka_unit_test(memory_that_is_out_is_an_error),
        cmocka_unit_test(plans_that_follow_each_other_keep_the_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
