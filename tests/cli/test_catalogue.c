/* Predictions of named models on named cards are what a device with those rates does: the simulated
 * one, in virtual time, with a part of the bytes and the same part of the rates. */
#include "support/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../cli/forecast.h"
#include "stagehand/stagehand.h"

/* Bytes and rates of the simulated device: one in so many. */
enum { PART = 512, LEARNING = 8, STEPS = 6 };

#define GB 1000000000ull

typedef struct sim {
    sth_device *device;
    sth_arena *arena;
    sth_runtime *runtime;
} sim;

static uint64_t part_of(uint64_t bytes) { return (bytes / PART + 511) / 512 * 512; }

static void open_sim(sim *s, const forecast *f) {
    sth_sim_options options;
    sth_sim_options_init(&options);
    options.virtual_time = true;
    options.poison = false;
    options.memory_bytes = GB;
    options.link_bytes_per_s = (uint64_t)(f->input.link_bytes_per_s / PART);
    options.copy_latency_ns = f->input.copy_overhead_ns;
    assert_ok(sth_device_open("sim", &options, &s->device));
    sth_runtime_options how;
    sth_runtime_options_init(&how);
    how.budget = f->input.budget / PART;
    how.chunk_bytes = f->input.chunk_bytes / PART;
    how.link_bytes_per_s = f->input.link_bytes_per_s / PART;
    how.read_only = true;
    assert_ok(sth_runtime_create(s->device, &how, &s->runtime));
    uint64_t all = 0;
    for (uint32_t i = 0; i < f->units.count; i++) all += part_of(f->units.unit[i].bytes);
    assert_ok(sth_arena_create(s->device, all, &s->arena));
    for (uint32_t i = 0; i < f->units.count; i++) {
        sth_unit_desc desc = {.name = f->units.unit[i].name, .bytes = part_of(f->units.unit[i].bytes)};
        void *host;
        uint32_t number;
        assert_ok(sth_arena_reserve(s->arena, desc.bytes, &host));
        memset(host, (int)i, desc.bytes);
        desc.host = host;
        desc.arena = s->arena;
        assert_ok(sth_runtime_add_unit(s->runtime, &desc, &number));
    }
    assert_ok(sth_arena_finish(s->arena));
    assert_ok(sth_runtime_seal(s->runtime));
}

static void close_sim(sim *s) {
    sth_runtime_destroy(s->runtime);
    sth_arena_release(s->arena);
    sth_device_close(s->device);
}

static void step(sim *s, const forecast *f) {
    assert_ok(sth_step_begin(s->runtime));
    for (uint32_t i = 0; i < f->units.count; i++) {
        sth_lease lease;
        assert_ok(sth_unit_acquire(s->runtime, i, 0, &lease));
        assert_ok(sth_sim_compute(s->device, 0, f->unit_ns[i]));
        sth_lease_release(s->runtime, &lease);
    }
    assert_ok(sth_step_end(s->runtime));
}

static double run_ms(const forecast *f) {
    sim s = {0};
    open_sim(&s, f);
    for (int i = 0; i < LEARNING; i++) step(&s, f);
    int64_t begun = sth_device_now_ns(s.device);
    for (int i = 0; i < STEPS; i++) step(&s, f);
    double ms = (double)(sth_device_now_ns(s.device) - begun) / STEPS / 1e6;
    close_sim(&s);
    return ms;
}

static forecast predicted(const char *model, const char *on, uint64_t budget) {
    static forecast_request requests[64];
    static int used;
    forecast_request *r = &requests[used++ % 64];
    *r = (forecast_request){.card = card_find(on),  .model = model_find(model), .passes = "infer", .budget = budget,
                            .disk_gb_s = -1,          .link_gb_s = -1,            .compute_ms = -1};
    assert_non_null(r->card);
    assert_non_null(r->model);
    forecast f;
    assert_int_equal(forecast_prepare(r, &f), 0);
    assert_int_equal(forecast_plan(&f), 0);
    return f;
}

static void check(const char *model, const char *on, uint64_t budget) {
    forecast f = predicted(model, on, budget);
    double said = (double)f.plan->prediction.step_ns / 1e6, took = run_ms(&f);
    if (fabs(took - said) > 0.03 * said)
        fail_msg("%s on %s in %.1f GB: predicted %.2f ms, took %.2f ms", model, on, (double)budget / 1e9, said, took);
    forecast_free(&f);
}

#define SOME (int)few_under_tsan(9, 1) /* every how many-th model */

static void predictions_are_what_the_simulated_device_does(void **state) {
    (void)state;
    for (int i = 0; model_at(i); i += SOME) check(model_name(model_at(i)), "rtx4070", 0);
    check("flux", "h200", 8 * GB);
    check("flux", "h200", 12 * GB);
    check("llama8b", "rtx3060", 6 * GB);
    check("sdxl", "rtx5090", 2 * GB);
    check("qwen-image", "rtx4090", 0);
}

static void cards_and_models_are_found_as_people_type_them(void **state) {
    (void)state;
    assert_ptr_equal(card_find("RTX 4070"), card_find("4070"));
    assert_ptr_equal(card_find("rtx4070"), card_find("rtx-4070"));
    assert_null(card_find("rtx"));
    assert_null(card_find(""));
    assert_null(card_find("4071"));
    assert_ptr_equal(model_find("Qwen Image"), model_find("qwen-image"));
    for (int i = 0; card_at(i); i++) assert_ptr_equal(card_find(card_at(i)->name), card_at(i));
    for (int i = 0; model_at(i); i++) assert_ptr_equal(model_find(model_name(model_at(i))), model_at(i));
}

/* A faster card, a wider link or more budget never makes a step longer. */
static void more_is_never_slower(void **state) {
    (void)state;
    const char *const cards[] = {"rtx3060", "rtx4070", "rtx4080", "rtx4090"};
    for (int i = 0; model_at(i); i += SOME) {
        int64_t before = INT64_MAX;
        for (size_t c = 0; c < sizeof cards / sizeof *cards; c++) {
            forecast f = predicted(model_name(model_at(i)), cards[c], 6 * GB);
            assert_true(f.plan->prediction.step_ns <= before);
            before = f.plan->prediction.step_ns;
            forecast_free(&f);
        }
    }
}

static void weights_beyond_ram_are_read_from_the_disk(void **state) {
    (void)state;
    forecast_request r = {.card = card_find("rtx4090"), .model = model_find("qwen-image"), .passes = "infer",
                          .disk_gb_s = -1, .link_gb_s = -1, .compute_ms = -1, .ram = 32 * GB};
    forecast f;
    assert_int_equal(forecast_prepare(&r, &f), 0);
    assert_true(f.disk_assumed && f.ram_bytes <= 32 * GB - 32 * GB / 5);
    assert_true(f.ram_bytes > 24 * GB);
    forecast_free(&f);
    r.disk_gb_s = 5;
    assert_int_equal(forecast_prepare(&r, &f), 0);
    assert_false(f.disk_assumed);
    assert_true(f.input.disk_bytes_per_s == 5e9);
    forecast_free(&f);
    r.ram = 64 * GB;
    assert_int_equal(forecast_prepare(&r, &f), 0);
    assert_true(f.disk_gb_s < 0 && f.ram_bytes == 0);
    forecast_free(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(predictions_are_what_the_simulated_device_does),
        cmocka_unit_test(cards_and_models_are_found_as_people_type_them),
        cmocka_unit_test(more_is_never_slower),
        cmocka_unit_test(weights_beyond_ram_are_read_from_the_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
