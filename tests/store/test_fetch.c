/* Reading pieces of a file in every way: the choice, the bytes, the edges, and each failure. */
#define _GNU_SOURCE
#include "support/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "store/fetch.h"
#include "store/ring.h"
#include "store/tempfiles.h"

#define BYTES ((uint64_t)(3 << 20) + 1234) /* several requests, and an end that is on no block */
enum { GUARD = 128 << 10, MARK = 0xA5 };

typedef struct world {
    const char *path;
    sthi_file file;
    sthi_access access;
    sthi_fetcher *fetcher;
} world;

static void write_pattern(const char *path) {
    unsigned char *all = malloc(BYTES);
    assert_non_null(all);
    for (uint64_t i = 0; i < BYTES; i++) all[i] = pattern_byte(i);
    write_bytes(path, all, BYTES);
    free(all);
}

/* Opens the file in one way, by taking the better ones away. False where this machine has it not. */
static bool world_open(world *w, const char *folder, sth_read_way way) {
    *w = (world){.path = temp_path(folder, "data")};
    if (access(w->path, R_OK)) write_pattern(w->path);
    if (way != STH_READ_CACHED) drop_cache(w->path);
    assert_ok(sthi_file_open(w->path, &w->file));
    if (way == STH_READ_CACHED) {
        unsigned char *all = malloc(BYTES);
        assert_ok(sthi_file_read(&w->file, 0, BYTES, all));
        free(all);
    }
    if (way == STH_READ_DIRECT) sthi_fault_arm(STHI_FAULT_URING, 1, true);
    if (way == STH_READ_BUFFERED) sthi_fault_arm(STHI_FAULT_DIRECT, 1, true);
    sthi_access_open(&w->file, &w->access);
    w->fetcher = sthi_fetcher_create();
    assert_non_null(w->fetcher);
    return atomic_load(&w->access.way) == (int)way;
}

static void world_close(world *w) {
    sthi_fetcher_destroy(w->fetcher);
    sthi_access_close(&w->access);
    sthi_file_close(&w->file);
    sthi_fault_disarm_all();
}

static uint64_t chance(uint64_t n) {
    static uint64_t state = 12345;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % n;
}

static bool all_marks(const unsigned char *p, const unsigned char *end) {
    while (p < end && *p == MARK) p++;
    return p == end;
}

/* A piece at any offset and address; what lies round it is written only where it is free, and then less than a
 * block. */
static sth_status fetch_one(world *w, uint64_t offset, uint64_t bytes, uint64_t skew, int edges) {
    static unsigned char *room;
    if (!room) room = aligned_alloc(GUARD, GUARD * 3 + ((BYTES + GUARD) / GUARD + 1) * GUARD);
    uint64_t whole = GUARD * 2 + bytes + skew;
    memset(room, MARK, whole);
    unsigned char *to = room + GUARD + skew;
    sthi_piece p = {&w->access, offset, bytes, to, edges & 1, edges >> 1 & 1};
    uint32_t piece;
    uint64_t at;
    sth_status rc = sthi_fetch(w->fetcher, &p, 1, &piece, &at);
    uint64_t before = p.free_before ? w->access.align - 1 : 0, behind = p.free_behind ? w->access.align - 1 : 0;
    assert_true(all_marks(room, to - before));
    assert_true(all_marks(to + bytes + behind, room + whole));
    if (rc != STH_OK) {
        assert_in_range(at, offset, offset + bytes);
        return rc;
    }
    for (uint64_t i = 0; i < bytes && !is_pattern(to, offset, bytes); i++)
        if (to[i] != pattern_byte(offset + i))
            fail_msg("byte %llu of %llu at %llu (skew %llu, edges %d) is wrong", (unsigned long long)i,
                     (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)skew, edges);
    return STH_OK;
}

static sth_status fetch_some(world *w, int times) {
    sth_status first = STH_OK;
    for (int i = 0; i < times; i++) {
        uint64_t most = i % 8 ? 20000 : BYTES, bytes = chance(most) + 1, offset = chance(BYTES - bytes + 1);
        if (i % 5 == 0) offset = BYTES - bytes; /* up to the end */
        uint64_t skew = i % 3 ? chance(8192) : offset % 4096;
        sth_status rc = fetch_one(w, offset, bytes, skew, (int)chance(4));
        if (first == STH_OK) first = rc;
    }
    return first;
}

