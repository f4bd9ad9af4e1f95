/* That the stand-in sees what it is for: each case makes one mistake through the back end and finds the complaint, and
 * one does the same thing right and finds none. Run with the back end's name. */
#include <string.h>

#include "base/memory.h"
#include "device/device.h"
#include "device/stand_in.h"
#include "support/check.h"

enum { ROOM = 1 << 16 };
static const char *backend;
static const fake_controls *fake;
static unsigned char *host, *back; /* both registered */

typedef struct rig {
    sth_device *d;
    const sth_backend_ops *o;
    sth_stream a, b;
    sth_event *e;
    sth_devptr p;
} rig;

static rig set_up(unsigned late_us) {
    rig r = {0};
    sth_devptr alias;
    fake->reset();
    fake->schedule(12345, late_us);
    assert_ok(sth_device_open(backend, NULL, &r.d));
    r.o = r.d->ops;
    assert_ok(r.o->stream_create(r.d->self, 0, &r.a));
    assert_ok(r.o->stream_create(r.d->self, 0, &r.b));
    assert_ok(r.o->event_create(r.d->self, false, &r.e));
    assert_ok(r.o->alloc(r.d->self, ROOM, &r.p));
    assert_ok(r.o->host_register(r.d->self, host, ROOM, &alias));
    assert_ok(r.o->host_register(r.d->self, back, ROOM, &alias));
    for (int i = 0; i < ROOM; i++) host[i] = (unsigned char)(i * 3 + i / 256);
    memset(back, 0, ROOM);
    return r;
}

static void tear_down(rig *r) {
    r->o->stream_destroy(r->d->self, r->a);
    r->o->stream_destroy(r->d->self, r->b);
    r->o->event_destroy(r->d->self, r->e);
    r->o->free(r->d->self, r->p, ROOM);
    r->o->host_unregister(r->d->self, host, ROOM);
    r->o->host_unregister(r->d->self, back, ROOM);
    sth_device_close(r->d);
    fake->schedule(0, 0);
    assert_int_equal(fake->live(), 0);
}

static void expect_complaint(const char *must_say) {
    char text[256] = "";
    if (!must_say) {
        if (fake->complaints(text, sizeof text)) fail_msg("%s", text);
        return;
    }
    assert_true(fake->complaints(text, sizeof text) > 0);
    if (!strstr(text, must_say)) fail_msg("%s", text);
}

static void ordered_work_is_fine(void **state) {
    (void)state;
    rig r = set_up(200);
    for (int lap = 0; lap < 20; lap++) {
        assert_ok(r.o->copy_h2d(r.d->self, r.p, host + lap, ROOM - 100, r.a));
        assert_ok(r.o->event_record(r.d->self, r.e, r.a));
        assert_ok(r.o->stream_wait(r.d->self, r.b, r.e));
        assert_ok(r.o->copy_d2h(r.d->self, back, r.p, ROOM - 100, r.b));
        if (lap % 2) assert_ok(r.o->stream_synchronize(r.d->self, r.b));
        if (lap % 2) assert_memory_equal(back, host + lap, ROOM - 100);
        assert_ok(r.o->event_record(r.d->self, r.e, r.b));
        assert_ok(r.o->stream_wait(r.d->self, r.a, r.e));
    }
    assert_ok(r.o->stream_synchronize(r.d->self, r.a));
    tear_down(&r);
    expect_complaint(NULL);
}

static void nothing_runs_before_it_must(void **state) {
    (void)state;
    rig r = set_up(100000); /* up to a second, if nobody asks for it */
    bool done, late = false;
    for (int i = 0; i < 10; i++) { /* some come at once */
        assert_ok(r.o->copy_h2d(r.d->self, r.p, host, ROOM, r.a));
        assert_ok(r.o->copy_d2h(r.d->self, back, r.p, ROOM, r.a));
        assert_ok(r.o->event_record(r.d->self, r.e, r.a));
        assert_ok(r.o->event_query(r.d->self, r.e, &done));
        late |= !done && back[1] == 0;
    }
    assert_true(late);
    assert_ok(r.o->stream_wait(r.d->self, r.b, r.e));
    assert_ok(r.o->stream_synchronize(r.d->self, r.b)); /* asks for the other stream's work, too */
    assert_memory_equal(back, host, ROOM);
    tear_down(&r);
    expect_complaint(NULL);
}

