/* What runtimes say to the log: which plan came into force and why, by no lock of the library's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/memory.h"
#include "stagehand/log.h"
#include "stream/world.h"

enum { UNITS = 6, HEARD = 32 };
static const uint64_t SIZES[UNITS] = {40960, 12288, 65536, 8192, 40960, 24576};
static const uint32_t FORWARD[UNITS] = {0, 1, 2, 3, 4, 5}, BACKWARD[UNITS] = {5, 4, 3, 2, 1, 0};
enum { BUDGET = 140000 };

typedef struct heard {
    sth_runtime *runtime; /* that is asked while a message is heard */
    sth_log_level level[HEARD];
    char text[HEARD][512];
    int count;
} heard;

static void hear(void *context, sth_log_level level, const char *message) {
    heard *h = context;
    sth_runtime_stats stats;
    assert_true(h->count < HEARD && strlen(message) < sizeof h->text[0]);
    if (h->runtime) assert_int_equal(sth_runtime_stats_get(h->runtime, &stats), STH_OK);
    h->level[h->count] = level;
    strcpy(h->text[h->count++], message);
}

static void ok(sth_status rc) {
    if (rc != STH_OK) fail_msg("%s: %s", sth_status_name(rc), sth_last_error()->message);
}

static bool said(const heard *h, sth_log_level level, const char *part) {
    for (int i = 0; i < h->count; i++)
        if (h->level[i] == level && strstr(h->text[i], part)) return true;
    return false;
}

static void open_world(world *w) {
    world_spec spec = world_default(UNITS, SIZES, BUDGET);
    spec.name = "flux";
    ok(world_open(w, &spec));
}

static void steps(world *w, const uint32_t *order, int count) {
    for (int i = 0; i < count; i++) ok(world_step(w, order, UNITS, 20000));
}

static void a_seal_says_what_streams(void **state) {
    (void)state;
    heard h = {0};
    world w;
    sth_log_set(hear, &h, STH_LOG_INFO);
    open_world(&w);
    uint32_t resident = 0;
    for (uint32_t i = 0; i < UNITS; i++) resident += w.runtime->units[i].resident;
    char wanted[64];
    snprintf(wanted, sizeof wanted, "'flux' streams: %u of %u units (", UNITS - resident, UNITS);
    assert_int_equal(h.count, 1);
    assert_true(said(&h, STH_LOG_INFO, wanted));
    sth_log_set(NULL, NULL, STH_LOG_INFO);
    world_close(&w);
}

static void changes_of_plan_name_their_reasons(void **state) {
    (void)state;
    heard h = {0};
    world w;
    open_world(&w);
    sth_log_set(hear, &h, STH_LOG_DEBUG);
    h.runtime = w.runtime;
    steps(&w, BACKWARD, 3);
    assert_true(said(&h, STH_LOG_INFO, "because the order of a step is known: "));
    assert_false(said(&h, STH_LOG_INFO, "in another order"));
    steps(&w, FORWARD, 3);
    assert_true(said(&h, STH_LOG_INFO, "because steps use its units in another order: "));
    steps(&w, FORWARD, 9);
    assert_true(said(&h, STH_LOG_DEBUG, "keeps its plan"));
    ok(sth_runtime_set_budget(w.runtime, BUDGET + 40960));
    assert_true(said(&h, STH_LOG_INFO, "because the budget changed: "));
    sth_log_set(NULL, NULL, STH_LOG_DEBUG);
    world_close(&w);
}

static void below_the_least_level_nothing_is_said(void **state) {
    (void)state;
    heard h = {0};
    world w;
    sth_log_set(hear, &h, STH_LOG_WARNING);
    open_world(&w);
    steps(&w, BACKWARD, 4);
    world_close(&w);
    assert_int_equal(h.count, 0);
    sth_log_set(NULL, NULL, STH_LOG_DEBUG);
}

static void nothing_is_kept_while_nobody_hears(void **state) {
    (void)state;
    world w;
    open_world(&w);
    steps(&w, BACKWARD, 4);
    assert_null(w.runtime->telemetry.news);
    world_close(&w);
}

/* A message that cannot be made is left out; the step is as it was. */
static void without_memory_steps_go_on(void **state) {
    (void)state;
    heard h = {0};
    world w;
    open_world(&w);
    sth_log_set(hear, &h, STH_LOG_INFO);
    steps(&w, FORWARD, 1);
    sthi_message *list = NULL;
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, false);
    sthi_log_keep(&list, STH_LOG_INFO, "text");
    sthi_fault_disarm_all();
    assert_null(list);
    sth_log_set(NULL, NULL, STH_LOG_DEBUG);
    world_close(&w);
}

/* Nobody takes along what a list has no room for. */
static void a_list_keeps_the_first_messages(void **state) {
    (void)state;
    heard h = {0};
    long live = sthi_alloc_live();
    sthi_message *list = NULL;
    sth_log_set(hear, &h, STH_LOG_INFO);
    for (int i = 0; i < 20; i++) sthi_log_keep(&list, STH_LOG_INFO, "message %d", i);
    sthi_log_deliver(list);
    assert_int_equal(h.count, 16);
    assert_string_equal(h.text[0], "message 0");
    assert_string_equal(h.text[15], "message 15");
    list = NULL;
    sthi_log_keep(&list, STH_LOG_INFO, "unsaid");
    sthi_log_drop(list);
    assert_int_equal(h.count, 16);
    assert_int_equal(sthi_alloc_live(), live);
    sth_log_set(NULL, NULL, STH_LOG_DEBUG);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_seal_says_what_streams),
        cmocka_unit_test(changes_of_plan_name_their_reasons),
        cmocka_unit_test(below_the_least_level_nothing_is_said),
        cmocka_unit_test(nothing_is_kept_while_nobody_hears),
        cmocka_unit_test(without_memory_steps_go_on),
        cmocka_unit_test(a_list_keeps_the_first_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