static void every_way_gives_the_files_bytes(void **state) {
    for (int way = 0; way < STH_READ_WAY_COUNT; way++) {
        world w;
        if (world_open(&w, *state, (sth_read_way)way)) assert_ok(fetch_some(&w, 200));
        else
            print_message("# this machine does not read %s here: %s\n", sth_read_way_name((sth_read_way)way),
                          w.access.why);
        world_close(&w);
    }
}

static void the_way_is_found_by_trying(void **state) {
    world w;
    sth_file_way said;
    bool direct = world_open(&w, *state, STH_READ_URING);
    world_close(&w);
    if (!direct) skip_because("no O_DIRECT, or no io_uring, where temporary files are");
    assert_true(world_open(&w, *state, STH_READ_DIRECT));
    sthi_access_describe(&w.access, &said);
    assert_non_null(strstr(said.why, "io_uring is refused: Operation not permitted"));
    assert_true(said.align >= 512);
    world_close(&w);
    assert_true(world_open(&w, *state, STH_READ_BUFFERED));
    sthi_access_describe(&w.access, &said);
    assert_non_null(strstr(said.why, "O_DIRECT is refused: Invalid argument"));
    assert_string_equal(said.path, w.path);
    world_close(&w);
    assert_true(world_open(&w, *state, STH_READ_CACHED));
    sthi_access_describe(&w.access, &said);
    assert_non_null(strstr(said.why, "100 %"));
    world_close(&w);
}

static void a_file_that_left_the_cache_is_read_around_it(void **state) {
    world w;
    bool direct = world_open(&w, *state, STH_READ_URING);
    world_close(&w);
    if (!direct) skip_because("no O_DIRECT, or no io_uring, where temporary files are");
    assert_true(world_open(&w, *state, STH_READ_CACHED));
    assert_ok(fetch_one(&w, 5, BYTES - 5, 0, 0));
    sthi_access_settle(&w.access);
    assert_int_equal(atomic_load(&w.access.way), STH_READ_CACHED);
    assert_int_equal(atomic_load(&w.access.cached_bytes), BYTES - 5);
    int dropped = 0; /* the kernel lets go of pages that nobody holds at the moment */
    for (; dropped < 50 && atomic_load(&w.access.way) == STH_READ_CACHED; dropped++) {
        drop_cache(w.path);
        assert_ok(fetch_one(&w, 5, BYTES - 5, 0, 0));
        sthi_access_settle(&w.access);
    }
    assert_int_equal(atomic_load(&w.access.way), STH_READ_URING);
    assert_ok(fetch_one(&w, 5, BYTES - 5, 0, 0));
    sth_file_way said;
    sthi_access_describe(&w.access, &said);
    assert_string_equal(said.why, "it has left the page cache");
    assert_int_equal(said.read_bytes, (uint64_t)(2 + dropped) * (BYTES - 5));
    world_close(&w);
}

/* Short reads are read on from; an error of a ring's request is tried again; one that stays is said. */
static void failing_reads_give_an_error_or_the_right_bytes(void **state) {
    for (int way = 0; way < STH_READ_WAY_COUNT; way++)
        for (int forever = 0; forever < 2; forever++) {
            world w;
            bool refused = false, hit = true;
            (void)world_open(&w, *state, (sth_read_way)way);
            for (uint64_t n = 1; hit && n < 24; n += few_under_tsan(5, 1)) {
                sthi_fault_arm(STHI_FAULT_READ, n, forever);
                sth_status rc = fetch_some(&w, 10);
                hit = sthi_fault_seen(STHI_FAULT_READ) >= n;
                sthi_fault_disarm_all();
                if (rc == STH_OK) continue;
                refused = true;
                assert_int_equal(rc, STH_IO);
                assert_int_equal(sth_last_error()->native_code, EIO);
                assert_non_null(strstr(sth_last_error()->message, w.path));
                assert_non_null(strstr(sth_last_error()->message, " at byte "));
            }
            assert_true(refused || !forever);
            for (uint64_t n = 1; n < 20; n += 3) {
                sthi_fault_arm(STHI_FAULT_SHORT_READ, n, forever);
                assert_ok(fetch_some(&w, 10));
                sthi_fault_disarm_all();
            }
            world_close(&w);
        }
}

