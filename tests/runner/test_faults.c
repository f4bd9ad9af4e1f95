/* Fault loops over a runner: the n-th allocation, read, thread, device allocation or device call fails, once or from
 * then on, while a model is opened, run, adapted and run with another shape. Each failure has a status that fits;
 * nothing hangs or leaks; what a run that succeeds gives is right; and when the fault is over runs are right again. */
#include "support/check.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "runner/rig.h"
#include "store/tempfiles.h"

enum { SECONDS = 100, BYTES = RIG_ROWS * 24 * 4 };

static uint8_t want[2][BYTES]; /* without and with the adapter */
static float ab[2 * 40];

static bool fits(sthi_fault_kind kind, sth_status rc) {
    switch (kind) {
    case STHI_FAULT_ALLOC: return rc == STH_OUT_OF_HOST_MEMORY;
    case STHI_FAULT_READ: return rc == STH_IO;
    case STHI_FAULT_THREAD: return rc == STH_OUT_OF_HOST_MEMORY;
    case STHI_FAULT_DEVICE_ALLOC: return rc == STH_OUT_OF_DEVICE_MEMORY || rc == STH_BUDGET_TOO_SMALL;
    default: return rc == STH_DEVICE_ERROR || rc == STH_BUDGET_TOO_SMALL;
    }
}

static void expect(sthi_fault_kind kind, uint64_t n, sth_status rc, const char *what) {
    if (rc == STH_OK || fits(kind, rc)) return;
    fail_msg("kind %d, n = %llu: %s: %s: %s", (int)kind, (unsigned long long)n, what, sth_status_name(rc),
             sth_last_error()->message);
}

static sth_status adapt(rig *g) {
    return sth_runner_add_adapter(g->runner, "blocks.2", "2.weight", STH_DTYPE_F32, 1, ab, ab + 40, 2);
}

static sth_status run_one_row(rig *g) {
    sth_activations in = {1, {{STH_DTYPE_F32, 2, {1, 24}, g->in, 0}}}, out = {1, {{.address = g->out, .bytes = 96}}};
    return sth_runner_run(g->runner, &in, &out, 0);
}

static void run_from_host(rig *g, sthi_fault_kind kind, uint64_t n, bool adapted) {
    uint8_t x[BYTES], got[BYTES];
    memcpy(x, (const void *)(uintptr_t)g->in, BYTES);
    sth_activations in = {1, {{STH_DTYPE_F32, 2, {RIG_ROWS, 24}, (uintptr_t)x, 0}}};
    sth_activations out = {1, {{.address = (uintptr_t)got, .bytes = BYTES}}};
    sth_status rc = sth_runner_run_host(g->runner, &in, &out);
    expect(kind, n, rc, "run from host memory");
    if (rc == STH_OK) assert_memory_equal(got, want[adapted], BYTES);
}

static void run(rig *g, sthi_fault_kind kind, uint64_t n, bool adapted, const char *what) {
    uint8_t got[BYTES];
    sth_status rc = rig_run(g, got);
    expect(kind, n, rc, what);
    if (rc == STH_OK) assert_memory_equal(got, want[adapted], BYTES);
}

