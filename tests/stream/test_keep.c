/* Units of files that stay in host memory within a budget. */
#include "support/check.h"

#include <stdio.h>
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "runtime/geometry.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/verify.h"
#include "store/tempfiles.h"
#include "stream/files_world.h"

/* Mean of the bytes read in a step, over `n` good ones. */
static uint64_t read_in_step(file_world *w, int n) {
    sth_runtime_stats before, after;
    sthi_runtime_stats(w->runtime, &before);
    good_steps(w, n);
    sthi_runtime_stats(w->runtime, &after);
    return (after.file_bytes - before.file_bytes) / (uint64_t)n;
}

static sth_runtime_stats stats_of(file_world *w) {
    sth_runtime_stats stats;
    sthi_runtime_stats(w->runtime, &stats);
    return stats;
}

static uint64_t all_bytes(void) {
    uint64_t sum = 0;
    for (uint32_t u = 0; u < UNITS; u++) sum += file_unit_bytes(u);
    return sum;
}

static void half_in_ram_is_not_read_again(void **state) {
    for (int way = 0; way < STH_READ_WAY_COUNT; way++)
        for (uint32_t readers = 0; readers < 4; readers++)
            for (int pinned = 0; pinned < 2; pinned++) {
                file_world w;
                uint64_t ram = all_bytes() / 2;
                setting s = {readers, 4, false, 60000, NULL, ram};
                want_way(*state, (sth_read_way)way);
                if (!pinned) sthi_fault_arm(STHI_FAULT_PIN, 1, true);
                assert_ok(file_world_open(&w, *state, &s));
                good_steps(&w, 5);
                sthi_fault_disarm_all();
                uint64_t kept = stats_of(&w).ram_bytes, read = UINT64_MAX;
                assert_in_range(kept, ram - 41000, ram); /* to the largest unit */
                /* A unit that was read ahead and is given up, for a load on demand or another plan, is read again. How
                 * often this happens depends on the threads' timing, so one quiet stretch of steps is enough: if kept
                 * units were read again, no stretch would stay below all bytes. */
                uint64_t bound = (all_bytes() - kept) * 3 / 2;
                for (int tries = 0; tries < 50 && read > bound; tries++) read = read_in_step(&w, 4);
                assert_true(read > 0);
                assert_true(read <= bound);
                for (uint32_t u = 0; u < UNITS; u++) {
                    bool equal = false;
                    assert_ok(sthi_unit_verify(w.runtime, u, &equal, NULL));
                    assert_true(equal);
                }
                file_world_close(&w);
            }
}

static void what_is_all_in_ram_is_read_once(void **state) {
    for (uint32_t readers = 0; readers < 3; readers++) {
        file_world w;
        setting s = {readers, 4, readers == 0, 60000, NULL, 10 * all_bytes()};
        assert_ok(file_world_open(&w, *state, &s));
        good_steps(&w, 2);
        assert_int_equal(read_in_step(&w, 4), 0);
        assert_true(stats_of(&w).ram_bytes + stats_of(&w).resident_bytes >= all_bytes());
        file_world_close(&w);
    }
}

/* How fast the page cache is, and how long a busy machine took, is not what plans are judged by here. */
static void plan_for_a_slow_disk(sth_runtime *rt) {
    sthi_lock(&rt->lock);
    for (uint32_t t = 0; t < rt->order.count; t++) rt->order.uses[t].compute_ns = 1000, rt->order.uses[t].gap_ns = 0;
    rt->reads.rate = 1e8;
    assert_ok(sthi_geometry_install(rt));
    sthi_unlock(&rt->lock);
}

/* The plan keeps on the device what would have to be read, not what is in RAM. */
static void residents_are_what_would_be_read(void **state) {
    file_world w;
    setting s = {2, 4, false, 90000, NULL, all_bytes() / 3};
    assert_ok(file_world_open(&w, *state, &s));
    good_steps(&w, 9);
    plan_for_a_slow_disk(w.runtime);
    uint64_t wasted = 0;
    for (uint32_t u = 0; u < UNITS; u++)
        if (w.runtime->units[u].kept.image && w.runtime->units[u].resident) wasted += w.runtime->units[u].bytes;
    sth_prediction p;
    assert_ok(sthi_runtime_prediction(w.runtime, &p));
    assert_int_equal(wasted, 0);
    assert_true(p.disk_bytes_per_step > 0 && p.disk_bytes_per_step < p.bytes_per_step);
    assert_true(p.disk_ns > 0);
    good_steps(&w, 2);
    file_world_close(&w);
}

