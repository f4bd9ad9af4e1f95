/* Arenas that hold equal weights in common: in one process, between processes, with one that is killed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "host/arena.h"
#include "host/common.h"
#include "host/nodeturn.h"
#include "support/check.h"

enum { BYTES = 5 << 20 };

static const uint64_t SECOND = 1000000000;

static sth_device *open_sim(void) {
    sth_sim_options o;
    sth_device *d;
    sth_sim_options_init(&o);
    o.virtual_time = true;
    assert_ok(sthi_device_open("sim", &o, &d));
    return d;
}

/* Other weights in each process that runs these tests: they would find each other's. */
static uint8_t *filled(uint64_t bytes, uint8_t seed) {
    uint8_t *p = sthi_alloc(bytes);
    assert_non_null(p);
    seed = (uint8_t)(seed * 16);
    for (uint64_t i = 0; i < bytes; i++) p[i] = (uint8_t)(i * 7 + i / 4096 + seed);
    uint64_t own[2] = {(uint64_t)getpid(), (uint64_t)sthi_now_ns()};
    memcpy(p + 1024, own, sizeof own);
    return p;
}

static sth_arena *arena_of(sth_device *d, uint32_t most) {
    sth_arena *a;
    assert_ok(sthi_arena_create_common(d, (uint64_t)most * BYTES, UINT64_MAX, most, &a));
    return a;
}

static uint8_t *place(sth_arena *a, const uint8_t *source, uint64_t bytes) {
    sth_arena_part part = {0, source, bytes};
    void *p;
    assert_ok(sthi_arena_place(a, bytes, &part, 1, NULL, &p));
    return p;
}

/* Blocks that files of this process's arenas occupy, each file once; -1: there is no such file. */
static long blocks(void) {
    long sum = -1;
    ino_t seen[16] = {0};
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *d; (d = readdir(folder));) {
        char target[64] = {0};
        struct stat st;
        if (readlinkat(dirfd(folder), d->d_name, target, sizeof target - 1) < 0 ||
            strncmp(target, "/memfd:stagehand-weights", 24) || fstatat(dirfd(folder), d->d_name, &st, 0))
            continue;
        bool known = false;
        for (int i = 0; i < count; i++) known = known || seen[i] == st.st_ino;
        if (known) continue;
        if (count < 16) seen[count++] = st.st_ino;
        sum = (sum < 0 ? 0 : sum) + st.st_blocks;
    }
    closedir(folder);
    return sum;
}

static void equal_weights_are_there_once(void **state) {
    (void)state;
    sth_device *d = open_sim();
    uint8_t *source = filled(BYTES, 1);
    sth_arena *a = arena_of(d, 2), *b = arena_of(d, 2);
    uint8_t *first = place(a, source, BYTES);
    assert_ok(sthi_arena_finish(a));
    long one = blocks();
    uint8_t *second = place(b, source, BYTES);
    assert_ok(sthi_arena_finish(b));
    assert_int_equal(sthi_arena_found_bytes(a), 0);
    assert_int_equal(sthi_arena_found_bytes(b), BYTES);
    assert_true(blocks() - one <= 8); /* of the second table */
    assert_memory_equal(first, source, BYTES);
    assert_memory_equal(second, source, BYTES);
    assert_memory_equal(sthi_arena_image(b, second), source, BYTES);
    assert_true(sthi_arena_is_pinned(b, second, BYTES));
    assert_ptr_not_equal(sthi_arena_image(b, second), second);
    assert_int_equal(sthi_arena_device_alias(b, second + 5), (uintptr_t)sthi_arena_image(b, second) + 5);
    sthi_arena_release(a);
    assert_memory_equal(second, source, BYTES); /* the writer has gone */
    sthi_arena_release(b);
    assert_int_equal(blocks(), -1);
    sthi_device_release(d);
    sthi_free(source);
}

static void a_write_is_its_writers_alone(void **state) {
    (void)state;
    sth_device *d = open_sim();
    uint8_t *source = filled(BYTES, 2);
    sth_arena *a = arena_of(d, 1), *b = arena_of(d, 1);
    uint8_t *first = place(a, source, BYTES);
    assert_ok(sthi_arena_finish(a));
    uint8_t *second = place(b, source, BYTES);
    assert_ok(sthi_arena_finish(b));
    memset(second + 5000, 99, 3);
    assert_memory_equal(first, source, BYTES);
    assert_memory_equal(sthi_arena_image(a, first), source, BYTES);
    assert_memory_equal(sthi_arena_image(b, second), source, BYTES);
    assert_int_equal(second[5001], 99);
    memset(first, 98, 1); /* nor has who filled it a way to the others */
    assert_int_equal(second[0], source[0]);
    assert_status(sthi_arena_write(a, first, source, 1), STH_INVALID_STATE);
    sthi_arena_release(a);
    sthi_arena_release(b);
    sthi_device_release(d);
    sthi_free(source);
}

