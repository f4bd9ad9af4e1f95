/* The state table of units against the list in the header: every pair of states, and what a move says. */
#include <string.h>

#include "core/unit_state.h"
#include "support/check.h"

static bool listed(sth_unit_state a, sth_unit_state b) {
#define EDGE(from, to, when) \
    if (a == STH_UNIT_STATE_##from && b == STH_UNIT_STATE_##to) return true;
    STHI_UNIT_EDGE_LIST(EDGE)
#undef EDGE
    return false;
}

static void only_listed_moves_are_allowed(void **state) {
    (void)state;
    int allowed = 0;
    for (int a = 0; a < STH_UNIT_STATE_COUNT; a++)
        for (int b = 0; b < STH_UNIT_STATE_COUNT; b++) {
            sth_unit_state at = (sth_unit_state)a, to = (sth_unit_state)b;
            bool want = listed(at, to);
            allowed += want;
            assert_int_equal(sthi_unit_edge_allowed(at, to), want);
            assert_status(sthi_unit_move(&at, to, "blocks.7"), want ? STH_OK : STH_INTERNAL);
            assert_int_equal(at, want ? to : (sth_unit_state)a);
        }
    assert_int_equal(STH_UNIT_STATE_COUNT, 6);
    assert_int_equal(allowed, 10);
}

static void a_refused_move_names_unit_and_states(void **state) {
    (void)state;
    sth_unit_state at = STH_UNIT_STATE_UNLOADED;
    assert_status(sthi_unit_move(&at, STH_UNIT_STATE_GPU_READY, "blocks.7"), STH_INTERNAL);
    assert_non_null(strstr(sth_last_error()->message, "blocks.7"));
    assert_non_null(strstr(sth_last_error()->message, "unloaded"));
    assert_non_null(strstr(sth_last_error()->message, "gpu_ready"));
    assert_string_equal(sth_last_error()->object, "blocks.7");
}

/* From every state a unit can get back to unloaded, and from there to ready: nothing is a dead end. */
static void every_state_leads_on(void **state) {
    (void)state;
    bool reach[STH_UNIT_STATE_COUNT][STH_UNIT_STATE_COUNT];
    for (int a = 0; a < STH_UNIT_STATE_COUNT; a++)
        for (int b = 0; b < STH_UNIT_STATE_COUNT; b++)
            reach[a][b] = sthi_unit_edge_allowed((sth_unit_state)a, (sth_unit_state)b);
    for (int k = 0; k < STH_UNIT_STATE_COUNT; k++)
        for (int a = 0; a < STH_UNIT_STATE_COUNT; a++)
            for (int b = 0; b < STH_UNIT_STATE_COUNT; b++)
                if (reach[a][k] && reach[k][b]) reach[a][b] = true;
    for (int a = 0; a < STH_UNIT_STATE_COUNT; a++)
        for (int b = 0; b < STH_UNIT_STATE_COUNT; b++) assert_true(reach[a][b]);
}

static void names_are_those_of_the_list(void **state) {
    (void)state;
#define NAME(name, text) assert_string_equal(sthi_unit_state_name(STH_UNIT_STATE_##name), text);
    STH_UNIT_STATE_LIST(NAME)
#undef NAME
    assert_string_equal(sthi_unit_state_name(STH_UNIT_STATE_COUNT), "?");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_listed_moves_are_allowed),
        cmocka_unit_test(a_refused_move_names_unit_and_states),
        cmocka_unit_test(every_state_leads_on),
        cmocka_unit_test(names_are_those_of_the_list),
    };
    return cmocka_run_group_tests_name("residency", tests, NULL, NULL);
}
