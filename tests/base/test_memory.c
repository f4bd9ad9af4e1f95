/* Host memory: the count of live blocks is right on every path, overflow and armed faults give NULL. */
#include "base/memory.h"

#include <string.h>

#include "base/fault.h"
#include "support/check.h"

static int begin(void **state) {
    static long live;
    live = sthi_alloc_live();
    *state = &live;
    return 0;
}

/* Every case must give back what it took. */
static int end(void **state) {
    sthi_fault_disarm_all();
    return sthi_alloc_live() == *(long *)*state ? 0 : -1;
}

static void blocks_are_counted_while_they_live(void **state) {
    long before = *(long *)*state;
    void *a = sthi_alloc(10), *b = sthi_zalloc(3, 7), *c = sthi_realloc(NULL, 4, 4);
    char *d = sthi_strdup("text");
    assert_true(a && b && c && d);
    assert_int_equal(sthi_alloc_live(), before + 4);
    sthi_free(a);
    sthi_free(b);
    sthi_free(c);
    sthi_free(d);
    sthi_free(NULL);
    assert_int_equal(sthi_alloc_live(), before);
}

static void zero_bytes_are_still_a_block(void **state) {
    (void)state;
    void *a = sthi_alloc(0), *b = sthi_zalloc(0, 8), *c = sthi_zalloc(8, 0);
    assert_true(a && b && c);
    sthi_free(a);
    sthi_free(b);
    sthi_free(c);
}

static void zalloc_gives_zeros(void **state) {
    (void)state;
    unsigned char *p = sthi_zalloc(1000, 3);
    assert_non_null(p);
    for (int i = 0; i < 3000; i++) assert_int_equal(p[i], 0);
    sthi_free(p);
}

static void products_that_overflow_give_null(void **state) {
    (void)state;
    assert_null(sthi_zalloc(SIZE_MAX / 2, 3));
    assert_null(sthi_realloc(NULL, SIZE_MAX / 2, 3));
    char *p = sthi_strdup("kept");
    assert_non_null(p);
    assert_null(sthi_realloc(p, SIZE_MAX, 2));
    assert_string_equal(p, "kept");
    sthi_free(p);
}

static void growing_keeps_the_contents_and_the_count(void **state) {
    long before = *(long *)*state;
    char *p = sthi_strdup("abcdef");
    char *q = sthi_realloc(p, 100000, 1);
    assert_non_null(q);
    assert_string_equal(q, "abcdef");
    assert_int_equal(sthi_alloc_live(), before + 1);
    q = sthi_realloc(q, 0, 1);
    assert_non_null(q);
    sthi_free(q);
}

static void each_call_fails_when_its_fault_is_armed(void **state) {
    long before = *(long *)*state;
    char *kept = sthi_strdup("kept");
    assert_non_null(kept);
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, true);
    assert_null(sthi_alloc(8));
    assert_null(sthi_zalloc(1, 8));
    assert_null(sthi_realloc(NULL, 1, 8));
    assert_null(sthi_realloc(kept, 100, 8));
    assert_null(sthi_strdup("text"));
    assert_null(sthi_pages_map(4096, 0));
    assert_int_equal(sthi_fault_seen(STHI_FAULT_ALLOC), 6);
    assert_string_equal(kept, "kept");
    assert_int_equal(sthi_alloc_live(), before + 1);
    sthi_free(kept);
}

static void pages_are_zeroed_aligned_and_writable(void **state) {
    (void)state;
    size_t page = sthi_page_size(), bytes = 3 * page;
    assert_true(page >= 512 && (page & (page - 1)) == 0);
    for (int huge = 0; huge < 2; huge++) {
        unsigned char *p = sthi_pages_map(bytes, huge);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % page, 0);
        for (size_t i = 0; i < bytes; i++) assert_int_equal(p[i], 0);
        memset(p, 0xA5, bytes);
        sthi_pages_unmap(p, bytes);
    }
    sthi_pages_unmap(NULL, bytes);
}

static void more_pages_than_the_address_space_give_null(void **state) {
    (void)state;
    assert_null(sthi_pages_map(SIZE_MAX / 2, 0));
}

static void a_mirror_shows_the_same_bytes_twice(void **state) {
    (void)state;
    size_t bytes = 2 * sthi_page_size();
    unsigned char *p = sthi_mirror_map(bytes);
    assert_non_null(p);
    for (size_t i = 0; i < 2 * bytes; i++) assert_int_equal(p[i], 0);
    p[3] = 7;
    p[2 * bytes - 1] = 9;
    assert_int_equal(p[bytes + 3], 7);
    assert_int_equal(p[bytes - 1], 9);
    memset(p + bytes - 10, 0xA5, 20);
    for (int i = 0; i < 10; i++) assert_int_equal(p[i], 0xA5);
    sthi_mirror_unmap(p, bytes);
    sthi_mirror_unmap(NULL, bytes);
}

static void a_mirror_that_cannot_be_gives_null(void **state) {
    (void)state;
    assert_null(sthi_mirror_map(SIZE_MAX - sthi_page_size() + 1));
    assert_null(sthi_mirror_map(sthi_page_size() / 2));
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, false);
    assert_null(sthi_mirror_map(sthi_page_size()));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(blocks_are_counted_while_they_live, begin, end),
        cmocka_unit_test_setup_teardown(zero_bytes_are_still_a_block, begin, end),
        cmocka_unit_test_setup_teardown(zalloc_gives_zeros, begin, end),
        cmocka_unit_test_setup_teardown(products_that_overflow_give_null, begin, end),
        cmocka_unit_test_setup_teardown(growing_keeps_the_contents_and_the_count, begin, end),
        cmocka_unit_test_setup_teardown(each_call_fails_when_its_fault_is_armed, begin, end),
        cmocka_unit_test_setup_teardown(pages_are_zeroed_aligned_and_writable, begin, end),
        cmocka_unit_test_setup_teardown(more_pages_than_the_address_space_give_null, begin, end),
        cmocka_unit_test_setup_teardown(a_mirror_shows_the_same_bytes_twice, begin, end),
        cmocka_unit_test_setup_teardown(a_mirror_that_cannot_be_gives_null, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
