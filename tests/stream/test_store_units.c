/* Units that stream from a store: every use sees the layers' bytes, also when the store fails now and then. */
#include "support/check.h"

#include <string.h>

#include "base/fault.h"
#include "stagehand/stagehand.h"
#include "store/own_store.h"
#include "state/state.h"

typedef struct store_world {
    own_store own;
    sth_store *store;
    sth_device *device;
    sth_runtime *runtime;
} store_world;

static uint64_t up(uint64_t n) { return (n + 511) / 512 * 512; }
enum { PLACE = 2 * (1024 + 512) }; /* two layers of two tensors */

static void add_units(store_world *w) {
    for (uint32_t first = 0; first < OWN_MOST; first += 2) {
        sth_file_range r[4];
        for (uint32_t k = 0; k < 4; k++) {
            const sth_store_tensor *t = &sth_store_layer_at(w->store, first + k / 2)->tensors[k % 2];
            r[k] = (sth_file_range){first + k / 2, t->offset, t->bytes,
                                    k ? r[k - 1].place_offset + up(r[k - 1].bytes) : 0};
        }
        uint32_t unit;
        sth_unit_desc d = {.name = w->own.names[first], .bytes = PLACE, .ranges = r, .range_count = 4,
                           .store = w->store};
        assert_ok(sth_runtime_add_unit(w->runtime, &d, &unit));
        r[3].bytes = OWN_LAYER;
        assert_int_equal(sth_runtime_add_unit(w->runtime, &d, &unit), STH_INVALID_ARGUMENT);
        r[3] = (sth_file_range){OWN_MOST, 0, 1, 0};
        assert_int_equal(sth_runtime_add_unit(w->runtime, &d, &unit), STH_INVALID_ARGUMENT);
    }
}

static void open_world(store_world *w, int with_read, uint32_t readers, bool virtual_time, uint64_t ram) {
    memset(w, 0, sizeof *w);
    own_store_init(&w->own, OWN_MOST);
    sth_store_ops ops = own_store_ops(with_read);
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.virtual_time = virtual_time;
    sim.link_bytes_per_s = 1000000000;
    sth_runtime_options o;
    sth_runtime_options_init(&o);
    o.budget = 2 * PLACE;
    o.chunk_bytes = 512;
    o.staging_bytes = 8 * 512;
    o.reader_threads = readers;
    o.ram_budget = ram;
    o.link_bytes_per_s = 1e9;
    assert_ok(sth_store_create(&ops, &w->own, &w->store));
    assert_ok(sth_device_open("sim", &sim, &w->device));
    assert_ok(sth_runtime_create(w->device, &o, &w->runtime));
    add_units(w);
    assert_ok(sth_runtime_seal(w->runtime));
}

static void close_world(store_world *w) {
    sth_runtime_destroy(w->runtime);
    sth_device_close(w->device);
    sth_store_close(w->store);
    assert_int_equal(w->own.held, 0);
    assert_int_equal(w->own.overlaps, 0);
    assert_int_equal(w->own.closed, 1);
}

static bool right(uint32_t unit, const unsigned char *p) {
    for (uint32_t k = 0; k < 2; k++, p += 1024 + 512) {
        for (uint64_t i = 0; i < OWN_A; i++)
            if (p[i] != own_byte(2 * unit + k, i)) return false;
        for (uint64_t i = 0; i < OWN_B; i++)
            if (p[1024 + i] != own_byte(2 * unit + k, OWN_A + 40 + i)) return false;
    }
    return true;
}

static sth_status step(store_world *w) {
    sth_status first = sth_step_begin(w->runtime);
    for (uint32_t unit = 0; unit < OWN_MOST / 2; unit++) {
        sth_lease lease;
        sth_status rc = sth_unit_acquire(w->runtime, unit, 0, &lease);
        if (first == STH_OK) first = rc;
        if (rc != STH_OK) continue;
        assert_true(right(unit, (const unsigned char *)(uintptr_t)lease.address));
        assert_ok(sth_sim_compute(w->device, 0, 20000));
        sth_lease_release(w->runtime, &lease);
    }
    sth_status rc = sth_step_end(w->runtime);
    return first == STH_OK ? rc : first;
}

static void every_use_sees_the_stores_bytes(void **state) {
    (void)state;
    for (int with_read = 0; with_read < 2; with_read++)
        for (uint32_t readers = 0; readers < 4; readers++)
            for (int way = 0; way < 4; way++) {
                store_world w;
                open_world(&w, with_read, readers, way % 2, way / 2 ? 3 * PLACE : 0);
                for (int i = 0; i < 5; i++) assert_ok(step(&w));
                bool equal = false;
                assert_ok(sth_unit_verify(w.runtime, 3, &equal, NULL));
                assert_true(equal);
                int asked = 0;
                for (int i = 0; i < OWN_MOST; i++) asked += w.own.requests[i];
                assert_true(with_read ? !asked && w.own.reads > 0 : asked > 0);
                assert_true(w.own.held_most <= STH_STORE_HELD);
                close_world(&w);
            }
}

static void a_store_that_fails_says_so_and_serves_again(void **state) {
    (void)state;
    for (int fails = OWN_FAILS_REQUEST; fails <= OWN_GIVES_NULL; fails++)
        for (uint32_t readers = 0; readers < 3; readers++) {
            store_world w;
            open_world(&w, fails == OWN_FAILS_WAIT && readers == 1, readers, false, 0);
            assert_ok(step(&w));
            w.own.fails = fails;
            sth_status rc = STH_OK;
            for (int i = 0; i < 3 && rc == STH_OK; i++) rc = step(&w);
            assert_int_equal(rc, fails == OWN_GIVES_NULL ? STH_INTERNAL : STH_IO);
            w.own.fails = 0;
            for (int i = 0; i < 2; i++) assert_ok(step(&w));
            close_world(&w);
        }
}

static void the_failure_names_unit_and_layer(void **state) {
    (void)state;
    store_world w;
    open_world(&w, 0, 0, true, 0);
    w.own.fails = OWN_FAILS_WAIT;
    sth_lease lease;
    assert_int_equal(sth_unit_acquire(w.runtime, 2, 0, &lease), STH_IO);
    assert_string_equal(sth_last_error()->message, "unit 'own.4', layer 'own.4': the line broke");
    w.own.fails = 0;
    close_world(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_use_sees_the_stores_bytes),
        cmocka_unit_test(a_store_that_fails_says_so_and_serves_again),
        cmocka_unit_test(the_failure_names_unit_and_layer),
    };
    return cmocka_run_group_tests_name("store units", tests, NULL, NULL);
}
