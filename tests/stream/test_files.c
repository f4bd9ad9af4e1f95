/* Units that are read from files, or from memory that is not pinned, while they stream. */
#include "support/check.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/memory.h"
#include "runtime/image.h"
#include "runtime/lease.h"
#include "runtime/report.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/step_calls.h"
#include "runtime/units.h"
#include "runtime/verify.h"
#include "store/tempfiles.h"
#include "stream/files_world.h"

static void every_use_sees_the_files_bytes(void **state) {
    for (uint64_t budget = 44000; budget <= 170000; budget += 42000)
        for (uint32_t readers = 0; readers < 3; readers++)
            for (int virtual_time = 0; virtual_time < 2; virtual_time++) {
                file_world w;
                setting s = {readers, readers == 1 ? 6 : 2, virtual_time, budget, NULL, 0};
                assert_ok(file_world_open(&w, *state, &s));
                good_steps(&w, 4);
                bool equal = false;
                assert_ok(sthi_unit_verify(w.runtime, 5, &equal, NULL));
                assert_true(equal);
                sth_runtime_stats stats;
                sthi_runtime_stats(w.runtime, &stats);
                assert_in_range(stats.staging_bytes, 2 * CHUNK, s.slabs * CHUNK + 4 * SLACK);
                assert_true(stats.device_peak <= budget);
                file_world_close(&w);
            }
}

static sth_pool *open_pool(sth_device *d, uint32_t slabs) {
    sth_pool *p;
    assert_ok(sthi_pool_create(d, (uint64_t)slabs * CHUNK, CHUNK, 512, &p));
    return p;
}

static void every_way_gives_the_same_bytes(void **state) {
    for (int way = 0; way < STH_READ_WAY_COUNT; way++)
        for (uint32_t readers = 0; readers < 4; readers++)
            for (int shared = 0; shared < 2; shared++) {
                file_world w;
                sth_pool *pool = shared ? open_pool(NULL, 3) : NULL;
                setting s = {readers, 4, false, 60000, pool, 0};
                want_way(*state, (sth_read_way)way);
                assert_ok(file_world_open(&w, *state, &s));
                good_steps(&w, 3);
                sth_file_way said;
                assert_int_equal(sthi_runtime_file_count(w.runtime), 2);
                assert_ok(sthi_runtime_file_way(w.runtime, 1, &said));
                assert_int_equal(sthi_runtime_file_way(w.runtime, 2, &said), STH_NOT_FOUND);
                assert_non_null(strstr(said.path, "m1.safetensors"));
                if (said.way != (sth_read_way)way)
                    print_message("# read %s and not %s: %s\n", sth_read_way_name(said.way),
                                  sth_read_way_name((sth_read_way)way), said.why);
                sth_runtime_stats stats;
                sthi_runtime_stats(w.runtime, &stats);
                assert_true(stats.file_bytes > 0 && stats.file_bytes >= stats.file_cached_bytes);
                sthi_fault_disarm_all();
                sthi_fault_arm(STHI_FAULT_SHORT_READ, 1 + readers, true);
                good_steps(&w, 1);
                sthi_fault_disarm_all();
                file_world_close(&w);
                sthi_pool_destroy(pool);
            }
}