static void a_copy_beside_another_stream_is_seen(void **state) {
    (void)state;
    rig r = set_up(0);
    assert_ok(r.o->copy_h2d(r.d->self, r.p, host, ROOM, r.a));
    assert_ok(r.o->copy_d2h(r.d->self, back, r.p + 1000, 100, r.b)); /* it may well be done: that is no order */
    expect_complaint("reads 100 bytes of device memory");
    tear_down(&r);
    r = set_up(0);
    assert_ok(r.o->copy_d2h(r.d->self, back, r.p, ROOM, r.a));
    assert_ok(r.o->copy_h2d(r.d->self, r.p + ROOM - 1, host, 1, r.b));
    expect_complaint("writes 1 bytes of device memory");
    tear_down(&r);
    r = set_up(0);
    assert_ok(r.o->copy_h2d(r.d->self, r.p, host, 4096, r.a)); /* two readers, and bytes beside each other */
    assert_ok(r.o->copy_h2d(r.d->self, r.p + 4096, host, 4096, r.b));
    expect_complaint(NULL);
    assert_ok(r.o->copy_d2h(r.d->self, host, r.p + 4096, 10, r.b));
    expect_complaint("writes 10 bytes of host memory");
    tear_down(&r);
}

static void an_event_recorded_too_early_is_seen(void **state) {
    (void)state;
    rig r = set_up(0);
    assert_ok(r.o->event_record(r.d->self, r.e, r.a));
    assert_ok(r.o->copy_h2d(r.d->self, r.p, host, ROOM, r.a));
    assert_ok(r.o->stream_wait(r.d->self, r.b, r.e));
    assert_ok(r.o->copy_d2h(r.d->self, back, r.p, ROOM, r.b));
    expect_complaint("without an event between");
    tear_down(&r);
}

static void both_names_of_a_ring_are_one_memory(void **state) {
    (void)state;
    rig r = set_up(0);
    sth_devptr ring;
    uint64_t n = r.o->ring_granularity(r.d->self);
    assert_ok(r.o->ring_alloc(r.d->self, n, &ring));
    assert_ok(r.o->copy_h2d(r.d->self, ring + n - 10, host, 20, r.a));
    assert_ok(r.o->copy_d2h(r.d->self, back, ring + 10, 10, r.b));
    expect_complaint(NULL);
    assert_ok(r.o->copy_d2h(r.d->self, back, ring + 9, 1, r.b));
    expect_complaint("reads 1 bytes");
    r.o->ring_free(r.d->self, ring, n);
    tear_down(&r);
}

/* The driver's name of what was called before: by the one vendor's or the other's. */
static const char *function(const char *cuda, const char *hip) {
    const char *name;
    for (int i = 0; (name = fake->function(i)); i++)
        if (!strcmp(name, cuda) || !strcmp(name, hip)) return name;
    fail_msg("neither %s nor %s was called", cuda, hip);
    return NULL;
}

static void memory_that_goes_under_work_is_seen(void **state) {
    (void)state;
    rig r = set_up(50000);
    fake->plan(&(fake_plan){.function = function("cuCtxSynchronize", "hipDeviceSynchronize"), .nth = 1,
                            .forever = true, .code = 999});
    sth_devptr alias, gone;
    for (int i = 0; i < 8; i++) assert_ok(r.o->copy_h2d(r.d->self, r.p, host, ROOM, r.a));
    r.o->host_unregister(r.d->self, host, ROOM);
    expect_complaint("registered host memory goes while");
    fake->plan(NULL);
    assert_ok(r.o->host_register(r.d->self, host, ROOM, &alias));
    tear_down(&r);
    r = set_up(0);
    assert_status(r.o->copy_h2d(r.d->self, r.p + ROOM - 10, host, 20, r.a), STH_INVALID_ARGUMENT); /* past its end */
    expect_complaint("not there");
    assert_ok(r.o->alloc(r.d->self, ROOM, &gone));
    r.o->free(r.d->self, gone, ROOM);
    assert_status(r.o->copy_h2d(r.d->self, gone, host, 20, r.a), STH_INVALID_ARGUMENT);
    expect_complaint("not there");
    tear_down(&r);
}

