/* Arguments that are NULL or extreme: refused with a status and a message, or of no effect. The fuzz target `calls`
 * found each. */
#define _GNU_SOURCE
#include "support/check.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "stagehand/stagehand.h"

static void forget_errors(void) { sth_error_set(STH_OK, NULL, 0, NULL, NULL); }

static void null_is_no_crash(void **state) {
    (void)state;
    sth_pack_options_init(NULL);
    assert_null(sth_format_size(1, NULL, 24));
    assert_true(sth_compare_natural(NULL, "a") < 0);
    assert_true(sth_compare_natural("a", NULL) > 0);
    assert_int_equal(sth_compare_natural(NULL, NULL), 0);
}

static void a_conductor_that_is_switched_off_says_that_it_has_no_events(void **state) {
    (void)state;
    sth_conductor_event event;
    forget_errors();
    assert_status(sth_conductor_event_next(NULL, &event), STH_NOT_FOUND);
    assert_int_equal(sth_last_error()->status, STH_NOT_FOUND);
    assert_true(*sth_last_error()->message);
}

static void a_slab_that_does_not_open_leaves_the_output_alone(void **state) {
    (void)state;
    char path[] = "/tmp/stagehand-arguments-XXXXXX.manifest.json";
    int fd = mkstemps(path, 14);
    assert_true(fd >= 0 && write(fd, "{", 1) == 1 && !close(fd));
    sth_quant *slab = (void *)path;
    assert_true(sth_quant_open_if_slab(path, &slab) != STH_OK);
    assert_ptr_equal(slab, path);
    unlink(path);
}

static void a_store_of_no_layers_is_not_found(void **state) {
    (void)state;
    char path[] = "/tmp/stagehand-arguments-XXXXXX.safetensors"; /* of no tensors */
    int fd = mkstemps(path, 12);
    assert_true(fd >= 0 && write(fd, "\2\0\0\0\0\0\0\0{}", 10) == 10 && !close(fd));
    sth_store *store = NULL;
    assert_status(sth_store_files_open(path, NULL, 0, &store), STH_NOT_FOUND);
    assert_non_null(strstr(sth_last_error()->message, path));
    assert_status(sth_store_files_open(path, (const char *const[]){"a", NULL}, 2, &store), STH_INVALID_ARGUMENT);
    assert_null(store);
    unlink(path);
}

/* Their times overflowed; with the slowest ones the planner found nothing, which was INTERNAL. */
static void rates_at_which_a_step_takes_years_are_refused(void **state) {
    (void)state;
    static const struct {
        double link, disk;
        int64_t overhead;
    } slow[] = {{1e-300, 0, 0}, {1e-6, 0, 0}, {1e9, 1e-300, 0}, {1e9, 0, INT64_MAX}};
    const sth_plan_unit units[] = {{.bytes = 1 << 20}, {.bytes = 1 << 20}};
    const sth_plan_use uses[] = {{.unit = 0, .compute_ns = 521000}, {.unit = 1}};
    sth_plan_input in;
    sth_plan_input_init(&in);
    in.units = units;
    in.unit_count = 2;
    in.uses = uses;
    in.use_count = 2;
    in.budget = 1 << 20;
    in.link_bytes_per_s = 1; /* a step takes 24 days */
    sth_plan *plan = NULL;
    assert_ok(sth_plan_create(&in, &plan));
    assert_true(plan->prediction.stall_ns > 0 && plan->prediction.step_ns >= plan->prediction.link_ns);
    sth_plan_destroy(plan);
    for (size_t i = 0; i < sizeof slow / sizeof *slow; i++) {
        in.link_bytes_per_s = slow[i].link;
        in.disk_bytes_per_s = slow[i].disk;
        in.copy_overhead_ns = slow[i].overhead;
        assert_status(sth_plan_create(&in, &plan), STH_INVALID_ARGUMENT);
        assert_non_null(strstr(sth_last_error()->message, "longer than can be counted"));
        assert_int_equal(sth_plan_smallest_budget(&in), 0);
    }
}

static void more_elements_than_any_memory_has_are_refused(void **state) {
    (void)state;
    sth_adamw_options options;
    sth_adamw_options_init(&options);
    options.threads = 1;
    sth_adamw *adamw = NULL;
    assert_ok(sth_adamw_create(&options, &adamw));
    float memory[4] = {0};
    for (uint64_t count = UINT64_C(1) << 60; count; count = count == UINT64_MAX ? 0 : UINT64_MAX) {
        sth_adamw_update update;
        sth_adamw_update_init(&update);
        update.param = update.exp_avg = update.exp_avg_sq = memory;
        update.grad = memory;
        update.step = 1;
        update.count = count;
        assert_status(sth_adamw_submit(adamw, &update, NULL), STH_INVALID_ARGUMENT);
        sth_grad grad = {memory, count, STH_DTYPE_F32};
        double sum;
        assert_status(sth_adamw_sum_squares(adamw, &grad, 1, &sum), STH_INVALID_ARGUMENT);
        assert_status(sth_adamw_scale(adamw, &grad, 1, 2), STH_INVALID_ARGUMENT);
    }
    sth_adamw_destroy(adamw);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(null_is_no_crash),
        cmocka_unit_test(a_conductor_that_is_switched_off_says_that_it_has_no_events),
        cmocka_unit_test(a_slab_that_does_not_open_leaves_the_output_alone),
        cmocka_unit_test(a_store_of_no_layers_is_not_found),
        cmocka_unit_test(rates_at_which_a_step_takes_years_are_refused),
        cmocka_unit_test(more_elements_than_any_memory_has_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