/* Also a unit that was kept in host memory, and one whose file is broken by then. */
static void a_unit_of_a_file_may_get_an_image(void **state) {
    for (uint64_t ram = 0; ram <= 1 << 20; ram += 1 << 20)
        for (uint32_t readers = 0; readers < 3; readers += 2) {
            file_world w;
            setting s = {readers, 4, false, 60000, NULL, ram};
            assert_ok(file_world_open(&w, *state, &s));
            good_steps(&w, 2);
            for (uint32_t unit = 0; unit < UNITS; unit += 3) {
                uint64_t bytes = w.runtime->units[unit].bytes;
                sth_arena *arena;
                void *image;
                assert_ok(sthi_arena_create(w.device, bytes, &arena));
                assert_ok(sthi_arena_reserve(arena, bytes, &image));
                assert_ok(sthi_arena_finish(arena));
                memset(image, (int)unit + 1, bytes);
                assert_ok(sthi_unit_set_host(w.runtime, unit, image, arena));
                sthi_arena_release(arena);
                for (int i = 0; i < 3; i++) {
                    assert_ok(sthi_runtime_synchronize(w.runtime)); /* a copy ahead may be reading it */
                    memset(image, (int)unit + 2 + i, bytes); /* seen without a word: it is watched */
                    assert_ok(sthi_step_begin(w.runtime));
                    sth_lease lease;
                    assert_ok(sthi_unit_acquire(w.runtime, unit, 0, &lease));
                    sthi_lease_release(w.runtime, &lease);
                    bool equal = false;
                    assert_ok(sthi_unit_verify(w.runtime, unit, &equal, NULL));
                    assert_true(equal);
                    assert_ok(sthi_step_end(w.runtime));
                }
            }
            file_world_close(&w);
        }
}

static void a_damaged_file_stops_its_units_only(void **state) {
    for (int how = 0; how < 2 * STH_READ_WAY_COUNT; how++)
        for (uint32_t readers = 0; readers < 3; readers++) {
            file_world w;
            setting s = {readers, 2, false, 90000, NULL, 0};
            char path[512];
            uint32_t bad;
            write_model(*state, 0, path, sizeof path);
            want_way(*state, (sth_read_way)(how / 2));
            assert_ok(file_world_open(&w, *state, &s));
            sthi_fault_disarm_all();
            good_steps(&w, 3);
            if (how % 2) cut_file(path, file_bytes(path) - 20000);
            else write_bytes(path, "rewritten", 9);
            sth_status rc = STH_OK; /* what is resident stays right, what is read again is refused */
            for (int i = 0; i < 2 && rc == STH_OK; i++) rc = file_step(&w, &bad);
            assert_int_equal(rc, STH_CHANGED_DATA);
            assert_int_equal(bad & 0xAA, 0);
            assert_non_null(strstr(sth_last_error()->message, "m0.safetensors"));
            assert_non_null(strstr(sth_last_error()->message, "tensor 'u"));
            assert_non_null(strstr(sth_last_error()->message, "unit 'unit."));
            assert_int_equal(file_step(&w, &bad), STH_CHANGED_DATA); /* and again, without a hang */
            file_world_close(&w);
        }
}

static void a_read_that_fails_once_is_tried_again(void **state) {
    for (uint32_t world = 0; world < 3 * STH_READ_WAY_COUNT; world++) {
        uint32_t readers = world % 3;
        bool hit = true, refused = false;
        for (uint64_t n = 1; hit && n < 300; n += few_under_tsan(2 + (unsigned)n, 1 + (unsigned)n / 2)) {
            file_world w;
            setting s = {readers, 3, readers == 0, 60000, NULL, 0};
            uint32_t bad;
            want_way(*state, (sth_read_way)(world / 3));
            assert_ok(file_world_open(&w, *state, &s));
            sthi_fault_disarm_all();
            sthi_fault_arm(STHI_FAULT_READ, n, n % 2 == 0);
            sth_status rc = STH_OK;
            for (int i = 0; i < 3 && rc == STH_OK; i++) rc = file_step(&w, &bad);
            hit = sthi_fault_seen(STHI_FAULT_READ) >= n;
            sthi_fault_disarm_all();
            if (rc != STH_OK) {
                refused = true;
                assert_int_equal(rc, STH_IO);
                assert_non_null(strstr(sth_last_error()->message, "tensor 'u"));
            }
            good_steps(&w, 2);
            file_world_close(&w);
        }
        assert_true(refused);
    }
}

/* ---- a pool that several runtimes share */

