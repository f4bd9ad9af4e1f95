/* Rows: bytes of every slot that a call may read, order behind other calls, writes, calls that fail, threads. The link
 * is slow, so that a byte that is looked at too early is another one. */
#include <string.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/random.h"
#include "device/device.h"
#include "rows_calls.h"
#include "stagehand/rows.h"
#include "support/check.h"

enum { TABLES = 3, ROWS = 8, PARTS = 2, LINK = 100 * 1000 * 1000 };
static const uint64_t part_bytes[PARTS] = {4096, 777};

typedef struct world {
    sth_device *device;
    sth_rows *rows;
    uint32_t slots;
    uint8_t *host[TABLES][PARTS];
    sth_devptr pool[PARTS];
} world;

static void fill(uint8_t *p, uint64_t bytes, unsigned seed) {
    for (uint64_t i = 0; i < bytes; i++) p[i] = (uint8_t)sthi_random64(seed, i);
}

static void begin(world *w, bool virtual_time, uint32_t slots, bool read_only) {
    sth_sim_options o;
    sthi_sim_options_init(&o);
    o.virtual_time = virtual_time;
    o.link_bytes_per_s = LINK;
    assert_ok(sthi_device_open("sim", &o, &w->device));
    sth_rows_options options;
    sth_rows_options_init(&options);
    options.part_count = PARTS;
    memcpy(options.part_bytes, part_bytes, sizeof part_bytes);
    options.read_only = read_only;
    assert_ok(sth_rows_create(w->device, &options, &w->rows));
    for (unsigned t = 0; t < TABLES; t++) {
        const void *parts[PARTS];
        uint32_t table;
        for (unsigned p = 0; p < PARTS; p++) {
            parts[p] = w->host[t][p] = sthi_alloc(ROWS * part_bytes[p]);
            fill(w->host[t][p], ROWS * part_bytes[p], 10 * t + p);
        }
        assert_ok(sth_rows_add_table(w->rows, "table", ROWS, parts, &table));
        assert_int_equal(table, t);
    }
    w->slots = slots;
    for (unsigned p = 0; p < PARTS; p++) assert_ok(sth_device_alloc(w->device, slots * part_bytes[p], &w->pool[p]));
    assert_ok(sth_rows_open(w->rows, slots, w->pool, 0));
}

static void end(world *w) {
    sth_rows_destroy(w->rows);
    for (unsigned p = 0; p < PARTS; p++) sth_device_free(w->device, w->pool[p], w->slots * part_bytes[p]);
    for (unsigned t = 0; t < TABLES; t++)
        for (unsigned p = 0; p < PARTS; p++) sthi_free(w->host[t][p]);
    sth_device_close(w->device);
}

static sth_rows_stats stats(const world *w) {
    sth_rows_stats s;
    assert_ok(sth_rows_stats_get(w->rows, &s));
    return s;
}

static const uint8_t *in_slot(const world *w, const sth_rows_lease *lease, unsigned p, int64_t slot) {
    return (const uint8_t *)(uintptr_t)(w->pool[p] + (lease->first + (uint64_t)slot) * part_bytes[p]);
}

static void assert_there(const world *w, const sth_rows_lease *lease, const int64_t *ids, const int64_t *slots,
                         uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        for (unsigned p = 0; p < PARTS; p++)
            if (memcmp(in_slot(w, lease, p, slots[i]), w->host[lease->table][p] + (uint64_t)ids[i] * part_bytes[p],
                       part_bytes[p]))
                fail_msg("row %d of table %u is not in its slot", (int)ids[i], lease->table);
}

/* A call on the calling thread. */
static void call(const world *w, uint32_t table, const int64_t *ids, uint32_t count) {
    int64_t slots[64];
    sth_rows_lease lease;
    assert_ok(sth_rows_acquire(w->rows, table, ids, 8, count, count, 0, slots, &lease));
    assert_there(w, &lease, ids, slots, count);
    assert_ok(sth_rows_release(w->rows, &lease, 0));
}

