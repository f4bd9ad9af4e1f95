/* Files of checkpoints, opened for reading once; ranges by place. */
#include "base/fault.h"
#include "base/memory.h"
#include "store/opened.h"
#include "store/tempfiles.h"
#include "support/check.h"

static sth_checkpoint *open_model(const char *folder, const char *name) {
    sth_checkpoint *checkpoint;
    const char *path = temp_path(folder, name);
    write_safetensors(path, "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", 8);
    assert_ok(sth_checkpoint_open(path, &checkpoint));
    return checkpoint;
}

static void a_file_is_opened_once_and_its_record_stays(void **state) {
    sth_checkpoint *one = open_model(*state, "one.safetensors"), *two = open_model(*state, "two.safetensors");
    sth_file_range ranges[2] = {{.file = 0, .bytes = 4}, {.file = 0, .file_offset = 4, .bytes = 4}};
    sthi_opened opened = {0};
    assert_null(sthi_opened_files(&opened, one));
    assert_null(sthi_opened_nth(&opened, 0));
    assert_ok(sthi_opened_add(&opened, one, NULL, 0));
    sthi_access *files = sthi_opened_files(&opened, one);
    assert_non_null(files);
    assert_null(sthi_opened_nth(&opened, 0)); /* no range names it */
    assert_ok(sthi_opened_add(&opened, one, ranges, 2));
    assert_ok(sthi_opened_add(&opened, two, ranges, 1));
    int fd = files->direct_fd;
    assert_ok(sthi_opened_add(&opened, one, ranges, 2));
    assert_int_equal(files->direct_fd, fd);
    assert_ptr_equal(sthi_opened_files(&opened, one), files);
    assert_ptr_equal(sthi_opened_nth(&opened, 0), files);
    assert_ptr_equal(sthi_opened_nth(&opened, 1), sthi_opened_files(&opened, two));
    assert_null(sthi_opened_nth(&opened, 2));
    assert_ptr_equal(files->file, &one->files[0]);
    sthi_opened_close(&opened);
    assert_int_equal(opened.count, 0);
    assert_ok(sthi_opened_add(&opened, two, ranges, 1)); /* again */
    sthi_opened_close(&opened);
    sth_checkpoint_close(one);
    sth_checkpoint_close(two);
}

static void without_memory_nothing_is_added(void **state) {
    sth_checkpoint *checkpoint = open_model(*state, "one.safetensors");
    long live = sthi_alloc_live();
    sth_file_range range = {.file = 0, .bytes = 8};
    for (uint64_t n = 1; n <= 2; n++) {
        sthi_opened opened = {0};
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = sthi_opened_add(&opened, checkpoint, &range, 1);
        sthi_fault_disarm_all();
        assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY);
        assert_null(sthi_opened_files(&opened, checkpoint));
        sthi_opened_close(&opened);
        assert_int_equal(sthi_alloc_live(), live);
    }
    sth_checkpoint_close(checkpoint);
}

static void ranges_are_sorted_by_place(void **state) {
    (void)state;
    sth_file_range ranges[3] = {{.place_offset = UINT64_C(1) << 40}, {.place_offset = 512}, {.place_offset = 0}};
    sthi_ranges_sort(ranges, 3);
    assert_int_equal(ranges[0].place_offset, 0);
    assert_int_equal(ranges[1].place_offset, 512);
    assert_int_equal(ranges[2].place_offset, UINT64_C(1) << 40);
    sthi_ranges_sort(NULL, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_file_is_opened_once_and_its_record_stays, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(without_memory_nothing_is_added, temp_setup, temp_teardown),
        cmocka_unit_test(ranges_are_sorted_by_place),
    };
    return cmocka_run_group_tests_name("store/opened", tests, NULL, NULL);
}
