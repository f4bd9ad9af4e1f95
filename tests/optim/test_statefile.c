/* The state's file: never one that is there, nothing left behind, full disks and limits as values. */
#define _GNU_SOURCE
#include "support/check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "optim/statefile.h"

static char folder[] = "/tmp/stagehand-statefile-XXXXXX";

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}
static int drop_folder(void **state) {
    (void)state;
    return rmdir(folder); /* fails where a test left a file behind */
}

static char *inside(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int files_in_folder(void) {
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    int n = -2; /* . and .. */
    while (readdir(dir)) n++;
    closedir(dir);
    return n;
}

static void keeps_what_is_written_and_leaves_no_name(void **state) {
    (void)state;
    const char *paths[] = {folder, inside("state")};
    for (int i = 0; i < 2; i++) {
        sthi_statefile file;
        assert_ok(sthi_statefile_open(paths[i], &file));
        assert_int_equal(files_in_folder(), 0);
        struct stat st;
        assert_int_equal(fstat(file.fd, &st), 0);
        assert_int_equal(st.st_mode & 0777, 0600);
        assert_true(fcntl(file.fd, F_GETFD) & FD_CLOEXEC);
        uint64_t first, second;
        assert_ok(sthi_statefile_grow(&file, 5000, &first));
        assert_ok(sthi_statefile_grow(&file, 100, &second));
        assert_int_equal(first, 0);
        assert_int_equal(second, 8192);
        assert_int_equal(fstat(file.fd, &st), 0);
        assert_int_equal(st.st_size, 12288);
        assert_true(st.st_blocks * 512 >= 12288);
        char bytes[100] = "text", back[100];
        assert_ok(sthi_statefile_read(&file, second, back, sizeof back));
        for (size_t b = 0; b < sizeof back; b++) assert_int_equal(back[b], 0);
        assert_ok(sthi_statefile_write(&file, second, bytes, sizeof bytes));
        assert_ok(sthi_statefile_read(&file, second, back, sizeof back));
        assert_memory_equal(bytes, back, sizeof back);
        assert_status(sthi_statefile_read(&file, 12200, back, sizeof back), STH_IO);
        assert_non_null(strstr(sth_last_error()->message, "ends early"));
        sthi_statefile_close(&file);
        sthi_statefile_close(&file);
    }
}

static void refuses_what_is_there_already(void **state) {
    (void)state;
    sthi_statefile file;
    char *path = inside("there");
    FILE *there = fopen(path, "w");
    fputs("mine", there);
    fclose(there);
    assert_status(sthi_statefile_open(path, &file), STH_INVALID_ARGUMENT);
    assert_non_null(strstr(sth_last_error()->message, "exists already"));
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 4);
    assert_int_equal(unlink(path), 0);

    assert_int_equal(symlink("/nowhere/at/all", path), 0);
    assert_status(sthi_statefile_open(path, &file), STH_INVALID_ARGUMENT);
    assert_int_equal(unlink(path), 0);
    assert_status(sthi_statefile_open("/nowhere/at/all", &file), STH_NOT_FOUND);

    /* Names in a folder that are taken already are passed over. */
    char taken[160];
    snprintf(taken, sizeof taken, "%s/stagehand-adamw-%ld-0", folder, (long)getpid());
    fclose(fopen(taken, "w"));
    assert_ok(sthi_statefile_open(folder, &file));
    sthi_statefile_close(&file);
    assert_int_equal(unlink(taken), 0);
}

static void limits_and_full_disks_are_errors(void **state) {
    (void)state;
    sthi_statefile file;
    uint64_t offset = 77;
    assert_ok(sthi_statefile_open(folder, &file));
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 1 << 20;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    sth_status status = sthi_statefile_grow(&file, 2 << 20, &offset); /* would end the process by SIGXFSZ */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, STH_IO);
    assert_non_null(strstr(sth_last_error()->message, "RLIMIT_FSIZE"));
    sthi_fault_arm(STHI_FAULT_WRITE, 1, false);
    assert_status(sthi_statefile_grow(&file, 4096, &offset), STH_IO);
    assert_int_equal(sth_last_error()->native_code, ENOSPC);
    assert_non_null(strstr(sth_last_error()->message, "no room for 4.00 KiB"));
    assert_int_equal(offset, 77);
    assert_status(sthi_statefile_grow(&file, UINT64_MAX - 5, &offset), STH_INVALID_ARGUMENT);
    assert_ok(sthi_statefile_grow(&file, 4096, &offset));
    assert_int_equal(offset, 0);
    sthi_statefile_close(&file);
}

static void a_failed_open_leaves_nothing(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    sthi_statefile file;
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, false);
    assert_status(sthi_statefile_open(folder, &file), STH_OUT_OF_HOST_MEMORY);
    sthi_fault_disarm_all();
    assert_int_equal(sthi_alloc_live(), live);
    assert_int_equal(files_in_folder(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_what_is_written_and_leaves_no_name),
        cmocka_unit_test(refuses_what_is_there_already),
        cmocka_unit_test(limits_and_full_disks_are_errors),
        cmocka_unit_test(a_failed_open_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