static void rows_are_in_their_slots_when_the_stream_has_waited(void **state) {
    (void)state;
    world w;
    begin(&w, false, 5, false);
    call(&w, 0, (int64_t[]){6, 1, 6}, 3);
    call(&w, 1, (int64_t[]){1, 2, 3}, 3);
    call(&w, 0, (int64_t[]){1, 7}, 2);
    sth_rows_stats s = stats(&w);
    assert_int_equal(s.asked, 7);
    assert_int_equal(s.hits, 1);
    assert_int_equal(s.brought, 6);
    assert_int_equal(s.row_bytes, 4096 + 777);
    assert_int_equal(s.h2d_bytes, 6 * (4096 + 777));
    sth_rows_table_stats t;
    assert_ok(sth_rows_table_stats_get(w.rows, 1, &t));
    assert_int_equal(t.brought, 3);
    assert_status(sth_rows_table_stats_get(w.rows, 3, &t), STH_NOT_FOUND);
    end(&w);
}

static void neighbors_come_by_one_copy(void **state) {
    (void)state;
    world w;
    begin(&w, true, 8, false);
    call(&w, 0, (int64_t[]){2, 3, 4, 6}, 4);
    assert_int_equal(stats(&w).copies, 2 * PARTS); /* 2 3 4, and 6 */
    end(&w);
}

static void a_copy_waits_for_the_call_that_used_its_slot(void **state) {
    (void)state;
    world w;
    uint8_t seen[4096];
    begin(&w, false, 1, false);
    const sth_backend_ops *ops = w.device->ops;
    sth_stream stream;
    assert_ok(ops->stream_create(w.device->self, 0, &stream));
    sth_rows_lease lease;
    int64_t id = 3, slot;
    assert_ok(sth_rows_acquire(w.rows, 0, &id, 8, 1, 1, stream, &slot, &lease));
    assert_ok(sth_sim_compute(w.device, stream, 20 * 1000 * 1000));
    assert_ok(ops->copy_d2h(w.device->self, seen, w.pool[0], sizeof seen, stream));
    assert_ok(sth_rows_release(w.rows, &lease, stream));
    call(&w, 1, (int64_t[]){5}, 1); /* the same slot */
    assert_ok(ops->stream_synchronize(w.device->self, stream));
    assert_memory_equal(seen, w.host[0][0] + 3 * 4096, 4096);
    ops->stream_destroy(w.device->self, stream);
    end(&w);
}

static void ids_have_4_or_8_bytes_and_what_is_no_row_stays_none(void **state) {
    (void)state;
    world w;
    begin(&w, true, 6, false);
    int32_t ids[4] = {7, ROWS, 2, 7};
    sth_rows_lease lease;
    assert_ok(sth_rows_acquire(w.rows, 2, ids, 4, 4, 2, 0, ids, &lease));
    assert_int_equal(lease.count, 6);
    assert_int_equal(ids[1], 6);
    assert_int_equal(ids[0], ids[3]);
    assert_memory_equal(in_slot(&w, &lease, 0, ids[2]), w.host[2][0] + 2 * 4096, 4096);
    assert_ok(sth_rows_release(w.rows, &lease, 0));
    assert_status(sth_rows_release(w.rows, &lease, 0), STH_STALE);
    int64_t below = -1, slots;
    assert_status(sth_rows_acquire(w.rows, 2, &below, 8, 1, 1, 0, &slots, &lease), STH_INVALID_ARGUMENT);
    assert_status(sth_rows_acquire(w.rows, TABLES, &below, 8, 1, 1, 0, &slots, &lease), STH_INVALID_ARGUMENT);
    assert_status(sth_rows_acquire(w.rows, 0, &below, 2, 1, 1, 0, &slots, &lease), STH_INVALID_ARGUMENT);
    call(&w, 2, (int64_t[]){7, 2}, 2);
    end(&w);
}

static void more_rows_than_slots_are_refused_and_nothing_is_held(void **state) {
    (void)state;
    world w;
    begin(&w, true, 3, false);
    int64_t ids[4] = {0, 1, 2, 3}, slots[4];
    sth_rows_lease lease;
    assert_status(sth_rows_acquire(w.rows, 0, ids, 8, 4, 4, 0, slots, &lease), STH_BUDGET_TOO_SMALL);
    assert_non_null(strstr(sth_last_error()->message, "4 rows of 'table' at once, and there are 3 slots"));
    assert_int_equal(stats(&w).h2d_bytes, 0);
    call(&w, 0, ids, 3);
    assert_ok(sth_rows_close(w.rows));
    end(&w);
}

