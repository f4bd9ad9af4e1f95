/* Natural order: a list in its order, every pair of it both ways. */
#include "base/natural.h"

#include "support/check.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static int sign(int n) { return (n > 0) - (n < 0); }

static void names_are_in_the_order_that_people_expect(void **state) {
    (void)state;
    static const char *const sorted[] = {
        "",
        "0", "1", "01.", "2", "09", "010", "10", "18446744073709551616", "18446744073709551617",
        "a", "a.", "a.b", "a.b.c", "a.c", "a\x01" "b", "a\x02" "b", "a-b", /* a part ends before all other characters */
        "a1", "a1.b", "a1b", "a2", "a10", "a010b", "a10c", "ab",
        "layers.2.q", "layers.02.r", "layers.9", "layers.10.a", "layers.10.b",
        "x\xc3\xa9",
    };
    for (size_t i = 0; i < COUNT(sorted); i++)
        for (size_t j = 0; j < COUNT(sorted); j++) {
            int order = sign(sthi_compare_natural(sorted[i], sorted[j]));
            if (order != (i > j) - (i < j)) fail_msg("'%s' against '%s' gave %d", sorted[i], sorted[j], order);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(names_are_in_the_order_that_people_expect)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
