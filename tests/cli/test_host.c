/* What the tool reads from /proc and /sys, in folders made up like them, and the natural order of names. */
#define _GNU_SOURCE
#include "../../cli/host.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../../cli/units.h"
#include "support/check.h"
#include "stagehand/util.h"

static char root[64];

static int make_root(void **state) {
    (void)state;
    snprintf(root, sizeof root, "/tmp/sth-host-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw) {
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

static int remove_root(void **state) {
    (void)state;
    return nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Writes root/path, with the folders on the way. */
static void put(const char *path, const char *text) {
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static host_facts look(void) {
    host_facts facts;
    host_look(root, &facts);
    return facts;
}

static void nothing_to_read_leaves_facts_unknown(void **state) {
    (void)state;
    host_facts h = look();
    assert_int_equal(h.ram_total, 0);
    assert_true(h.container_limit == HOST_UNLIMITED);
    assert_false(h.wsl);
}

static void memory_is_read_in_kilobytes(void **state) {
    (void)state;
    put("/proc/meminfo", "MemTotal:   2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\n");
    host_facts h = look();
    assert_int_equal(h.ram_total, 2 << 20);
    assert_int_equal(h.ram_available, 1 << 20);
}

static void wsl_is_known_by_its_kernel(void **state) {
    (void)state;
    put("/proc/version", "Linux version 5.15.90.1-microsoft-standard-WSL2 (oe-user@oe-host)\n");
    assert_true(look().wsl);
    put("/proc/version", "Linux version 6.1.0-amd64 (debian-kernel@lists.debian.org)\n");
    assert_false(look().wsl);
}

static void the_tightest_group_on_the_way_up_counts(void **state) {
    (void)state;
    put("/proc/self/cgroup", "0::/user/app\n");
    put("/sys/fs/cgroup/user/app/memory.max", "max\n");
    assert_true(look().container_limit == HOST_UNLIMITED);
    put("/sys/fs/cgroup/user/memory.max", "4096\n");
    put("/sys/fs/cgroup/user/memory.current", "1024\n");
    assert_int_equal(look().container_limit, 4096);
    assert_int_equal(look().container_used, 1024);
    put("/sys/fs/cgroup/user/app/memory.max", "2048\n");
    assert_int_equal(look().container_limit, 2048);
    assert_int_equal(look().container_used, 0);
}

static void a_container_sees_its_own_group_at_the_root(void **state) {
    (void)state;
    put("/proc/self/cgroup", "12:cpu:/docker/ab\n9:memory:/docker/ab\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "8192\n");
    assert_int_equal(look().container_limit, 8192);
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_true(look().container_limit == HOST_UNLIMITED);
}

static void names_compare_as_people_count(void **state) {
    (void)state;
    static const char *const sorted[] = {"a",   "a.b",  "a-b", "h.1",  "h.1.x",
                                         "h.2", "h.09", "h.9", "h.10", "h.10.a"};
    size_t count = sizeof sorted / sizeof *sorted;
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < count; j++) {
            int order = sth_compare_natural(sorted[i], sorted[j]);
            assert_int_equal((order > 0) - (order < 0), (i > j) - (i < j));
        }
    assert_true(sth_compare_natural("18446744073709551616", "18446744073709551617") < 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(nothing_to_read_leaves_facts_unknown),
        CASE(memory_is_read_in_kilobytes),
        CASE(wsl_is_known_by_its_kernel),
        CASE(the_tightest_group_on_the_way_up_counts),
        CASE(a_container_sees_its_own_group_at_the_root),
        CASE(names_compare_as_people_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