static void a_pool_closes_when_no_rows_are_in_use_and_opens_again(void **state) {
    (void)state;
    world w;
    begin(&w, false, 4, false);
    int64_t id = 1, slot;
    sth_rows_lease lease;
    assert_ok(sth_rows_acquire(w.rows, 0, &id, 8, 1, 1, 0, &slot, &lease));
    assert_status(sth_rows_close(w.rows), STH_INVALID_STATE);
    assert_status(sth_rows_open(w.rows, 4, w.pool, 0), STH_INVALID_STATE);
    assert_ok(sth_rows_release(w.rows, &lease, 0));
    assert_ok(sth_rows_close(w.rows));
    assert_ok(sth_rows_close(w.rows));
    assert_status(sth_rows_acquire(w.rows, 0, &id, 8, 1, 1, 0, &slot, &lease), STH_INVALID_STATE);
    assert_ok(sth_rows_open(w.rows, 2, w.pool, 0));
    call(&w, 0, (int64_t[]){1, 2}, 2);
    assert_int_equal(stats(&w).brought, 3);
    end(&w);
}

typedef struct visitor { /* a thread that leases a row and releases it a while later */
    world *w;
    atomic_bool leased, releasing;
    sth_status status;
} visitor;

static void *visit(void *arg) {
    visitor *v = arg;
    int64_t id = 1, slot;
    sth_rows_lease lease;
    v->status = sth_rows_acquire(v->w->rows, 0, &id, 8, 1, 1, 0, &slot, &lease);
    atomic_store(&v->leased, true);
    sthi_sleep_ns(20000000); /* the other thread is about to close, or closes */
    atomic_store(&v->releasing, true);
    if (v->status == STH_OK) v->status = sth_rows_release(v->w->rows, &lease, 0);
    return NULL;
}

static void a_pool_that_closes_waits_for_the_calls_of_other_threads(void **state) {
    (void)state;
    world w;
    begin(&w, false, 4, false);
    visitor v = {.w = &w};
    sthi_thread thread;
    assert_ok(sthi_thread_start(&thread, "visitor", visit, &v));
    while (!atomic_load(&v.leased)) sthi_sleep_ns(100000);
    assert_ok(sth_rows_close(w.rows));
    assert_true(atomic_load(&v.releasing));
    sthi_thread_join(thread);
    assert_ok(v.status);
    end(&w);
}

static void what_was_written_comes_anew(void **state) {
    (void)state;
    world w;
    begin(&w, false, 6, false);
    call(&w, 0, (int64_t[]){1, 2}, 2);
    call(&w, 1, (int64_t[]){1, 2}, 2);
    fill(w.host[0][0] + 4096, 4096, 77);
    assert_ok(sth_rows_written(w.rows, 0));
    call(&w, 0, (int64_t[]){1, 2}, 2);
    assert_int_equal(stats(&w).brought, 6);
    fill(w.host[1][1], ROWS * part_bytes[1], 78); /* without a word */
    assert_ok(sth_rows_fence(w.rows));
    call(&w, 1, (int64_t[]){1, 2}, 2);
    assert_int_equal(stats(&w).brought, 8);
    const void *parts[PARTS] = {w.host[2][0], w.host[2][1]};
    assert_ok(sth_rows_set_host(w.rows, 0, parts));
    int64_t id = 1, slot;
    sth_rows_lease lease;
    assert_ok(sth_rows_acquire(w.rows, 0, &id, 8, 1, 1, 0, &slot, &lease));
    assert_memory_equal(in_slot(&w, &lease, 0, slot), w.host[2][0] + 4096, 4096);
    assert_ok(sth_rows_release(w.rows, &lease, 0));
    end(&w);
}

static void who_promised_not_to_write_without_a_word_is_told(void **state) {
    (void)state;
    world w;
    begin(&w, false, 6, true);
    call(&w, 0, (int64_t[]){1}, 1);
    fill(w.host[0][0], ROWS * 4096, 77);
    assert_ok(sth_rows_fence(w.rows));
    int64_t id = 1, slot;
    sth_rows_lease lease;
    assert_status(sth_rows_acquire(w.rows, 0, &id, 8, 1, 1, 0, &slot, &lease), STH_INVALID_STATE);
    assert_ok(sth_rows_written(w.rows, 0));
    call(&w, 0, (int64_t[]){1}, 1);
    end(&w);
}