static void reads_that_fail_leave_no_half_image(void **state) {
    for (uint32_t readers = 0; readers < 3; readers++)
        for (uint64_t n = 1; n < 100; n += 1 + n / 2) {
            file_world w;
            setting s = {readers, 3, false, 60000, NULL, all_bytes() / 2};
            uint32_t bad;
            assert_ok(file_world_open(&w, *state, &s));
            sthi_fault_arm(STHI_FAULT_READ, n, true);
            for (int i = 0; i < 2; i++) (void)file_step(&w, &bad);
            sthi_fault_disarm_all();
            good_steps(&w, 3);
            file_world_close(&w);
        }
}

/* What is in RAM stays what it was; what must be read again is refused. */
static void a_file_that_changes_later_stops_what_is_read(void **state) {
    file_world w;
    char path[512];
    uint32_t bad;
    setting s = {2, 4, false, 60000, NULL, all_bytes() / 2};
    write_model(*state, 0, path, sizeof path);
    assert_ok(file_world_open(&w, *state, &s));
    good_steps(&w, 3);
    write_bytes(path, "rewritten", 9);
    sth_status rc = STH_OK;
    for (int i = 0; i < 2 && rc == STH_OK; i++) rc = file_step(&w, &bad);
    assert_int_equal(rc, STH_CHANGED_DATA);
    for (uint32_t u = 0; u < UNITS; u++)
        if (w.runtime->units[u].in_ram) assert_int_equal(bad >> u & 1, 0);
    file_world_close(&w);
}

static void no_memory_keeps_fewer(void **state) {
    for (uint64_t n = 1; n < 400; n += 1 + n / 4) {
        file_world w;
        setting s = {0, 3, true, 60000, NULL, all_bytes() / 2};
        sthi_fault_arm(STHI_FAULT_ALLOC, n, true);
        sth_status rc = file_world_open(&w, *state, &s);
        sthi_fault_disarm_all();
        if (rc != STH_OK) continue;
        good_steps(&w, 3);
        file_world_close(&w);
    }
}

static void a_budget_that_changes_keeps_the_share(void **state) {
    file_world w;
    setting s = {2, 4, false, 120000, NULL, all_bytes() / 3};
    assert_ok(file_world_open(&w, *state, &s));
    good_steps(&w, 3);
    uint64_t kept = stats_of(&w).ram_bytes;
    for (uint64_t budget = 50000; budget <= 110000; budget += 30000) {
        assert_ok(sthi_runtime_set_budget(w.runtime, budget));
        good_steps(&w, 2);
        assert_int_equal(stats_of(&w).ram_bytes, kept);
    }
    file_world_close(&w);
}

static void nothing_stays_behind(void **state) {
    long live = sthi_alloc_live();
    int descriptors = open_descriptors();
    for (uint32_t readers = 0; readers < 3; readers++)
        for (int steps = 0; steps < 3; steps++) {
            file_world w;
            setting s = {readers, 2, false, 60000, NULL, all_bytes() / 2};
            assert_ok(file_world_open(&w, *state, &s));
            good_steps(&w, steps);
            file_world_close(&w); /* with reads and copies under way */
        }
    assert_int_equal(sthi_alloc_live(), live);
    assert_int_equal(open_descriptors(), descriptors);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, temp_setup, temp_teardown)
    const struct CMUnitTest tests[] = {
        CASE(half_in_ram_is_not_read_again),
        CASE(what_is_all_in_ram_is_read_once),
        CASE(residents_are_what_would_be_read),
        CASE(reads_that_fail_leave_no_half_image),
        CASE(a_file_that_changes_later_stops_what_is_read),
        CASE(no_memory_keeps_fewer),
        CASE(a_budget_that_changes_keeps_the_share),
        CASE(nothing_stays_behind),
    };
    return cmocka_run_group_tests_name("keep", tests, NULL, NULL);
}