/* True when the fault was met. */
static bool play(const rig_spec *s, sthi_fault_kind kind, uint64_t n, bool forever) {
    rig g;
    long live = sthi_alloc_live();
    sthi_fault_arm(kind, n, forever);
    sth_status rc = rig_open(&g, s), adapted = STH_OK;
    expect(kind, n, rc, "open");
    if (rc == STH_OK) {
        run(&g, kind, n, false, "first run");
        expect(kind, n, run_one_row(&g), "one row");
        adapted = adapt(&g);
        expect(kind, n, adapted, "adapter");
        run(&g, kind, n, adapted == STH_OK, "run with adapter");
        run_from_host(&g, kind, n, adapted == STH_OK);
        sth_run_metrics m;
        (void)sth_runner_metrics(g.runner, &m);
    }
    bool met = sthi_fault_seen(kind) >= n;
    if (rc == STH_OK && n % 3) { /* else it ends while calls still fail */
        sthi_fault_disarm_all();
        uint8_t got[BYTES];
        if (adapted != STH_OK) assert_ok(adapt(&g));
        for (int i = 0; i < 2; i++) {
            assert_ok(rig_run(&g, got));
            assert_memory_equal(got, want[1], BYTES);
        }
    }
    if (rc == STH_OK) rig_close(&g);
    sthi_fault_disarm_all();
    if (sthi_alloc_live() != live)
        fail_msg("kind %d, n = %llu%s: %ld blocks leaked", (int)kind, (unsigned long long)n, forever ? " and on" : "",
                 sthi_alloc_live() - live);
    return met;
}

static void loop(const rig_spec *s, sthi_fault_kind kind, uint64_t most) {
    for (int forever = 0; forever < 2; forever++) {
        alarm(SECONDS);
        uint64_t n = 1;
        while (play(s, kind, n, forever) && n < most) n += 1 + n / 20;
        alarm(0);
        assert_true(n > 1);
    }
}

static rig_spec scenario(void *folder, rig_source source, uint32_t lookahead, uint32_t readers) {
    rig_spec s = rig_default();
    s.source = source;
    s.folder = folder;
    s.lookahead = lookahead;
    s.readers = readers;
    s.layers = 4;
    s.group = lookahead ? 2 : 1;
    s.budget = lookahead ? 64 << 10 : 40 << 10;
    return s;
}

static void what_is_right(void *folder) {
    rig g;
    rig_spec s = scenario(folder, RIG_MEMORY, 0, 0);
    for (int i = 0; i < 80; i++) ab[i] = rig_value(77, (uint64_t)i);
    assert_ok(rig_open(&g, &s));
    assert_ok(rig_run(&g, want[0]));
    assert_ok(adapt(&g));
    assert_ok(rig_run(&g, want[1]));
    assert_memory_not_equal(want[0], want[1], BYTES);
    rig_close(&g);
}

static void any_allocation(void **state) {
    what_is_right(*state);
    for (int source = RIG_FILE; source <= RIG_OWN; source++) {
        rig_spec s = scenario(*state, source, source == RIG_OWN ? 2 : 0, 0);
        loop(&s, STHI_FAULT_ALLOC, UINT64_MAX);
    }
}

static void any_read_and_thread(void **state) {
    what_is_right(*state);
    rig_spec s = scenario(*state, RIG_FILE, 0, 0);
    loop(&s, STHI_FAULT_READ, UINT64_MAX);
    s.readers = 2;
    s.virtual_time = false;
    loop(&s, STHI_FAULT_READ, 60);
    loop(&s, STHI_FAULT_THREAD, UINT64_MAX);
}

static void any_device_allocation(void **state) {
    what_is_right(*state);
    for (uint32_t lookahead = 0; lookahead < 3; lookahead += 2) {
        rig_spec s = scenario(*state, RIG_MEMORY, lookahead, 0);
        loop(&s, STHI_FAULT_DEVICE_ALLOC, UINT64_MAX);
    }
}

static void any_device_call(void **state) {
    what_is_right(*state);
    for (uint32_t lookahead = 0; lookahead < 3; lookahead += 2) {
        rig_spec s = scenario(*state, lookahead ? RIG_OWN : RIG_FILE, lookahead, 0);
        loop(&s, STHI_FAULT_DEVICE_CALL, UINT64_MAX);
    }
    rig_spec s = scenario(*state, RIG_OWN, 0, 2); /* beside readers the n-th call is another one each time */
    s.virtual_time = false;
    loop(&s, STHI_FAULT_DEVICE_CALL, 200);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(any_allocation, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(any_read_and_thread, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(any_device_allocation, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(any_device_call, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests_name("runner faults", tests, NULL, NULL);
}