static void runtimes_share_a_pool(void **state) {
    enum { WORLDS = 3 };
    for (uint32_t slabs = 1; slabs <= 4; slabs += slabs > 1 ? 2 : 1)
        for (uint32_t readers = 0; readers < 3; readers++) {
            sth_pool *pool = open_pool(NULL, slabs);
            file_world w[WORLDS];
            setting s = {readers, 0, false, 60000, pool, 0};
            /* One after the other: who waits its turn keeps slabs filled for a step that is to come. */
            for (int i = 0; i < WORLDS; i++) assert_ok(file_world_open(&w[i], *state, &s));
            for (int round = 0; round < 3; round++)
                for (int i = 0; i < WORLDS; i++) good_steps(&w[i], 1);
            for (int i = 0; i < WORLDS; i++) file_world_close(&w[i]);
            sth_pool_stats stats;
            sthi_pool_stats_get(pool, &stats);
            assert_int_equal(stats.in_use, 0);
            sthi_pool_destroy(pool);
        }
}

/* Each device has a time of its own, which moves when somebody waits for it: the first runtime's copies are under way,
 * in all slabs, and nobody calls it any more. */
static void slabs_come_back_in_virtual_time(void **state) {
    for (uint32_t slabs = 1; slabs <= 3; slabs++)
        for (uint32_t readers = 0; readers < 3; readers++) {
            sth_pool *pool = open_pool(NULL, slabs);
            file_world w[2];
            setting s = {readers, 0, true, 60000, pool, 0};
            for (int i = 0; i < 2; i++) assert_ok(file_world_open(&w[i], *state, &s));
            sth_stream stream;
            sth_lease lease;
            assert_ok(w[0].device->ops->stream_create(w[0].device->self, 0, &stream));
            assert_ok(sthi_unit_acquire(w[0].runtime, 2, stream, &lease));
            good_steps(&w[1], 1);
            sthi_lease_release(w[0].runtime, &lease);
            assert_ok(sthi_runtime_synchronize(w[0].runtime));
            w[0].device->ops->stream_destroy(w[0].device->self, stream);
            for (int i = 0; i < 2; i++) file_world_close(&w[i]);
            sthi_pool_destroy(pool);
        }
}

typedef struct runner {
    file_world w;
    sthi_thread thread;
    sth_status rc;
} runner;

static void *run_steps(void *arg) {
    runner *r = arg;
    uint32_t bad;
    for (int i = 0; i < 4 && r->rc == STH_OK; i++) r->rc = file_step(&r->w, &bad);
    return NULL;
}

static void runtimes_share_a_pool_at_once(void **state) {
    for (uint32_t readers = 0; readers < 3; readers++) {
        sth_pool *pool = open_pool(NULL, 2);
        runner r[2] = {0};
        setting s = {readers, 0, false, 60000, pool, 0};
        for (int i = 0; i < 2; i++) assert_ok(file_world_open(&r[i].w, *state, &s));
        for (int i = 0; i < 2; i++) assert_ok(sthi_thread_start(&r[i].thread, "runner", run_steps, &r[i]));
        for (int i = 0; i < 2; i++) sthi_thread_join(r[i].thread);
        for (int i = 0; i < 2; i++) assert_int_equal(r[i].rc, STH_OK);
        for (int i = 0; i < 2; i++) file_world_close(&r[i].w);
        sthi_pool_destroy(pool);
    }
}

/* Somebody else holds every slab and lets go of them slowly. */
typedef struct hog {
    sth_pool *pool;
    sth_slab slabs[2];
    sthi_thread thread;
} hog;

static void *let_go_slowly(void *arg) {
    hog *h = arg;
    for (int i = 0; i < 2; i++) {
        sthi_sleep_ns(30000000);
        (void)sthi_pool_release(h->pool, &h->slabs[i], 1);
    }
    return NULL;
}

static void slow_slabs_only_delay(void **state) {
    for (uint32_t readers = 0; readers < 3; readers++) {
        hog h = {.pool = open_pool(NULL, 2)};
        file_world w;
        setting s = {readers, 0, false, 60000, h.pool, 0};
        uint32_t count;
        assert_ok(sthi_pool_acquire(h.pool, 2 * CHUNK, h.slabs, 2, &count));
        assert_ok(file_world_open(&w, *state, &s));
        assert_ok(sthi_thread_start(&h.thread, "hog", let_go_slowly, &h));
        good_steps(&w, 2);
        sthi_thread_join(h.thread);
        file_world_close(&w);
        sthi_pool_destroy(h.pool);
    }
}