static void weights_that_differ_in_a_byte_or_in_their_places_are_apart(void **state) {
    (void)state;
    sth_device *d = open_sim();
    uint8_t *source = filled(BYTES, 3);
    sth_arena *a = arena_of(d, 3), *b = arena_of(d, 3);
    place(a, source, BYTES);
    place(a, source, 4096);
    assert_ok(sthi_arena_finish(a));
    source[BYTES - 1] ^= 1;
    uint8_t *mine = place(b, source, BYTES);
    assert_memory_equal(mine, source, BYTES);
    assert_int_equal(sthi_arena_found_bytes(b), 0);
    sth_arena_part shifted = {512, source, 4096 - 512};
    void *p;
    assert_ok(sthi_arena_place(b, 4096, &shifted, 1, NULL, &p));
    assert_int_equal(sthi_arena_found_bytes(b), 0);
    assert_int_equal(((uint8_t *)p)[0], 0);
    place(b, source, 4096);
    assert_int_equal(sthi_arena_found_bytes(b), 4096);
    assert_ok(sthi_arena_finish(b));
    assert_status(sthi_arena_place(b, 4096, &shifted, 1, NULL, &p), STH_INVALID_STATE);
    sthi_arena_release(a);
    sthi_arena_release(b);
    sthi_device_release(d);
    sthi_free(source);
}

/* Others take weights by the print of what was written, and not by that of what its source had been before. */
static void a_source_that_is_written_meanwhile_ruins_no_print(void **state) {
    (void)state;
    sth_device *d = open_sim();
    uint8_t *source = filled(BYTES, 4);
    sth_arena_part part = {0, source, BYTES};
    uint64_t print[2];
    void *p;
    assert_ok(sthi_common_print(&part, 1, BYTES, print));
    source[17] ^= 1;
    sth_arena *a = arena_of(d, 1), *b = arena_of(d, 1);
    assert_ok(sthi_arena_place(a, BYTES, &part, 1, print, &p));
    assert_ok(sthi_arena_finish(a));
    source[17] ^= 1;
    assert_memory_equal(place(b, source, BYTES), source, BYTES);
    assert_int_equal(sthi_arena_found_bytes(b), 0);
    sthi_arena_release(a);
    sthi_arena_release(b);
    sthi_device_release(d);
    sthi_free(source);
}

static void memory_goes_with_the_last_that_uses_it(void **state) {
    (void)state;
    sth_device *d = open_sim();
    uint8_t *source[2] = {filled(BYTES, 5), filled(BYTES, 6)};
    sth_arena *a = arena_of(d, 2), *b = arena_of(d, 2);
    uint8_t *first[2], *second[2];
    for (int i = 0; i < 2; i++) first[i] = place(a, source[i], BYTES);
    assert_ok(sthi_arena_finish(a));
    for (int i = 0; i < 2; i++) second[i] = place(b, source[i], BYTES);
    assert_ok(sthi_arena_finish(b));
    long both = blocks(), one = BYTES / 512;
    sthi_arena_leave(a, first[0], BYTES);
    assert_int_equal(blocks(), both); /* b has it */
    assert_memory_equal(second[0], source[0], BYTES);
    sthi_arena_leave(b, second[0], BYTES);
    assert_int_equal(blocks(), both - one);
    sthi_arena_leave(b, second[0], BYTES); /* once is enough */
    sthi_arena_retain_range(a, first[1]);
    sthi_arena_release(a); /* a tensor is left */
    sthi_arena_leave(b, second[1], BYTES);
    assert_memory_equal(first[1], source[1], BYTES);
    sthi_arena_release_range(a, first[1]);
    sthi_arena_release(b);
    assert_int_equal(blocks(), -1);
    sthi_device_release(d);
    for (int i = 0; i < 2; i++) sthi_free(source[i]);
}

/* A child that places `source`, finishes if it may, says so and waits for its end. */
static pid_t other_process(const uint8_t *source, bool finishes) {
    int says[2];
    char word;
    assert_int_equal(pipe(says), 0);
    pid_t child = fork();
    if (!child) {
        sth_device *d = open_sim();
        sth_arena *a = arena_of(d, 1);
        place(a, source, BYTES);
        if (finishes) sthi_arena_finish(a);
        (void)!write(says[1], "!", 1);
        for (;;) pause();
    }
    close(says[1]);
    assert_int_equal(read(says[0], &word, 1), 1);
    close(says[0]);
    return child;
}

static void kill_and_reap(pid_t child) {
    int status;
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
}

static void weights_outlive_the_process_that_wrote_them(void **state) {
    (void)state;
    uint8_t *source = filled(BYTES, 7);
    pid_t child = other_process(source, true);
    sth_device *d = open_sim();
    sth_arena *a = arena_of(d, 1);
    uint8_t *mine = place(a, source, BYTES);
    assert_ok(sthi_arena_finish(a));
    assert_int_equal(sthi_arena_found_bytes(a), BYTES);
    kill_and_reap(child);
    assert_memory_equal(sthi_arena_image(a, mine), source, BYTES);
    sth_arena *b = arena_of(d, 1); /* one that comes later finds them by this process */
    place(b, source, BYTES);
    assert_ok(sthi_arena_finish(b));
    assert_int_equal(sthi_arena_found_bytes(b), BYTES);
    sthi_arena_release(a);
    sthi_arena_release(b);
    assert_int_equal(blocks(), -1);
    sthi_device_release(d);
    sthi_free(source);
}

