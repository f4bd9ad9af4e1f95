/* Rows that lie in files: bytes of every slot that a call may read, rows that host memory keeps, files that change,
 * calls that fail. */
#include <stdio.h>
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "device/device.h"
#include "rows/rows.h"
#include "rows_calls.h"
#include "store/tempfiles.h"
#include "support/check.h"

enum { TABLES = 3, ROWS = 8, PARTS = 2, GATE = 6144, UP = 2048, DOWN = 777, LINK = 100 * 1000 * 1000 };
enum { EACH = GATE + UP + DOWN, ALL = TABLES * ROWS * EACH, PLACE = ROWS * (GATE + UP) + 1024, RANGES = 3 * ROWS };
static const uint64_t part_bytes[PARTS] = {GATE + UP, DOWN};
static const uint64_t part_offsets[PARTS] = {512, PLACE};

typedef struct world {
    sth_device *device;
    sth_checkpoint *checkpoint;
    sth_rows *rows;
    uint32_t slots;
    uint64_t data; /* where the tensor begins in its file */
    sth_devptr pool[PARTS];
} world;

/* Where an expert's tensors lie in the data: experts one behind the other, as models on the hub have them. */
static uint64_t expert_at(uint32_t table, uint32_t row) { return (uint64_t)(table * ROWS + row) * EACH; }

static void ranges_of(const world *w, uint32_t table, sth_file_range *out) {
    for (uint32_t row = 0; row < ROWS; row++) {
        uint64_t from = w->data + expert_at(table, row), place = part_offsets[0] + row * part_bytes[0];
        /* DOWN lies in front, so that GATE begins anywhere in a block. */
        *out++ = (sth_file_range){.file_offset = from, .bytes = DOWN, .place_offset = part_offsets[1] + row * DOWN};
        *out++ = (sth_file_range){.file_offset = from + DOWN, .bytes = GATE, .place_offset = place};
        *out++ = (sth_file_range){.file_offset = from + DOWN + GATE, .bytes = UP, .place_offset = place + GATE};
    }
}

static const char *write_model(const char *folder) {
    char header[200];
    snprintf(header, sizeof header, "{\"experts\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", ALL,
             ALL);
    const char *path = temp_path(folder, "model.safetensors");
    write_safetensors(path, header, ALL);
    return path;
}

/* group: rows that are read at once. */
static void begin(world *w, const char *folder, uint32_t slots, uint32_t ram_rows, uint32_t group) {
    sth_sim_options o;
    sthi_sim_options_init(&o);
    o.link_bytes_per_s = LINK;
    *w = (world){.slots = slots};
    assert_ok(sthi_device_open("sim", &o, &w->device));
    assert_ok(sth_checkpoint_open(write_model(folder), &w->checkpoint));
    w->data = sth_checkpoint_find(w->checkpoint, "experts")->offset;
    uint64_t slot_bytes = 0;
    for (unsigned p = 0; p < PARTS; p++) slot_bytes += (part_bytes[p] + 3 * 4096 + 511) / 512 * 512;
    sth_rows_options options;
    sth_rows_options_init(&options);
    options.part_count = PARTS;
    memcpy(options.part_bytes, part_bytes, sizeof part_bytes);
    options.ram_bytes = ram_rows * slot_bytes;
    assert_ok(sth_rows_create(w->device, &options, &w->rows));
    w->rows->ram.group_bytes = group * slot_bytes;
    for (unsigned t = 0; t < TABLES; t++) {
        sth_file_range ranges[RANGES];
        uint32_t table;
        ranges_of(w, t, ranges);
        assert_ok(sth_rows_add_file_table(w->rows, "table", ROWS, w->checkpoint, ranges, RANGES, part_offsets, &table));
        assert_int_equal(table, t);
    }
    for (unsigned p = 0; p < PARTS; p++) assert_ok(sth_device_alloc(w->device, slots * part_bytes[p], &w->pool[p]));
    assert_ok(sth_rows_open(w->rows, slots, w->pool, 0));
}

static void end(world *w) {
    sth_rows_destroy(w->rows);
    for (unsigned p = 0; p < PARTS; p++) sth_device_free(w->device, w->pool[p], w->slots * part_bytes[p]);
    sth_checkpoint_close(w->checkpoint);
    sth_device_close(w->device);
}