static void a_pool_that_shuts_down_is_an_error(void **state) {
    for (uint32_t readers = 0; readers < 3; readers++) {
        sth_pool *pool = open_pool(NULL, 2);
        file_world w;
        setting s = {readers, 0, false, 60000, pool, 0};
        uint32_t bad;
        assert_ok(file_world_open(&w, *state, &s));
        good_steps(&w, 2);
        sthi_pool_shutdown(pool);
        assert_int_equal(file_step(&w, &bad), STH_SHUT_DOWN);
        file_world_close(&w);
        sthi_pool_destroy(pool);
    }
}

/* ---- host memory that is not pinned */

static void images_outside_an_arena_are_staged(void **state) {
    (void)state;
    for (uint32_t readers = 0; readers < 3; readers += 2) {
        file_world w = {0};
        sth_sim_options sim;
        sth_sim_options_init(&sim);
        sim.memory_bytes = 30000;
        assert_ok(sthi_device_open("sim", &sim, &w.device));
        sth_runtime_options o;
        sthi_runtime_options_init(&o);
        o.budget = 30000;
        o.chunk_bytes = CHUNK;
        o.reader_threads = readers;
        assert_ok(sthi_runtime_create(w.device, &o, &w.runtime));
        uint8_t *image[4];
        uint32_t id;
        for (uint32_t u = 0; u < 4; u++) {
            uint64_t bytes = 10001 + u; /* exactly so long: the padding of the place is not in it */
            image[u] = sthi_alloc(bytes);
            assert_non_null(image[u]);
            for (uint64_t i = 0; i < bytes; i++) image[u][i] = (uint8_t)(i * 3 + u);
            sth_unit_desc d = {.name = "plain", .bytes = bytes, .host = image[u]};
            assert_ok(sthi_runtime_add_unit(w.runtime, &d, &id));
        }
        assert_ok(sthi_runtime_seal(w.runtime));
        for (int i = 0; i < 12; i++) {
            sth_lease l;
            assert_ok(sthi_unit_acquire(w.runtime, (uint32_t)i % 4, 0, &l));
            assert_memory_equal((const void *)(uintptr_t)l.address, image[i % 4], 10001 + (uint32_t)i % 4);
            sthi_lease_release(w.runtime, &l);
            assert_ok(sthi_runtime_poll(w.runtime));
        }
        bool equal = false;
        assert_ok(sthi_unit_verify(w.runtime, 2, &equal, NULL));
        assert_true(equal);
        file_world_close(&w);
        for (uint32_t u = 0; u < 4; u++) sthi_free(image[u]);
    }
}

static void nothing_stays_behind(void **state) {
    long live = sthi_alloc_live();
    int descriptors = open_descriptors();
    for (uint32_t readers = 0; readers < 3; readers++) {
        file_world w;
        setting s = {readers, 2, false, 60000, NULL, 0};
        assert_ok(file_world_open(&w, *state, &s));
        if (readers) good_steps(&w, 1);
        file_world_close(&w); /* with reads and copies under way */
    }
    assert_int_equal(sthi_alloc_live(), live);
    assert_int_equal(open_descriptors(), descriptors);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_use_sees_the_files_bytes, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(every_way_gives_the_same_bytes, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_unit_of_a_file_may_get_an_image, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_damaged_file_stops_its_units_only, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_read_that_fails_once_is_tried_again, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(runtimes_share_a_pool, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(slabs_come_back_in_virtual_time, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(runtimes_share_a_pool_at_once, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(slow_slabs_only_delay, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_pool_that_shuts_down_is_an_error, temp_setup, temp_teardown),
        cmocka_unit_test(images_outside_an_arena_are_staged),
        cmocka_unit_test_setup_teardown(nothing_stays_behind, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests_name("files", tests, NULL, NULL);
}
