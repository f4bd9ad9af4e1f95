/* The host runs ahead of the device: what it writes into host images behind a pass is not in that pass. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "load/slots.h"
#include "runtime/lease.h"
#include "runtime/step_calls.h"
#include "stream/world.h"

enum { UNITS = 6, PASSES = 6 };
static const uint64_t SIZES[UNITS] = {40960, 12288, 65536, 8192, 40960, 24576};

static void ok(sth_status rc) {
    if (rc != STH_OK) fail_msg("%s: %s", sth_status_name(rc), sth_last_error()->message);
}

/* A use whose work copies the place, when its stream comes to it. */
static void use(world *w, uint32_t unit, sth_stream stream, uint8_t *saw) {
    const sth_backend_ops *ops = w->device->ops;
    sth_lease lease;
    ok(sthi_unit_acquire(w->runtime, unit, stream, &lease));
    ok(ops->copy_d2h(w->device->self, saw, lease.address, SIZES[unit], stream));
    sthi_lease_release(w->runtime, &lease);
}

typedef enum end { PASS_END, PAUSE, STEP_END, FORWARD_AND_BACKWARD } end;

/* Each pass sees the version that was there when it was called. */
static void passes(end how, uint64_t budget, uint32_t flags) {
    static uint8_t saw[2][UNITS][65536];
    world w;
    world_spec spec = world_default(UNITS, SIZES, budget);
    spec.flags = flags;
    spec.read_only = false;
    spec.link = 1000 * 1000 * 1000;
    ok(world_open(&w, &spec));
    sth_stream stream;
    ok(w.device->ops->stream_create(w.device->self, 0, &stream));
    for (uint8_t version = 0; version < PASSES; version++) {
        ok(sthi_step_begin(w.runtime));
        for (uint32_t i = 0; i < UNITS; i++) use(&w, i, stream, saw[0][i]);
        if (how == PASS_END || how == FORWARD_AND_BACKWARD) ok(sthi_pass_end(w.runtime));
        if (how == PAUSE) ok(sthi_step_pause(w.runtime));
        if (how == STEP_END) ok(sthi_step_end(w.runtime));
        for (uint32_t i = 0; i < UNITS; i++) {
            world_fill(&w, i, version + 1);
            ok(sthi_unit_mark_written(w.runtime, i));
        }
        for (uint32_t i = UNITS; how == FORWARD_AND_BACKWARD && i-- > 0;) use(&w, i, stream, saw[1][i]);
        if (how != STEP_END) ok(sthi_step_end(w.runtime));
        ok(w.device->ops->stream_synchronize(w.device->self, stream));
        for (uint32_t i = 0; i < UNITS; i++) {
            if (!world_shows(&w, i, version, saw[0][i])) fail_msg("pass %u saw another unit %u", version, i);
            if (how == FORWARD_AND_BACKWARD && !world_shows(&w, i, version + 1, saw[1][i]))
                fail_msg("backward %u saw another unit %u", version, i);
        }
    }
    w.device->ops->stream_destroy(w.device->self, stream);
    world_close(&w);
}

static void test_a_pass_reads_what_was_there_when_it_was_called(void **state) {
    (void)state;
    for (end how = PASS_END; how <= FORWARD_AND_BACKWARD; how++)
        for (uint64_t budget = 110000; budget < 300000; budget += 45000) {
            passes(how, budget, STH_UNIT_WATCHED);
            passes(how, budget, STH_UNIT_WRITABLE);
        }
}

/* The next pass has loads under way when this one ends. */
static void test_copies_for_uses_to_come_are_not_waited_for(void **state) {
    (void)state;
    world w;
    world_spec spec = world_default(UNITS, SIZES, 120000);
    spec.flags = STH_UNIT_WATCHED;
    spec.read_only = false;
    spec.link = 1000 * 1000;
    ok(world_open(&w, &spec));
    uint32_t under_way = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        ok(sthi_step_begin(w.runtime));
        for (uint32_t i = 0; i < UNITS; i++) ok(world_use(&w, i, 1000));
        ok(sthi_step_end(w.runtime));
        for (uint32_t i = 0; i < UNITS; i++) {
            int32_t slot = w.runtime->units[i].slot;
            under_way += slot != STHI_NO_SLOT && !sthi_slot_arrived(w.runtime, slot);
        }
    }
    assert_true(under_way > 0);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_pass_reads_what_was_there_when_it_was_called),
        cmocka_unit_test(test_copies_for_uses_to_come_are_not_waited_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
