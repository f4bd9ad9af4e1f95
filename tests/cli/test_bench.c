/* stagehand bench: which runs there will be, and that no run outlasts the time. The clock is the test's own. */
#define _GNU_SOURCE
#include "support/check.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../cli/bench.h"

#define GB 1000000000.0
enum { RESIDENT, OURS, DIFFUSERS, ACCELERATE };

/* A card with 24 GB and PCIe 4, in a machine with 64 GB. */
static bench_facts card(void) {
    return (bench_facts){
        .vram_free = (uint64_t)(22 * GB),
        .ram_room = (uint64_t)(48 * GB),
        .seconds = 100,
        .rate = {[RATE_UP] = 25 * GB, [RATE_PAGEABLE] = 8 * GB, [RATE_PIN] = 3 * GB, [RATE_COPY] = 10 * GB},
    };
}

static double seconds_of(const bench_run runs[BENCH_RUNS]) {
    const double unknown[BENCH_LENGTHS] = {0};
    double sum = 0;
    for (int i = 0; i < BENCH_RUNS; i++)
        if (!runs[i].why[0]) sum += bench_run_seconds(&runs[i], unknown);
    return sum;
}

static void stacks_are_shares_of_the_vram_where_all_is_plenty(void **state) {
    (void)state;
    bench_facts f = card();
    bench_run runs[BENCH_RUNS];
    f.seconds = 1000;
    bench_plan(&f, runs);
    for (int i = 0; i < BENCH_RUNS; i++) {
        double share = (double)runs[i].weights / (double)f.vram_free * 100;
        assert_string_equal(runs[i].why, "");
        assert_null(runs[i].shrunk);
        assert_true(share <= runs[i].share && share > runs[i].share - 3);
        assert_true((runs[i].budget > 0) == (runs[i].system == OURS));
    }
}

static void all_runs_end_in_time(void **state) {
    (void)state;
    bench_run runs[BENCH_RUNS];
    for (double seconds = 1; seconds < 2000; seconds *= 1.5) {
        for (double slower = 1; slower < 300; slower *= 3) {
            bench_facts f = card();
            f.seconds = seconds;
            for (int i = 0; i < RATE_COUNT; i++) f.rate[i] /= slower;
            bench_plan(&f, runs);
            assert_true(seconds_of(runs) <= seconds);
            for (int i = 0; i < BENCH_RUNS; i++)
                assert_true(runs[i].blocks >= 3 || strstr(runs[i].why, "are the least"));
        }
    }
}

static void unknown_rates_count_as_slow_ones(void **state) {
    (void)state;
    bench_facts f = card(), known = card();
    bench_run runs[BENCH_RUNS], faster[BENCH_RUNS];
    memset(f.rate, 0, sizeof f.rate);
    bench_plan(&f, runs);
    bench_plan(&known, faster);
    assert_true(runs[0].weights < faster[0].weights);
    assert_true(seconds_of(runs) <= f.seconds);
}

static void no_run_holds_more_ram_than_there_is(void **state) {
    (void)state;
    bench_facts f = card();
    bench_run runs[BENCH_RUNS];
    f.seconds = 1e6;
    for (double room = 0; room < 60 * GB; room += GB / 2) {
        f.ram_room = (uint64_t)room;
        bench_plan(&f, runs);
        for (int i = 0; i < BENCH_RUNS; i++) {
            if (runs[i].why[0]) continue;
            double held = (double)runs[i].weights * (runs[i].system == DIFFUSERS ? 2 : 1);
            assert_true(held <= room);
        }
    }
    f.ram_room = (uint64_t)(10 * GB);
    bench_plan(&f, runs);
    assert_non_null(strstr(runs[DIFFUSERS].why, "GB of RAM"));
    assert_string_equal(runs[OURS].why, "");
    assert_non_null(strstr(runs[BENCH_SYSTEMS + OURS].shrunk, "RAM"));
}

static void a_second_stack_that_is_no_larger_is_left_out(void **state) {
    (void)state;
    bench_facts f = card();
    bench_run runs[BENCH_RUNS];
    f.seconds = 1e6;
    f.ram_room = (uint64_t)(4 * GB);
    bench_plan(&f, runs);
    assert_string_equal(runs[OURS].why, "");
    assert_non_null(strstr(runs[BENCH_SYSTEMS + OURS].why, "no larger than that of 30 %"));
}

static void without_a_card_the_stacks_are_small_and_the_peers_left_out(void **state) {
    (void)state;
    bench_facts f = card();
    bench_run runs[BENCH_RUNS];
    f.simulated = true;
    bench_plan(&f, runs);
    for (int i = 0; i < BENCH_RUNS; i++) {
        assert_true(runs[i].weights < 10000000);
        assert_int_equal(runs[i].why[0] != '\0', runs[i].system >= DIFFUSERS);
    }
}

