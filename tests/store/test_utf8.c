/* UTF-8: every boundary of RFC 3629, and both sides of it. */
#include "store/utf8.h"

#include <string.h>

#include "support/check.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static bool is_text(const char *text) { return sthi_utf8_is_text(text, strlen(text)); }

static void characters_of_every_length_are_text(void **state) {
    (void)state;
    static const char *const table[] = {
        "", "\x01", "@", "a", "\x7f",                    /* one byte */
        "\xc2\x80", "\xdf\xbf",                     /* two */
        "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf", /* three, round the surrogates */
        "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf",     /* four */
        "a\xc3\xa9" "b\xe2\x82\xac" "c\xf0\x9f\x98\x80" "d",
    };
    for (size_t i = 0; i < COUNT(table); i++)
        if (!is_text(table[i])) fail_msg("text %zu was refused", i);
}

static void what_is_no_character_is_refused(void **state) {
    (void)state;
    static const char *const table[] = {
        "\x80", "\xbf", "\xff", "\xfe", "\xf8\x88\x80\x80\x80",         /* no first byte */
        "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf",     /* longer than need be */
        "\xed\xa0\x80", "\xed\xbf\xbf",                                 /* surrogates */
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xf7\xbf\xbf\xbf",     /* beyond U+10FFFF */
        "\xc3(", "\xe2\x82(", "\xe2(\x82", "\xf0\x9f\x98(",             /* something else follows */
        "a\xc3",
    };
    for (size_t i = 0; i < COUNT(table); i++)
        if (is_text(table[i])) fail_msg("text %zu was taken", i);
}

static void a_character_that_is_cut_off_is_refused(void **state) {
    (void)state;
    static const char text[] = "\xf0\x9f\x98\x80";
    assert_true(sthi_utf8_is_text(text, 4));
    for (size_t n = 1; n < 4; n++) assert_false(sthi_utf8_is_text(text, n)); /* the rest is there, and not looked at */
    assert_true(sthi_utf8_is_text(text, 0));
    assert_false(sthi_utf8_is_text("a\xc3\xa9", 2)); /* nor behind another one */
}

static void a_nul_is_no_text(void **state) {
    (void)state;
    assert_false(sthi_utf8_is_text("a\0b", 3));
    assert_true(sthi_utf8_is_text("a\0b", 1));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(characters_of_every_length_are_text),
        cmocka_unit_test(what_is_no_character_is_refused),
        cmocka_unit_test(a_character_that_is_cut_off_is_refused),
        cmocka_unit_test(a_nul_is_no_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