static void a_truncated_file_is_refused(void **state) {
    for (int way = 0; way < STH_READ_WAY_COUNT; way++) {
        world w;
        (void)world_open(&w, *state, (sth_read_way)way);
        assert_ok(fetch_one(&w, BYTES - 9999, 9999, 3, 0));
        cut_file(w.path, BYTES - 5000);
        assert_int_equal(fetch_one(&w, BYTES - 9999, 9999, 3, 0), STH_CHANGED_DATA);
        assert_non_null(strstr(sth_last_error()->message, w.path));
        world_close(&w);
        unlink(w.path);
    }
}

static void a_replaced_file_keeps_its_bytes(void **state) {
    for (int way = 0; way < STH_READ_WAY_COUNT; way++) {
        world w;
        (void)world_open(&w, *state, (sth_read_way)way);
        write_text(temp_path(*state, "other"), "something else");
        assert_int_equal(rename(temp_path(*state, "other"), w.path), 0);
        assert_ok(fetch_some(&w, 20));
        sthi_access_close(&w.access); /* opened again only now */
        sthi_access_open(&w.file, &w.access);
        assert_ok(fetch_some(&w, 20));
        world_close(&w);
        unlink(w.path);
    }
}

/* Neighbours in memory from places far apart in the file: an edge of one must not be read over another. */
static void neighbours_do_not_touch_each_other(void **state) {
    enum { PIECES = 40 };
    static unsigned char room[PIECES * 3000 + 4096] __attribute__((aligned(4096)));
    for (int way = 0; way < STH_READ_WAY_COUNT; way++) {
        world w;
        (void)world_open(&w, *state, (sth_read_way)way);
        for (int round = 0; round < 20; round++) {
            sthi_piece p[PIECES];
            unsigned char *to = room + chance(512);
            for (int i = 0; i < PIECES; i++) {
                uint64_t bytes = 1 + chance(3000);
                uint64_t offset = chance(BYTES - 8192) / 512 * 512 + (i % 2 ? (uintptr_t)to % 512 : chance(512));
                p[i] = (sthi_piece){&w.access, offset, bytes, to,
                                    i == 0 && (uintptr_t)(to - room) >= offset % w.access.align, false};
                to += bytes;
            }
            uint32_t piece;
            uint64_t at;
            assert_ok(sthi_fetch(w.fetcher, p, PIECES, &piece, &at));
            for (int i = 0; i < PIECES; i++)
                assert_true(is_pattern(p[i].to, p[i].offset, p[i].bytes));
        }
        world_close(&w);
    }
}

static void no_memory_is_a_slower_read(void **state) {
    for (int way = 0; way < STH_READ_WAY_COUNT; way++)
        for (uint64_t n = 1; n < 4; n++) {
            world w;
            (void)world_open(&w, *state, (sth_read_way)way);
            sthi_fault_arm(STHI_FAULT_ALLOC, n, true);
            assert_ok(fetch_some(&w, 10));
            world_close(&w);
        }
}

static void nothing_stays_behind(void **state) {
    long live = sthi_alloc_live();
    int descriptors = open_descriptors();
    for (int way = 0; way < STH_READ_WAY_COUNT; way++) {
        world w;
        (void)world_open(&w, *state, (sth_read_way)way);
        assert_ok(fetch_some(&w, 3));
        world_close(&w);
    }
    assert_int_equal(sthi_alloc_live(), live);
    assert_int_equal(open_descriptors(), descriptors);
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, temp_setup, temp_teardown)
    const struct CMUnitTest tests[] = {
        CASE(every_way_gives_the_files_bytes),
        CASE(the_way_is_found_by_trying),
        CASE(a_file_that_left_the_cache_is_read_around_it),
        CASE(failing_reads_give_an_error_or_the_right_bytes),
        CASE(a_truncated_file_is_refused),
        CASE(a_replaced_file_keeps_its_bytes),
        CASE(neighbours_do_not_touch_each_other),
        CASE(no_memory_is_a_slower_read),
        CASE(nothing_stays_behind),
    };
    return cmocka_run_group_tests_name("fetch", tests, NULL, NULL);
}