static void computing_counts_once_it_is_known(void **state) {
    (void)state;
    bench_facts f = card();
    bench_run runs[BENCH_RUNS];
    const double unknown[BENCH_LENGTHS] = {0}, known[BENCH_LENGTHS] = {100, 400};
    bench_plan(&f, runs);
    double more = bench_run_seconds(&runs[OURS], known) - bench_run_seconds(&runs[OURS], unknown);
    assert_true(more > 0.499 * runs[OURS].steps && more < 0.501 * runs[OURS].steps);
}

static void ram_is_left_to_others(void **state) {
    (void)state;
    host_facts host = {.ram_available = (uint64_t)(50 * GB), .container_limit = HOST_UNLIMITED};
    assert_int_equal(bench_ram_room(&host), (uint64_t)(40 * GB));
    host.container_limit = (uint64_t)(20 * GB);
    host.container_used = (uint64_t)(15 * GB);
    assert_int_equal(bench_ram_room(&host), (uint64_t)(5 * GB) - ((uint64_t)2 << 30));
    host.container_used = (uint64_t)(21 * GB);
    assert_int_equal(bench_ram_room(&host), 0);
}

/* ---- the process */

/* A second for each look. */
static int64_t tick(void *context) {
    int64_t *now = context;
    return *now += 1000000000;
}

static void start(bench_worker *w, char *script) {
    char *const argv[] = {"/bin/sh", "-c", script, NULL};
    assert_true(bench_worker_start(w, argv));
}

static void a_process_answers_lines(void **state) {
    (void)state;
    bench_worker w;
    int64_t now = 0;
    const bench_clock clock = {tick, &now};
    json_t *answer = NULL;
    start(&w, "echo '{\"hello\":1}'; while read -r line; do echo \"{\\\"got\\\":$line}\"; done");
    assert_int_equal(bench_worker_ask(&w, NULL, INT64_MAX, &clock, &answer), ANSWER_OK);
    assert_int_equal(json_integer_value(json_object_get(answer, "hello")), 1);
    json_decref(answer);
    assert_int_equal(bench_worker_ask(&w, json_pack("[i,i]", 3, 4), INT64_MAX, &clock, &answer), ANSWER_OK);
    assert_int_equal(json_integer_value(json_array_get(json_object_get(answer, "got"), 1)), 4);
    json_decref(answer);
    bench_worker_end(&w);
    assert_int_equal(w.pid, 0);
}

static void a_process_that_does_not_answer_in_time_is_killed(void **state) {
    (void)state;
    bench_worker w;
    int64_t now = 0;
    const bench_clock clock = {tick, &now};
    json_t *answer = NULL;
    start(&w, "trap '' TERM INT; exec sleep 1000");
    pid_t pid = w.pid;
    assert_int_equal(bench_worker_ask(&w, json_object(), 3000000000, &clock, &answer), ANSWER_LATE);
    assert_true(now >= 3000000000 && now <= 4000000000);
    assert_int_equal(kill(pid, 0), -1);
    assert_int_equal(errno, ESRCH);
    assert_int_equal(bench_worker_ask(&w, json_object(), INT64_MAX, &clock, &answer), ANSWER_ENDED);
}

static void a_process_that_ends_says_so(void **state) {
    (void)state;
    bench_worker w;
    int64_t now = 0;
    const bench_clock clock = {tick, &now};
    json_t *answer = NULL;
    start(&w, "printf '{\"half\":'");
    assert_int_equal(bench_worker_ask(&w, NULL, INT64_MAX, &clock, &answer), ANSWER_ENDED);
    char *const nothing[] = {"/does/not/exist", NULL};
    assert_true(bench_worker_start(&w, nothing));
    assert_int_equal(bench_worker_ask(&w, json_object(), INT64_MAX, &clock, &answer), ANSWER_ENDED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stacks_are_shares_of_the_vram_where_all_is_plenty),
        cmocka_unit_test(all_runs_end_in_time),
        cmocka_unit_test(unknown_rates_count_as_slow_ones),
        cmocka_unit_test(no_run_holds_more_ram_than_there_is),
        cmocka_unit_test(a_second_stack_that_is_no_larger_is_left_out),
        cmocka_unit_test(without_a_card_the_stacks_are_small_and_the_peers_left_out),
        cmocka_unit_test(computing_counts_once_it_is_known),
        cmocka_unit_test(ram_is_left_to_others),
        cmocka_unit_test(a_process_answers_lines),
        cmocka_unit_test(a_process_that_does_not_answer_in_time_is_killed),
        cmocka_unit_test(a_process_that_ends_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