/* What a plan does, by name, once, for ever, and where the call was to end something. */
static void calls_fail_as_planned(void **state) {
    (void)state;
    rig r = set_up(0);
    sth_devptr p;
    assert_ok(r.o->copy_h2d(r.d->self, r.p, host, 1, r.a));
    assert_ok(r.o->alloc(r.d->self, ROOM, &p));
    r.o->free(r.d->self, p, ROOM);
    const char *copies = function("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync");
    const char *free_memory = function("cuMemFree_v2", "hipFree");

    fake->plan(&(fake_plan){.function = copies, .nth = 2, .code = 999});
    for (int i = 1; i <= 4; i++) assert_int_equal(r.o->copy_h2d(r.d->self, r.p, host, 1, r.a) != STH_OK, i == 2);
    assert_int_equal(sth_last_error()->native_code, 999);
    assert_int_equal(fake->calls(copies), 4);
    fake->plan(&(fake_plan){.function = copies, .nth = 2, .forever = true, .code = 999});
    for (int i = 1; i <= 4; i++) assert_int_equal(r.o->copy_h2d(r.d->self, r.p, host, 1, r.a) != STH_OK, i >= 2);
    fake->plan(NULL);
    assert_ok(r.o->copy_h2d(r.d->self, r.p, host, 1, r.a));

    long live = fake->live();
    for (int anyway = 0; anyway < 2; anyway++) {
        assert_ok(r.o->alloc(r.d->self, ROOM, &p));
        fake->plan(&(fake_plan){.function = free_memory, .nth = 1, .code = 999, .ends_anyway = anyway});
        r.o->free(r.d->self, p, ROOM);
        assert_int_equal(sth_last_error()->native_code, 999);
        fake->plan(NULL);
        assert_int_equal(fake->live(), live + !anyway);
        if (!anyway) r.o->free(r.d->self, p, ROOM);
    }
    tear_down(&r);
    expect_complaint(NULL);
}

static void a_dead_card_runs_nothing_and_nobody_hangs(void **state) {
    (void)state;
    rig r = set_up(100000);
    for (int i = 0; i < 4; i++) assert_ok(r.o->copy_h2d(r.d->self, r.p, host, ROOM, r.a));
    fake->plan(&(fake_plan){.nth = 1, .forever = true, .code = 999});
    assert_status(r.o->stream_synchronize(r.d->self, r.a), STH_DEVICE_ERROR);
    fake->plan(NULL);
    assert_ok(r.o->stream_synchronize(r.d->self, r.a));
    tear_down(&r);
}

int main(int argc, char **argv) {
    if (argc < 2 || !(fake = stand_in_of(backend = argv[1]))) {
        fprintf(stderr, "give a back end, and its stand-in in the environment\n");
        return 1;
    }
    host = sthi_pages_map(ROOM, 0);
    back = sthi_pages_map(ROOM, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ordered_work_is_fine),
        cmocka_unit_test(nothing_runs_before_it_must),
        cmocka_unit_test(a_copy_beside_another_stream_is_seen),
        cmocka_unit_test(an_event_recorded_too_early_is_seen),
        cmocka_unit_test(both_names_of_a_ring_are_one_memory),
        cmocka_unit_test(memory_that_goes_under_work_is_seen),
        cmocka_unit_test(calls_fail_as_planned),
        cmocka_unit_test(a_dead_card_runs_nothing_and_nobody_hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