static void host_memory_may_be_written_behind_a_pass(void **state) {
    (void)state;
    world w;
    begin(&w, false, 4, false);
    const sth_backend_ops *ops = w.device->ops;
    sth_stream stream;
    uint8_t before[4096];
    assert_ok(ops->stream_create(w.device->self, 0, &stream));
    int64_t id = 5, slot;
    sth_rows_lease lease;
    memcpy(before, w.host[0][0] + 5 * 4096, sizeof before);
    assert_ok(sth_rows_acquire(w.rows, 0, &id, 8, 1, 1, stream, &slot, &lease)); /* the thread does not wait */
    assert_ok(sth_rows_pass_end(w.rows));
    fill(w.host[0][0], ROWS * 4096, 99);
    assert_ok(ops->stream_synchronize(w.device->self, stream));
    assert_memory_equal(in_slot(&w, &lease, 0, slot), before, 4096);
    assert_ok(sth_rows_release(w.rows, &lease, stream));
    ops->stream_destroy(w.device->self, stream);
    end(&w);
}

/* Time of a pass that uses all rows and computes for as long as the copy of a row takes. */
static int64_t pass_of_all(const world *w, bool last_alone) {
    int64_t ids[ROWS], begun = sth_device_now_ns(w->device), row_ns = 4873ll * 1000000000 / LINK;
    for (int i = 0; i < ROWS; i++) ids[i] = i;
    for (uint32_t t = 0; t < TABLES; t++) {
        int64_t slots[ROWS];
        uint32_t count = last_alone ? ROWS - 2 : ROWS; /* three quarters are not nearly all */
        sth_rows_lease lease;
        assert_ok(sth_rows_acquire(w->rows, t, ids, 8, count, 2, 0, slots, &lease));
        assert_there(w, &lease, ids, slots, count);
        assert_ok(sth_sim_compute(w->device, 0, 2 * row_ns));
        assert_ok(sth_rows_release(w->rows, &lease, 0));
    }
    return sth_device_now_ns(w->device) - begun;
}

static void the_link_goes_on_behind_a_call_that_uses_all_rows(void **state) {
    (void)state;
    world w;
    begin(&w, true, 12, false);
    (void)pass_of_all(&w, false); /* the order of tables is known then */
    assert_int_equal(stats(&w).ahead, 0);
    uint64_t before = stats(&w).h2d_bytes;
    int64_t took = pass_of_all(&w, false);
    sth_rows_stats s = stats(&w);
    assert_true(s.ahead >= TABLES * ROWS / 4);
    uint64_t bytes = s.h2d_bytes - before;
    /* Copies of what is missing back to back, and not the computing of each table between them. */
    double link_ns = (double)bytes * 1e9 / LINK;
    assert_true((double)took < 1.25 * link_ns);
    before = s.ahead;
    (void)pass_of_all(&w, true);
    assert_int_equal(stats(&w).ahead, before);
    end(&w);
}

/* ---- calls of the device that fail */

static void any_call_may_fail_and_the_next_try_is_right(void **state) {
    (void)state;
    static const sthi_fault_kind kinds[] = {STHI_FAULT_DEVICE_CALL, STHI_FAULT_ALLOC};
    for (unsigned k = 0; k < 2; k++) {
        for (uint64_t n = 1; n < 60; n++) {
            world w;
            begin(&w, false, 4, false);
            call(&w, 1, (int64_t[]){0, 1}, 2);
            int64_t ids[3] = {2, 3, 5}, slots[3];
            sth_rows_lease lease;
            sthi_fault_arm(kinds[k], n, false);
            sth_status rc = sth_rows_acquire(w.rows, 0, ids, 8, 3, 3, 0, slots, &lease);
            bool met = sthi_fault_seen(kinds[k]) >= n;
            if (rc == STH_OK) {
                assert_there(&w, &lease, ids, slots, 3);
                rc = sth_rows_release(w.rows, &lease, 0);
                met = sthi_fault_seen(kinds[k]) >= n;
                sthi_fault_disarm_all();
                if (rc != STH_OK) assert_ok(sth_rows_release(w.rows, &lease, 0));
            }
            sthi_fault_disarm_all();
            call(&w, 0, ids, 3);
            call(&w, 2, ids, 3);
            call(&w, 1, (int64_t[]){0, 1}, 2);
            assert_ok(sth_rows_close(w.rows));
            end(&w);
            if (!met) {
                assert_true(n > (k ? 0 : 5));
                break;
            }
        }
    }
}