static sth_rows_stats stats(const world *w) {
    sth_rows_stats s;
    assert_ok(sth_rows_stats_get(w->rows, &s));
    return s;
}

static bool is_part(const void *unused, uint32_t table, uint32_t row, unsigned part, const uint8_t *bytes) {
    uint64_t from = expert_at(table, row);
    (void)unused;
    return part ? is_pattern(bytes, from, DOWN) : is_pattern(bytes, from + DOWN, GATE + UP);
}

static bool is_row(const uint8_t *gate_up, const uint8_t *down, uint32_t table, uint32_t row) {
    return is_part(NULL, table, row, 0, gate_up) && is_part(NULL, table, row, 1, down);
}

static const uint8_t *in_slot(const world *w, const sth_rows_lease *lease, unsigned p, int64_t slot) {
    return (const uint8_t *)(uintptr_t)(w->pool[p] + (lease->first + (uint64_t)slot) * part_bytes[p]);
}

/* A call on the calling thread. */
static void call(const world *w, uint32_t table, const int64_t *ids, uint32_t count) {
    int64_t slots[ROWS];
    sth_rows_lease lease;
    assert_ok(sth_rows_acquire(w->rows, table, ids, 8, count, count, 0, slots, &lease));
    for (uint32_t i = 0; i < count; i++)
        if (!is_row(in_slot(w, &lease, 0, slots[i]), in_slot(w, &lease, 1, slots[i]), table, (uint32_t)ids[i]))
            fail_msg("row %d of table %u is not in its slot", (int)ids[i], table);
    assert_ok(sth_rows_release(w->rows, &lease, 0));
}

static void rows_come_from_their_files(void **state) {
    int descriptors = open_descriptors();
    for (uint32_t group = 1; group <= 4; group++) {
        world w;
        begin(&w, *state, 5, 0, group);
        call(&w, 0, (int64_t[]){6, 1, 6}, 3);
        call(&w, 1, (int64_t[]){0, 1, 2, 3, 7}, 5);
        call(&w, 2, (int64_t[]){4}, 1);
        sth_rows_stats s = stats(&w);
        assert_int_equal(s.brought, 8);
        assert_int_equal(s.read_bytes, 8 * EACH);
        assert_int_equal(s.h2d_bytes, 8 * EACH);
        assert_int_equal(s.ram_slots, group == 1 ? 4 : 2 * group + 1);
        end(&w);
    }
    assert_int_equal(open_descriptors(), descriptors);
}

static void what_host_memory_has_is_read_once(void **state) {
    world w;
    begin(&w, *state, 2, TABLES * ROWS, 1);
    for (int round = 0; round < 3; round++)
        for (uint32_t t = 0; t < TABLES; t++)
            for (int64_t row = 0; row < ROWS; row += 2) call(&w, t, (int64_t[]){row, row + 1}, 2);
    sth_rows_stats s = stats(&w);
    assert_int_equal(s.read_bytes, ALL);
    assert_int_equal(s.ram_hits, 2 * TABLES * ROWS);
    assert_true(s.ram_bytes >= ALL);
    end(&w);
}

static void rows_that_are_missed_often_stay_in_host_memory(void **state) {
    world w;
    begin(&w, *state, 1, 6, 1);
    for (int64_t n = 0; n < 24; n++) {
        call(&w, 0, (int64_t[]){n % 3}, 1);
        call(&w, 1, (int64_t[]){n % ROWS}, 1); /* passes by */
    }
    uint64_t before = stats(&w).read_bytes;
    call(&w, 0, (int64_t[]){0}, 1);
    call(&w, 0, (int64_t[]){1}, 1);
    call(&w, 0, (int64_t[]){2}, 1);
    assert_int_equal(stats(&w).read_bytes, before);
    end(&w);
}

static void a_pool_that_closes_leaves_what_host_memory_has(void **state) {
    world w;
    begin(&w, *state, 4, ROWS, 2);
    call(&w, 0, (int64_t[]){0, 1, 2}, 3);
    assert_ok(sth_rows_close(w.rows));
    assert_ok(sth_rows_open(w.rows, 3, w.pool, 0));
    call(&w, 0, (int64_t[]){0, 1, 2}, 3);
    assert_int_equal(stats(&w).read_bytes, 3 * EACH);
    end(&w);
}

