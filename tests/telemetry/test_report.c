/* Reports: what they are made of stands in them, names are escaped, advice has the numbers of its input. */
#include "telemetry/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "support/check.h"

enum { STEPS = 10, UNITS = 3, POINTS = 3 };

static sth_step_metrics steps[STEPS];
static sth_unit_stats units[UNITS];
static sth_curve_point curve[POINTS];
static sth_prediction prediction;

/* A step of 100 ms, 60 of them compute, in 1 GiB; 2 GiB would take 80 ms, 3 GiB the 60. */
static sth_report_input input(void) {
    sth_report_input in = {.size = sizeof in, .title = "flux"};
    for (int i = 0; i < STEPS; i++)
        steps[i] = (sth_step_metrics){.step = i, .step_time_ms = 100, .predicted_ms = 100, .compute_time_ms = 60,
                                      .copy_time_ms = 98, .stall_time_ms = 40, .h2d_bytes = 5 << 20, .prefetch_hits = 3,
                                      .prefetch_misses = 1, .vram_used_mb = 1000, .vram_reserved_mb = 1024};
    units[0] = (sth_unit_stats){.name = "a.weight", .bytes = 1 << 20, .transfer_bytes = 1 << 20, .resident = true};
    units[1] = (sth_unit_stats){.name = "<b> & \"c\"", .bytes = 2 << 20, .transfer_bytes = 1 << 20, .copies = 7,
                                .h2d_ms = 1.25, .compute_ms = 3.5, .stall_ms = 2};
    units[2] = (sth_unit_stats){.name = "d", .bytes = 3 << 20, .transfer_bytes = 3 << 20, .copies = 7};
    for (int i = 0; i < POINTS; i++)
        curve[i] = (sth_curve_point){.budget = (uint64_t)(i + 1) << 30,
                                     .prediction = {.step_ns = (100 - 20 * i) * 1000000, .compute_ns = 60000000}};
    prediction = curve[0].prediction;
    prediction.bound_by = STH_BOUND_LINK;
    in.steps = steps, in.step_count = STEPS, in.units = units, in.unit_count = UNITS;
    in.curve = curve, in.curve_count = POINTS, in.prediction = &prediction;
    in.budget = UINT64_C(1) << 30, in.link_bytes_per_s = 1e9;
    return in;
}

static char *written(const sth_report_input *in, sth_report_form form) {
    char *text = NULL;
    assert_int_equal(sthi_report_write(in, form, &text), STH_OK);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    assert_null(strstr(text, "<script"));
    assert_null(strstr(text, "src="));
    assert_null(strstr(text, "href="));
    return text;
}

static void has(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("no '%s' in the report", part);
}

static void advice_has_the_numbers_of_the_curve(void **state) {
    (void)state;
    sth_report_input in = input();
    char *text = written(&in, STH_REPORT_PAGE);
    has(text, "1.00 GiB more save 20.0 ms a step</b> (20 %): a budget of 2.00 GiB is predicted to take 80.0 ms.");
    has(text, "With 3.00 GiB compute alone bounds the step, at 60.0 ms.");
    has(text, "Compute waits 40.0 ms of 100.0 ms a step for copies.");
    assert_null(strstr(text, "could be given away"));
    assert_null(strstr(text, "than predicted ("));
    sthi_free(text);
    in.budget = UINT64_C(3) << 30;
    curve[1].prediction.step_ns = 60000000;
    text = written(&in, STH_REPORT_PAGE);
    has(text, "More memory changes little: compute bounds the step already.");
    has(text, "1.00 GiB could be given away: a budget of 2.00 GiB is predicted to take as long.");
    sthi_free(text);
}

static void advice_says_where_predictions_are_off_and_files_set_the_pace(void **state) {
    (void)state;
    sth_report_input in = input();
    for (int i = 0; i < STEPS; i++) steps[i].predicted_ms = 80, steps[i].host_waits = 12, steps[i].file_bytes = 3 << 20;
    char *text = written(&in, STH_REPORT_PAGE);
    has(text, "Steps take 25 % longer than predicted (100.0 ms, not 80.0).");
    has(text, "The host waits 12 times a step");
    has(text, "(3.00 MiB read)");
    sthi_free(text);
}