static void making_one_may_fail_and_leaves_nothing(void **state) {
    (void)state;
    sth_device *device;
    sth_sim_options o;
    sthi_sim_options_init(&o);
    assert_ok(sthi_device_open("sim", &o, &device));
    long before = sthi_alloc_live();
    sth_rows_options options;
    sth_rows_options_init(&options);
    options.part_count = 1;
    options.part_bytes[0] = 64;
    uint8_t rows_of[64 * 4];
    const void *parts[1] = {rows_of};
    for (uint64_t n = 1;; n++) {
        sth_rows *rows = NULL;
        uint32_t table;
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = sth_rows_create(device, &options, &rows);
        if (rc == STH_OK) rc = sth_rows_add_table(rows, "t", 4, parts, &table);
        sthi_fault_disarm_all();
        sth_rows_destroy(rows);
        assert_int_equal(sthi_alloc_live(), before);
        if (rc == STH_OK) break;
        assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY);
    }
    options.part_count = 9;
    sth_rows *rows;
    assert_status(sth_rows_create(device, &options, &rows), STH_INVALID_ARGUMENT);
    sth_device_close(device);
}

/* ---- many calls */

static bool is_part(const void *world_, uint32_t table, uint32_t row, unsigned part, const uint8_t *bytes) {
    const world *w = world_;
    return !memcmp(bytes, w->host[table][part] + row * part_bytes[part], part_bytes[part]);
}

static rows_calls calls_of(const world *w) {
    return (rows_calls){.device = w->device, .rows = w->rows, .tables = TABLES, .row_count = ROWS,
                        .part_bytes = part_bytes, .pool = w->pool, .world = w, .is_row = is_part};
}

static void many_calls_of_one_thread_read_their_rows(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= cases_to_try(4); seed++) {
        world w;
        begin(&w, seed % 2, 3 + seed % 5, false);
        rows_calls calls = calls_of(&w);
        assert_true(make_calls(&calls, seed, 300)); /* more than there are events */
        end(&w);
    }
}

static void threads_share_a_pool(void **state) {
    (void)state;
    world w;
    begin(&w, false, 12, false);
    rows_calls calls = calls_of(&w);
    assert_true(make_calls_of_threads(&calls, few_under_tsan(60, 150)));
    end(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_in_their_slots_when_the_stream_has_waited),
        cmocka_unit_test(neighbors_come_by_one_copy),
        cmocka_unit_test(a_copy_waits_for_the_call_that_used_its_slot),
        cmocka_unit_test(ids_have_4_or_8_bytes_and_what_is_no_row_stays_none),
        cmocka_unit_test(more_rows_than_slots_are_refused_and_nothing_is_held),
        cmocka_unit_test(a_pool_closes_when_no_rows_are_in_use_and_opens_again),
        cmocka_unit_test(a_pool_that_closes_waits_for_the_calls_of_other_threads),
        cmocka_unit_test(what_was_written_comes_anew),
        cmocka_unit_test(who_promised_not_to_write_without_a_word_is_told),
        cmocka_unit_test(host_memory_may_be_written_behind_a_pass),
        cmocka_unit_test(the_link_goes_on_behind_a_call_that_uses_all_rows),
        cmocka_unit_test(any_call_may_fail_and_the_next_try_is_right),
        cmocka_unit_test(making_one_may_fail_and_leaves_nothing),
        cmocka_unit_test(many_calls_of_one_thread_read_their_rows),
        cmocka_unit_test(threads_share_a_pool),
    };
    return cmocka_run_group_tests_name("stream/rows", tests, NULL, NULL);
}