static void a_table_may_move_into_host_memory(void **state) {
    world w;
    begin(&w, *state, 4, 0, 2);
    call(&w, 1, (int64_t[]){2, 5}, 2);
    uint8_t *host[PARTS];
    for (unsigned p = 0; p < PARTS; p++) {
        host[p] = sthi_alloc(ROWS * part_bytes[p]);
        memset(host[p], 40 + (int)p, ROWS * part_bytes[p]);
    }
    assert_ok(sth_rows_set_host(w.rows, 1, (const void *const *)host));
    int64_t id = 5, slot;
    sth_rows_lease lease;
    assert_ok(sth_rows_acquire(w.rows, 1, &id, 8, 1, 1, 0, &slot, &lease));
    for (unsigned p = 0; p < PARTS; p++) assert_memory_equal(in_slot(&w, &lease, p, slot), host[p], part_bytes[p]);
    assert_ok(sth_rows_release(w.rows, &lease, 0));
    call(&w, 0, (int64_t[]){2, 5}, 2);
    assert_int_equal(stats(&w).read_bytes, 4 * EACH);
    sth_rows_destroy(w.rows);
    w.rows = NULL;
    for (unsigned p = 0; p < PARTS; p++) sthi_free(host[p]);
    end(&w);
}

static void ranges_that_leave_bytes_out_are_refused(void **state) {
    world w;
    begin(&w, *state, 4, 0, 2);
    assert_ok(sth_rows_close(w.rows));
    sth_file_range ranges[RANGES];
    uint32_t table;
    for (int how = 0; how < 4; how++) {
        ranges_of(&w, 0, ranges);
        if (how == 0) ranges[7].bytes--;
        if (how == 1) ranges[7].place_offset++;
        if (how == 2) ranges[7].file = 1;
        if (how == 3) ranges[7].file_offset = w.data + ALL - GATE + 1;
        assert_status(
            sth_rows_add_file_table(w.rows, "table", ROWS, w.checkpoint, ranges, RANGES, part_offsets, &table),
            STH_INVALID_ARGUMENT);
        assert_non_null(strstr(sth_last_error()->message, how < 2 ? "part 0" : "range"));
    }
    ranges_of(&w, 0, ranges);
    assert_status(sth_rows_add_file_table(w.rows, "table", ROWS, w.checkpoint, ranges, 0, part_offsets, &table),
                  STH_INVALID_ARGUMENT);
    assert_ok(sth_rows_open(w.rows, 4, w.pool, 0));
    call(&w, 2, (int64_t[]){7}, 1);
    assert_status(sth_rows_add_file_table(w.rows, "table", ROWS, w.checkpoint, ranges, RANGES, part_offsets, &table),
                  STH_INVALID_STATE);
    end(&w);
}

static void a_file_that_was_cut_off_is_named_and_other_rows_go_on(void **state) {
    world w;
    begin(&w, *state, 1, 4, 1);
    call(&w, 0, (int64_t[]){1}, 1);
    call(&w, 0, (int64_t[]){2}, 1);
    cut_file(temp_path(*state, "model.safetensors"), w.data + ALL / 2);
    int64_t id = 7, slot;
    sth_rows_lease lease;
    assert_status(sth_rows_acquire(w.rows, 2, &id, 8, 1, 1, 0, &slot, &lease), STH_CHANGED_DATA);
    assert_non_null(strstr(sth_last_error()->message, "row 7 of 'table', tensor 'experts'"));
    call(&w, 0, (int64_t[]){1}, 1); /* from host memory */
    assert_status(sth_rows_acquire(w.rows, 2, &id, 8, 1, 1, 0, &slot, &lease), STH_CHANGED_DATA);
    assert_ok(sth_rows_close(w.rows));
    end(&w);
}

/* ---- what fails */