static void nothing_to_advise_is_said(void **state) {
    (void)state;
    sth_report_input in = input();
    for (int i = 0; i < STEPS; i++) steps[i].stall_time_ms = 0;
    in.curve_count = 0;
    char *text = written(&in, STH_REPORT_PAGE);
    has(text, "Nothing stands out.");
    sthi_free(text);
}

static void units_stand_in_the_table_and_names_are_escaped(void **state) {
    (void)state;
    sth_report_input in = input();
    in.title = "<x>";
    char *text = written(&in, STH_REPORT_PAGE);
    has(text, "<h1>&lt;x&gt;</h1>");
    has(text, "<tr><td>&lt;b&gt; &amp; &quot;c&quot;</td><td>2.00 MiB</td><td>streams</td><td>7</td><td>1.250</td>"
              "<td>1.049</td><td>3.500</td><td>2.000</td></tr>");
    has(text, "1 of 3 units stay on the device, 1.00 MiB;");
    has(text, "2 stream, 5.00 MiB.");
    assert_null(strstr(text, "<b> &"));
    sthi_free(text);
}

static void means_leave_out_the_steps_that_learn(void **state) {
    (void)state;
    sth_report_input in = input();
    steps[0].step_time_ms = steps[1].step_time_ms = 90000;
    assert_true(sthi_report_means_of(&in).step_ms == 100);
    assert_int_equal(sthi_report_means_of(&in).steps, STEPS - 2);
    in.step_count = 1; /* there is nothing else */
    assert_true(sthi_report_means_of(&in).step_ms == 90000);
}

static void any_part_may_be_missing(void **state) {
    (void)state;
    sth_report_input all = input();
    for (int which = 0; which < 16; which++) {
        sth_report_input in = all;
        if (which & 1) in.step_count = 0;
        if (which & 2) in.unit_count = 0;
        if (which & 4) in.curve_count = 0;
        if (which & 8) in.prediction = NULL, in.budget = 0, in.link_bytes_per_s = 0;
        char *page = written(&in, STH_REPORT_PAGE), *summary = written(&in, STH_REPORT_SUMMARY);
        assert_true(!strstr(page, "Not known here: ") == !(which & 7));
        assert_null(strstr(summary, "<html"));
        sthi_free(page);
        sthi_free(summary);
    }
}

static void zeros_make_a_page(void **state) {
    (void)state;
    sth_report_input in = input();
    memset(steps, 0, sizeof steps);
    memset(curve, 0, sizeof curve);
    for (int i = 0; i < UNITS; i++) units[i] = (sth_unit_stats){.name = ""};
    sthi_free(written(&in, STH_REPORT_PAGE));
    in.step_count = in.curve_count = in.unit_count = 1;
    sthi_free(written(&in, STH_REPORT_PAGE));
}

static void every_failing_allocation_leaves_nothing(void **state) {
    (void)state;
    sth_report_input in = input();
    long live = sthi_alloc_live();
    char *text = NULL;
    sth_status rc = STH_OUT_OF_HOST_MEMORY;
    for (uint64_t n = 1; rc != STH_OK; n++) {
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        rc = sthi_report_write(&in, STH_REPORT_PAGE, &text);
        sthi_fault_disarm_all();
        assert_int_equal(sthi_alloc_live(), live + (rc == STH_OK));
    }
    sthi_free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(advice_has_the_numbers_of_the_curve),
        cmocka_unit_test(advice_says_where_predictions_are_off_and_files_set_the_pace),
        cmocka_unit_test(nothing_to_advise_is_said),
        cmocka_unit_test(units_stand_in_the_table_and_names_are_escaped),
        cmocka_unit_test(means_leave_out_the_steps_that_learn),
        cmocka_unit_test(any_part_may_be_missing),
        cmocka_unit_test(zeros_make_a_page),
        cmocka_unit_test(every_failing_allocation_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