static void *kill_soon(void *arg) {
    usleep(20000); /* the other thread waits by then, or will find nobody: either is right */
    kill(*(pid_t *)arg, SIGKILL);
    return NULL;
}

static void nobody_waits_for_a_process_that_was_killed_in_its_turn(void **state) {
    (void)state;
    uint8_t *source = filled(BYTES, 8);
    pid_t child = other_process(source, false);
    assert_int_equal(sthi_node_turn_take("stagehand-weights", 0), -1);
    sthi_thread killer;
    assert_ok(sthi_thread_start(&killer, "killer", kill_soon, &child));
    sth_device *d = open_sim();
    sth_arena *a = arena_of(d, 1);
    assert_memory_equal(place(a, source, BYTES), source, BYTES);
    assert_ok(sthi_arena_finish(a));
    sthi_thread_join(killer);
    assert_int_equal(waitpid(child, NULL, 0), child);
    int turn = sthi_node_turn_take("stagehand-weights", 60 * (int64_t)SECOND);
    assert_true(turn >= 0);
    sthi_node_turn_end(turn);
    sthi_arena_release(a);
    sthi_device_release(d);
    sthi_free(source);
}

/* What has the name and is no such file: cut off, of other seals, with numbers that lie outside it. */
static void a_file_that_lies_is_passed_by(void **state) {
    (void)state;
    uint8_t *source = filled(BYTES, 9);
    sth_arena_part part = {0, source, BYTES};
    uint64_t print[2], page = sthi_page_size();
    assert_ok(sthi_common_print(&part, 1, BYTES, print));
    sth_device *d = open_sim();
    for (int lie = 0; lie < 7; lie++) {
        /* head: entries, first, count, unused; entry: print, offset, bytes, holders, unused */
        uint64_t table[10] = {1, page, 1, 0, print[0], print[1], page, BYTES, 1, 0};
        if (lie == 0) table[6] = page + 512;
        if (lie == 1) table[6] = UINT64_MAX / page * page;
        if (lie == 2) table[6] = 0;
        if (lie == 3) table[1] = 2 * page;
        if (lie == 4) table[0] = table[2] = UINT64_MAX / 8;
        if (lie == 5) table[8] = 0;
        int fd = memfd_create("stagehand-weights-1", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_int_equal(ftruncate(fd, (off_t)(page + BYTES)), 0);
        assert_int_equal(pwrite(fd, table, sizeof table, 0), sizeof table);
        if (lie != 6) assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
        sth_arena *a = arena_of(d, 1);
        assert_memory_equal(place(a, source, BYTES), source, BYTES);
        assert_int_equal(sthi_arena_found_bytes(a), 0);
        sthi_arena_release(a);
        close(fd);
    }
    sthi_device_release(d);
    sthi_free(source);
}

static void every_failure_of_memory_is_a_status(void **state) {
    (void)state;
    sth_device *d = open_sim();
    uint8_t *source = filled(BYTES, 10);
    sth_arena *there = arena_of(d, 1);
    place(there, source, BYTES);
    assert_ok(sthi_arena_finish(there));
    bool passed = false;
    for (unsigned n = 1; !passed; n++) {
        assert_true(n < 100);
        sth_arena *a = NULL;
        sth_arena_part part = {0, source, BYTES};
        void *p = NULL;
        long before = sthi_alloc_live();
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = sthi_arena_create_common(d, BYTES, UINT64_MAX, 1, &a);
        if (rc == STH_OK) rc = sthi_arena_place(a, BYTES, &part, 1, NULL, &p);
        passed = sthi_fault_seen(STHI_FAULT_ALLOC) < n;
        sthi_fault_disarm_all();
        if (rc == STH_OK) {
            assert_memory_equal(p, source, BYTES); /* copied, where the other arena could not be looked into */
            assert_ok(sthi_arena_finish(a));
        }
        sthi_arena_release(a);
        assert_int_equal(sthi_alloc_live(), before);
    }
    sthi_arena_release(there);
    assert_int_equal(blocks(), -1);
    sthi_device_release(d);
    sthi_free(source);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_weights_are_there_once),
        cmocka_unit_test(a_write_is_its_writers_alone),
        cmocka_unit_test(weights_that_differ_in_a_byte_or_in_their_places_are_apart),
        cmocka_unit_test(a_source_that_is_written_meanwhile_ruins_no_print),
        cmocka_unit_test(memory_goes_with_the_last_that_uses_it),
        cmocka_unit_test(weights_outlive_the_process_that_wrote_them),
        cmocka_unit_test(nobody_waits_for_a_process_that_was_killed_in_its_turn),
        cmocka_unit_test(a_file_that_lies_is_passed_by),
        cmocka_unit_test(every_failure_of_memory_is_a_status),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