static void any_call_may_fail_and_the_next_try_is_right(void **state) {
    for (int kind = 0; kind < STHI_FAULT_KINDS; kind++)
        for (uint64_t n = 1; n < 60; n++) {
            world w;
            begin(&w, *state, 4, 0, 2);
            call(&w, 1, (int64_t[]){0, 1}, 2);
            int64_t ids[3] = {2, 3, 5}, slots[3];
            sth_rows_lease lease;
            sthi_fault_arm((sthi_fault_kind)kind, n, false);
            sth_status rc = sth_rows_acquire(w.rows, 0, ids, 8, 3, 3, 0, slots, &lease);
            bool met = sthi_fault_seen((sthi_fault_kind)kind) >= n;
            sthi_fault_disarm_all();
            if (rc == STH_OK) {
                for (uint32_t i = 0; i < 3; i++)
                    assert_true(is_row(in_slot(&w, &lease, 0, slots[i]), in_slot(&w, &lease, 1, slots[i]), 0,
                                       (uint32_t)ids[i]));
                assert_ok(sth_rows_release(w.rows, &lease, 0));
            }
            call(&w, 0, ids, 3);
            call(&w, 2, ids, 3);
            call(&w, 1, (int64_t[]){0, 1}, 2);
            assert_ok(sth_rows_close(w.rows));
            end(&w);
            if (!met) break;
        }
}

static void making_one_may_fail_and_leaves_nothing(void **state) {
    long live = sthi_alloc_live();
    sth_device *device;
    sth_sim_options o;
    sthi_sim_options_init(&o);
    assert_ok(sthi_device_open("sim", &o, &device));
    world w = {.device = device};
    assert_ok(sth_checkpoint_open(write_model(*state), &w.checkpoint));
    w.data = sth_checkpoint_find(w.checkpoint, "experts")->offset;
    sth_file_range ranges[RANGES];
    ranges_of(&w, 0, ranges);
    for (unsigned p = 0; p < PARTS; p++) assert_ok(sth_device_alloc(device, 4 * part_bytes[p], &w.pool[p]));
    sth_rows_options options;
    sth_rows_options_init(&options);
    options.part_count = PARTS;
    memcpy(options.part_bytes, part_bytes, sizeof part_bytes);
    bool met = true;
    for (uint64_t n = 1; met; n++) {
        sth_rows *rows = NULL;
        uint32_t table;
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = sth_rows_create(device, &options, &rows);
        if (rc == STH_OK)
            rc = sth_rows_add_file_table(rows, "t", ROWS, w.checkpoint, ranges, RANGES, part_offsets, &table);
        if (rc == STH_OK) rc = sth_rows_open(rows, 4, w.pool, 0);
        met = sthi_fault_seen(STHI_FAULT_ALLOC) >= n;
        sthi_fault_disarm_all();
        sth_rows_destroy(rows);
        if (rc != STH_OK) assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY);
        if (!met) assert_int_equal(rc, STH_OK);
    }
    for (unsigned p = 0; p < PARTS; p++) sth_device_free(device, w.pool[p], 4 * part_bytes[p]);
    sth_checkpoint_close(w.checkpoint);
    sth_device_close(device);
    assert_int_equal(sthi_alloc_live(), live);
}

/* ---- many calls */

static void threads_share_a_pool_and_its_host_memory(void **state) {
    world w;
    begin(&w, *state, 12, 5, 2);
    rows_calls calls = {.device = w.device, .rows = w.rows, .tables = TABLES, .row_count = ROWS,
                        .part_bytes = part_bytes, .pool = w.pool, .is_row = is_part};
    assert_true(make_calls_of_threads(&calls, few_under_tsan(30, 100)));
    assert_true(stats(&w).ram_hits > 0);
    end(&w);
}

#define IN_A_FOLDER(test) cmocka_unit_test_setup_teardown(test, temp_setup, temp_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(rows_come_from_their_files),
        IN_A_FOLDER(what_host_memory_has_is_read_once),
        IN_A_FOLDER(rows_that_are_missed_often_stay_in_host_memory),
        IN_A_FOLDER(a_pool_that_closes_leaves_what_host_memory_has),
        IN_A_FOLDER(a_table_may_move_into_host_memory),
        IN_A_FOLDER(ranges_that_leave_bytes_out_are_refused),
        IN_A_FOLDER(a_file_that_was_cut_off_is_named_and_other_rows_go_on),
        IN_A_FOLDER(any_call_may_fail_and_the_next_try_is_right),
        IN_A_FOLDER(making_one_may_fail_and_leaves_nothing),
        IN_A_FOLDER(threads_share_a_pool_and_its_host_memory),
    };
    return cmocka_run_group_tests_name("stream/rows_files", tests, NULL, NULL);
}
