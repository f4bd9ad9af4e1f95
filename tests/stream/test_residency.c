/* Several runtimes on one device: what they occupy together, who gives way, who stays; then random schedules. */
#include "base/memory.h"
#include "runtime/budget.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/share/protect.h"
#include "runtime/step_calls.h"
#include "runtime/units.h"
#include "stagehand/residency.h"
#include "stream/world.h"
#include "support/check.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KIB UINT64_C(1024)

static sth_device *open_device(uint64_t bytes) {
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = bytes;
    sim.virtual_time = true;
    sim.link_bytes_per_s = UINT64_C(1000000000);
    sth_device *device;
    assert_ok(sthi_device_open("sim", &sim, &device));
    return device;
}

/* A model of `units` units of 16 KiB, with a budget in KiB. */
static world_spec spec_of(sth_device *device, const char *name, uint32_t units, uint64_t kib) {
    static const uint64_t sizes[] = {16384, 16384, 16384, 16384, 16384, 16384,
                                     16384, 16384, 16384, 16384, 16384, 16384};
    assert_true(units <= sizeof sizes / sizeof *sizes);
    world_spec s = world_default(units, sizes, kib * KIB);
    s.device = device;
    s.name = name;
    return s;
}

static void open_model(world *w, sth_device *device, const char *name, uint32_t units, uint64_t kib) {
    world_spec s = spec_of(device, name, units, kib);
    assert_ok(world_open(w, &s));
}

static sth_status step(world *w) {
    uint32_t order[16];
    for (uint32_t i = 0; i < w->units; i++) order[i] = i;
    sth_status rc = world_step(w, order, w->units, 20000);
    const char *why;
    if (!sthi_runtime_check(w->runtime, &why)) fail_msg("%s", why);
    return rc;
}

static uint64_t has(world *w) { return sthi_places_total(&w->runtime->places) + w->runtime->options.reserved; }

static sth_residency_info info_of(sth_device *device) {
    sth_residency_info info;
    assert_ok(sth_residency_get(device, &info));
    return info;
}

/* The account says what the runtimes and the device say. */
static void assert_exact(sth_device *device, world *const *worlds, uint32_t count) {
    sth_residency_info info = info_of(device);
    sth_device_info memory;
    uint64_t sum = 0, places = 0;
    const char *why;
    for (uint32_t i = 0; i < count; i++) {
        if (!worlds[i]->runtime) continue;
        assert_int_equal(worlds[i]->runtime->share.member.charge, has(worlds[i]));
        sum += has(worlds[i]);
        places += sthi_places_total(&worlds[i]->runtime->places);
    }
    if (!sthi_account_check(&device->account, &why)) fail_msg("%s", why);
    assert_int_equal(info.occupied, sum);
    assert_ok(sth_device_info_get(device, &memory));
    assert_int_equal(memory.memory_total - memory.memory_free, places);
    assert_true(info.peak <= info.cap);
}

static void runtimes_share_what_the_device_has(void **state) {
    (void)state;
    sth_device *device = open_device(200 * KIB);
    world a, b;
    open_model(&a, device, "a", 6, 96);
    open_model(&b, device, "b", 6, 96); /* both fit: nobody gives way, ever */
    for (int i = 0; i < 4; i++) {
        assert_ok(step(&a));
        assert_ok(step(&b));
    }
    assert_int_equal(has(&a), 96 * KIB);
    assert_int_equal(a.runtime->stats.yields + b.runtime->stats.yields, 0);
    assert_exact(device, (world *const[]){&a, &b}, 2);
    world_close(&a);
    assert_int_equal(info_of(device).occupied, has(&b));
    world_close(&b);
    assert_int_equal(info_of(device).runtimes, 0);
    sthi_device_release(device);
}

static uint64_t budget_of(world *w) { return w->runtime->options.budget; }

static void a_part_of_the_budget_that_the_device_refused_is_asked_for_when_it_is_due(void **state) {
    (void)state;
    const int64_t second = 1000000000;
    sth_device *device = open_device(140 * KIB);
    sth_devptr neighbour;
    world w;
    assert_ok(sth_device_alloc(device, 64 * KIB, &neighbour));
    open_model(&w, device, "cut", 8, 128);
    assert_ok(step(&w));
    uint64_t missing = 128 * KIB - budget_of(&w);
    assert_true(missing > 0 && w.runtime->stats.budget_cuts > 0);
    assert_int_equal(sth_runtime_missing_budget(w.runtime, 0), missing);
    assert_int_equal(sth_runtime_missing_budget(w.runtime, second / 2 - 1), 0);
    assert_ok(sth_runtime_ask_again(w.runtime, second)); /* the neighbour is still there */
    missing = 128 * KIB - budget_of(&w);
    assert_true(missing > 0);
    assert_int_equal(sth_runtime_missing_budget(w.runtime, 2 * second - 1), 0);
    assert_int_equal(sth_runtime_missing_budget(w.runtime, 2 * second), missing);
    sth_device_free(device, neighbour, 64 * KIB);
    assert_ok(sth_runtime_ask_again(w.runtime, 2 * second));
    assert_int_equal(budget_of(&w), 128 * KIB);
    assert_int_equal(sth_runtime_missing_budget(w.runtime, 100 * second), 0);
    assert_ok(sth_runtime_set_budget(w.runtime, 100 * KIB)); /* what the caller sets later is all there is to have */
    assert_int_equal(sth_runtime_missing_budget(w.runtime, 200 * second), 0);
    assert_ok(step(&w));
    world_close(&w);
    sthi_device_release(device);
}

/* Of a card on which a neighbor left `free` bytes; the runtime has run for a while. */
static sth_memory_reading reading_of(world *w, uint64_t free) {
    return (sth_memory_reading){.total = 1024 * KIB, .free = free, .budget = budget_of(w), .want = 1024 * KIB,
                                .steps = 9};
}

static void a_budget_that_is_found_keeps_the_smallest_and_does_not_grow_while_leased(void **state) {
    (void)state;
    sth_device *device = open_device(1024 * KIB);
    world w;
    open_model(&w, device, "model", 12, 160);
    for (int i = 0; i < 3; i++) assert_ok(step(&w));
    uint64_t smallest = sth_runtime_smallest_budget(w.runtime), freed = 1;
    sth_memory_reading plenty = reading_of(&w, 900 * KIB), little = reading_of(&w, 0);
    sth_budget_verdict v;
    assert_ok(sth_runtime_find_budget(w.runtime, &plenty, 0, &v));
    assert_true(v.budget > budget_of(&w) && !v.trim);
    sth_lease lease;
    assert_ok(sth_step_begin(w.runtime));
    assert_ok(sth_unit_acquire(w.runtime, 0, 0, &lease));
    assert_ok(sth_runtime_find_budget(w.runtime, &plenty, 0, &v));
    assert_int_equal(v.budget, budget_of(&w));
    sth_lease_release(w.runtime, &lease);
    assert_ok(sth_step_end(w.runtime));
    little.limit = KIB; /* less than anything works with */
    assert_ok(sth_runtime_find_budget(w.runtime, &little, 0, &v));
    assert_int_equal(v.budget, smallest);
    assert_int_equal(v.why, STH_BUDGET_LEAST);
    assert_ok(sth_runtime_find_budget(w.runtime, &little, 4 * KIB, &v)); /* its caller can give up so much */
    assert_int_equal(v.budget, smallest - 4 * KIB);
    assert_int_equal(sth_runtime_find_budget(w.runtime, NULL, 0, &v), STH_INVALID_ARGUMENT);
    assert_int_equal(sth_runtime_find_budget(NULL, &little, 0, &v), STH_INVALID_ARGUMENT);

    uint64_t had = has(&w);
    assert_int_equal(sth_runtime_budget_without(w.runtime, 16 * KIB, 0, &freed), had - 16 * KIB);
    assert_int_equal(freed, 16 * KIB);
    assert_int_equal(sth_runtime_budget_without(w.runtime, UINT64_MAX, 0, &freed), smallest);
    assert_int_equal(freed, had - smallest);
    assert_int_equal(sth_runtime_budget_without(w.runtime, 0, 0, &freed), 0);
    assert_int_equal(freed, 0);
    assert_int_equal(has(&w), had); /* nothing was changed */
    world_close(&w);
    sthi_device_release(device);
}

static void opening_takes_only_what_is_free(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world a, b, c;
    open_model(&a, device, "a", 5, 80);
    open_model(&b, device, "b", 6, 96); /* 20 KiB are free */
    open_model(&c, device, "c", 6, 96);
    assert_int_equal(has(&a), 80 * KIB);
    assert_true(has(&b) <= 20 * KIB);
    assert_true(c.runtime->share.parked);
    assert_int_equal(a.runtime->stats.yields, 0);
    assert_ok(step(&c)); /* comes, and the idle give way to it */
    assert_int_equal(has(&c), 96 * KIB);
    assert_true(a.runtime->share.parked);
    assert_ok(step(&a)); /* takes back what it wants; c goes on with less */
    assert_int_equal(has(&a), 80 * KIB);
    assert_ok(step(&c));
    assert_ok(step(&a));
    assert_int_equal(has(&a), 80 * KIB); /* and so they stay */
    uint64_t yields = a.runtime->stats.yields + c.runtime->stats.yields;
    for (int i = 0; i < 3; i++) {
        assert_ok(step(&c));
        assert_ok(step(&a));
    }
    assert_int_equal(a.runtime->stats.yields + c.runtime->stats.yields, yields);
    assert_exact(device, (world *const[]){&a, &b, &c}, 3);
    world_close(&a);
    world_close(&b);
    world_close(&c);
    sthi_device_release(device);
}

static uint64_t loaded(world *w) { return w->runtime->stats.h2d_bytes; }

static void a_model_of_one_step_streams_past_one_of_many_steps(void **state) {
    (void)state;
    sth_device *device = open_device(160 * KIB);
    world text, image;
    open_model(&text, device, "text", 9, 144);
    open_model(&image, device, "image", 9, 144);
    for (int call = 0; call < 4; call++) {
        uint64_t before = loaded(&image), own = loaded(&text);
        assert_ok(step(&text)); /* once a call; image runs many steps */
        if (call) assert_true(has(&text) < 144 * KIB && has(&image) > 0);
        /* Each byte once, and what it fetches ahead of a step that is not the next one on the device. */
        if (call) assert_in_range(loaded(&text) - own, 1, 208 * KIB);
        for (int i = 0; i < 5; i++) {
            assert_ok(step(&image));
            assert_int_equal(has(&image), 144 * KIB); /* all that it wants, in each call */
        }
        /* It loads what it lent, once, and nothing else. */
        if (call) assert_in_range(loaded(&image) - before, 1, 112 * KIB);
        assert_exact(device, (world *const[]){&text, &image}, 2);
    }
    world_close(&text);
    world_close(&image);
    sthi_device_release(device);
}

/* No search is made for a plan that there was: each call of a pipeline has its models come and go the same way. */
static void whoever_comes_back_to_as_much_room_has_the_plan_of_before(void **state) {
    (void)state;
    sth_device *device = open_device(160 * KIB);
    world text, image;
    open_model(&text, device, "text", 9, 144);
    open_model(&image, device, "image", 9, 144);
    const sth_plan *of_image = NULL;
    uint32_t kept = 0;
    for (int call = 0; call < 6; call++) {
        assert_ok(step(&text));
        for (int i = 0; i < 5; i++) assert_ok(step(&image));
        kept += image.runtime->planned.plan == of_image;
        of_image = image.runtime->planned.plan;
        assert_null(image.runtime->planned.before.plan);
        assert_exact(device, (world *const[]){&text, &image}, 2);
    }
    assert_true(kept >= 3);
    assert_ok(step(&text));
    assert_ok(sthi_runtime_set_budget(image.runtime, 96 * KIB)); /* while it is away */
    assert_ok(step(&image));
    const sth_plan *less = image.runtime->planned.plan;
    assert_true(less->ring_bytes + (uint64_t)less->prediction.resident_bytes <= 96 * KIB && has(&image) <= 96 * KIB);
    assert_ok(sth_runtime_reserve(text.runtime, STH_PRIORITY_PRIMARY)); /* image has to leave altogether */
    assert_ok(step(&text));
    world_close(&text);
    world_close(&image); /* with a plan that nobody asked for again */
    sthi_device_release(device);
}

static void what_was_lent_comes_back_for_another_plan_too(void **state) {
    (void)state;
    sth_device *device = open_device(160 * KIB);
    world text, image;
    open_model(&text, device, "text", 9, 144);
    open_model(&image, device, "image", 9, 144);
    for (int i = 0; i < 3; i++) assert_ok(step(&image));
    assert_ok(step(&text));
    assert_ok(step(&image));
    assert_ok(step(&text)); /* image has lent a part */
    assert_true(image.runtime->share.lent && !sth_runtime_is_parked(image.runtime));
    assert_ok(sthi_runtime_set_budget(image.runtime, 96 * KIB)); /* counts when it comes */
    assert_ok(sth_runtime_keep_begin(text.runtime));
    for (int i = 0; i < 3; i++) assert_ok(step(&image));
    assert_true(has(&image) <= 96 * KIB);
    sth_runtime_keep_end(text.runtime);
    assert_ok(step(&text));
    assert_ok(sth_runtime_guest_begin(image.runtime));
    assert_ok(step(&text));
    assert_ok(sth_runtime_guest_end(image.runtime, NULL));
    assert_int_equal(has(&image), 0);
    assert_exact(device, (world *const[]){&text, &image}, 2);
    world_close(&text);
    world_close(&image);
    sthi_device_release(device);
}

static void a_primary_larger_than_the_device_reserves_its_plan(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world main, guest;
    open_model(&main, device, "main", 12, 60); /* 192 KiB of weights */
    open_model(&guest, device, "guest", 6, 90);
    assert_ok(step(&main));
    assert_ok(sth_runtime_reserve(main.runtime, STH_PRIORITY_PRIMARY));
    uint64_t held = has(&main);
    assert_true(held <= 60 * KIB);
    assert_int_equal(info_of(device).primary, held);
    assert_ok(sth_runtime_reserve(main.runtime, STH_PRIORITY_PRIMARY)); /* not twice */
    assert_int_equal(info_of(device).primary, held);
    for (int i = 0; i < 3; i++) {
        assert_ok(sth_runtime_guest_begin(guest.runtime));
        assert_true(has(&guest) <= 100 * KIB - held);
        assert_ok(step(&guest));
        assert_ok(step(&main));
        uint64_t left = 1;
        assert_ok(sth_runtime_guest_end(guest.runtime, &left));
        assert_int_equal(left, 0);
        assert_int_equal(has(&guest), 0);
        assert_int_equal(main.runtime->stats.yields, 0);
        assert_exact(device, (world *const[]){&main, &guest}, 2);
    }
    sth_runtime_release(main.runtime);
    sth_runtime_release(main.runtime);
    assert_int_equal(info_of(device).primary, 0);
    assert_int_equal(has(&main), held); /* nobody has asked for it yet */
    world_close(&guest);
    world_close(&main);
    sthi_device_release(device);
}

static void what_does_not_fit_beside_a_primary_says_so(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world main, guest;
    open_model(&main, device, "the main model", 6, 96);
    open_model(&guest, device, "upscaler", 6, 90);
    assert_ok(sth_runtime_reserve(main.runtime, STH_PRIORITY_PRIMARY));
    assert_true(guest.runtime->share.parked);
    uint64_t least = sthi_smallest_budget(guest.runtime);
    sth_status rc = step(&guest);
    const char *text = sth_last_error()->message;
    char number[32];
    assert_int_equal(rc, STH_BUDGET_TOO_SMALL);
    snprintf(number, sizeof number, "(%llu bytes)", (unsigned long long)least);
    assert_non_null(strstr(text, number));
    assert_non_null(strstr(text, "'upscaler' needs"));
    assert_non_null(strstr(text, "(102400 bytes)"));                           /* the cap */
    assert_non_null(strstr(text, "(4096 bytes) for it"));                      /* what is left */
    assert_non_null(strstr(text, "'the main model' has 96.00 KiB (98304 bytes), reserved as PRIMARY"));
    assert_status(sth_runtime_guest_begin(guest.runtime), STH_BUDGET_TOO_SMALL);
    assert_status(sth_runtime_keep_begin(guest.runtime), STH_BUDGET_TOO_SMALL);
    assert_status(sth_runtime_reserve(guest.runtime, STH_PRIORITY_PRIMARY), STH_BUDGET_TOO_SMALL);
    assert_int_equal(guest.runtime->share.member.guests + guest.runtime->share.member.keeps, 0);
    assert_int_equal(guest.runtime->share.member.priority, STH_PRIORITY_NONE);
    assert_int_equal(has(&main), 96 * KIB);
    sth_runtime_release(main.runtime);
    assert_ok(step(&guest));
    world_close(&guest);
    world_close(&main);
    sthi_device_release(device);
}

static void a_secondary_gives_way_last_and_only_to_what_would_fail(void **state) {
    (void)state;
    sth_device *device = open_device(128 * KIB);
    world second, other, asker;
    open_model(&second, device, "second", 5, 80);
    open_model(&other, device, "other", 3, 48);
    open_model(&asker, device, "asker", 5, 80);
    assert_ok(sth_runtime_reserve(second.runtime, STH_PRIORITY_SECONDARY));
    assert_int_equal(info_of(device).secondary, 80 * KIB);
    assert_ok(step(&other));
    assert_ok(step(&asker)); /* works in what is not reserved */
    assert_true(has(&asker) <= 48 * KIB);
    assert_int_equal(second.runtime->stats.yields, 0);
    assert_true(other.runtime->stats.yields >= 1);
    assert_ok(sth_runtime_reserve(asker.runtime, STH_PRIORITY_PRIMARY));
    assert_ok(step(&other)); /* nothing is free, and it cannot work without: now the reservation gives way */
    assert_true(second.runtime->stats.yields >= 1);
    assert_int_equal(asker.runtime->stats.yields, 0);
    assert_ok(step(&second));
    assert_exact(device, (world *const[]){&second, &other, &asker}, 3);
    world_close(&second);
    world_close(&other);
    world_close(&asker);
    sthi_device_release(device);
}

static void keeping_is_counted(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world a, b;
    open_model(&a, device, "a", 5, 80);
    open_model(&b, device, "b", 6, 96);
    assert_ok(sth_runtime_keep_begin(a.runtime));
    assert_ok(sth_runtime_keep_begin(a.runtime));
    sth_runtime_keep_end(a.runtime);
    assert_ok(step(&b));
    assert_int_equal(has(&a), 80 * KIB); /* still in the outer block */
    assert_int_equal(info_of(device).kept, 80 * KIB);
    sth_runtime_keep_end(a.runtime);
    sth_runtime_keep_end(a.runtime); /* one too many does nothing */
    assert_int_equal(info_of(device).kept, 0);
    assert_ok(sthi_runtime_guest_begin(b.runtime));
    assert_ok(sthi_runtime_guest_begin(b.runtime));
    assert_ok(sthi_runtime_guest_end(b.runtime, NULL));
    assert_true(has(&b) > 0);
    assert_ok(sthi_runtime_guest_end(b.runtime, NULL));
    assert_int_equal(has(&b), 0);
    assert_ok(sthi_runtime_guest_end(b.runtime, NULL));
    world_close(&a);
    world_close(&b);
    sthi_device_release(device);
}

static void a_reservation_ends_with_its_runtime(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world a, b;
    open_model(&a, device, "a", 5, 80);
    open_model(&b, device, "b", 6, 96);
    assert_ok(sth_runtime_reserve(a.runtime, STH_PRIORITY_PRIMARY));
    world_close(&a);
    assert_int_equal(info_of(device).primary, 0);
    assert_ok(step(&b));
    assert_int_equal(has(&b), 96 * KIB);
    world_close(&b);
    sthi_device_release(device);
}

static void the_next_model_comes_while_the_last_one_runs(void **state) {
    (void)state;
    sth_device *device = open_device(200 * KIB);
    world now, then;
    open_model(&now, device, "now", 6, 96);
    open_model(&then, device, "then", 6, 96);
    assert_ok(sth_runtime_guest_begin(then.runtime));
    assert_ok(sth_runtime_guest_end(then.runtime, NULL)); /* away from the device */
    uint64_t before = then.runtime->stats.h2d_bytes;
    assert_ok(sth_step_begin(now.runtime));
    assert_ok(world_use(&now, 0, 20000));
    assert_ok(sth_runtime_reserve(then.runtime, STH_PRIORITY_PRIMARY));
    assert_int_equal(then.runtime->stats.h2d_bytes - before, 96 * KIB);
    for (uint32_t i = 1; i < 6; i++) assert_ok(world_use(&now, i, 20000));
    assert_ok(sth_step_end(now.runtime));
    assert_int_equal(now.runtime->stats.yields, 0);
    uint64_t loads = then.runtime->stats.copies;
    assert_ok(step(&then));
    assert_int_equal(then.runtime->stats.copies, loads); /* nothing was left to load */
    world_close(&now);
    world_close(&then);
    sthi_device_release(device);
}

static void who_is_in_a_step_does_not_give_way(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world a, b;
    open_model(&a, device, "a", 6, 96);
    open_model(&b, device, "b", 6, 96);
    assert_ok(sth_step_begin(a.runtime));
    assert_ok(world_use(&a, 0, 20000));
    assert_status(step(&b), STH_BUDGET_TOO_SMALL); /* its own thread's step: waiting would be for ever */
    assert_non_null(strstr(sth_last_error()->message, "in use"));
    for (uint32_t i = 1; i < 6; i++) assert_ok(world_use(&a, i, 20000));
    assert_ok(sth_step_end(a.runtime));
    assert_ok(step(&b));
    world_close(&a);
    world_close(&b);
    sthi_device_release(device);
}

static void leased_places_stay_until_their_leases_end(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world a, b;
    open_model(&a, device, "a", 6, 96);
    open_model(&b, device, "b", 6, 96);
    assert_ok(sth_runtime_guest_begin(a.runtime));
    sth_lease lease;
    assert_ok(sth_unit_acquire(a.runtime, 2, 0, &lease));
    uint64_t left = 0;
    assert_ok(sth_runtime_guest_end(a.runtime, &left));
    assert_true(left >= 16384 && left < 97 * KIB);
    assert_int_equal(a.runtime->share.member.charge, left);
    assert_true(world_right(&a, &lease));
    sth_lease_release(a.runtime, &lease);
    assert_ok(step(&b)); /* asks, and gets the rest as well */
    assert_int_equal(has(&b), 96 * KIB);
    assert_int_equal(has(&a), 0);
    assert_exact(device, (world *const[]){&a, &b}, 2);
    assert_ok(step(&a));
    world_close(&a);
    world_close(&b);
    sthi_device_release(device);
}

static void reserved_bytes_count_and_stay(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world a, b;
    world_spec s = spec_of(device, "a", 4, 84);
    s.reserved = 20 * KIB;
    assert_ok(world_open(&a, &s));
    open_model(&b, device, "b", 6, 96);
    assert_ok(step(&b));
    assert_int_equal(a.runtime->share.member.charge, 20 * KIB); /* its caller's tensors are there still */
    assert_true(has(&b) <= 80 * KIB);
    assert_ok(sth_runtime_guest_begin(a.runtime));
    assert_ok(step(&a));
    assert_ok(sth_runtime_guest_end(a.runtime, NULL));
    assert_ok(sth_runtime_set_reserved(a.runtime, 0));
    assert_int_equal(a.runtime->share.member.charge, 0);
    assert_ok(step(&b));
    assert_int_equal(has(&b), 96 * KIB); /* grown again */
    assert_ok(sth_runtime_reserve(b.runtime, STH_PRIORITY_PRIMARY));
    assert_status(sth_runtime_set_reserved(a.runtime, 20 * KIB), STH_BUDGET_TOO_SMALL);
    sth_runtime_release(b.runtime);
    assert_ok(sth_runtime_set_reserved(a.runtime, 20 * KIB));
    assert_ok(step(&a));
    assert_int_equal(has(&a), 84 * KIB);
    world_close(&a);
    world_close(&b);
    sthi_device_release(device);
}

static sth_status acquire(world *w, uint32_t unit, sth_lease *out) {
    return sth_unit_acquire(w->runtime, unit, 0, out);
}

/* Six units of 16 KiB in 100 KiB, of which 30 are reserved: four are held together, and a fifth has no place but
 * where the soft part of what is reserved would lie. */
static void soft_reserved_bytes_are_given_rather_than_that_a_lease_is_refused(void **state) {
    (void)state;
    for (int soft = 0; soft < 2; soft++) {
        sth_device *device = open_device(200 * KIB);
        world a;
        world_spec s = spec_of(device, "a", 6, 100);
        s.reserved = 30 * KIB;
        assert_ok(world_open(&a, &s));
        if (soft) assert_ok(sth_runtime_soften(a.runtime, 20 * KIB));
        assert_ok(step(&a)); /* which needs none of it */
        assert_int_equal(sth_runtime_reserved(a.runtime), 30 * KIB);
        sth_lease leases[5];
        assert_ok(sth_step_begin(a.runtime));
        for (uint32_t i = 0; i < 4; i++) assert_ok(acquire(&a, i, &leases[i]));
        sth_status rc = acquire(&a, 4, &leases[4]);
        assert_int_equal(rc, soft ? STH_OK : STH_BUDGET_TOO_SMALL);
        assert_int_equal(sth_runtime_reserved(a.runtime), soft ? 10 * KIB : 30 * KIB);
        for (uint32_t i = 0; i < (soft ? 5 : 4); i++) sth_lease_release(a.runtime, &leases[i]);
        assert_ok(sth_step_end(a.runtime));
        assert_ok(step(&a));
        assert_exact(device, (world *const[]){&a}, 1);
        assert_int_equal(sth_runtime_reserved(NULL), 0);
        world_close(&a);
        sthi_device_release(device);
    }
}

/* As when a model comes without its norms, fills what is there, and then brings them. */
static void places_give_way_to_their_own_reserved_bytes(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    world a, b;
    open_model(&a, device, "a", 6, 120);
    open_model(&b, device, "b", 2, 32);
    assert_ok(step(&a));
    assert_int_equal(has(&a), 96 * KIB);
    assert_ok(sth_runtime_set_reserved(a.runtime, 20 * KIB));
    assert_true(has(&a) <= 100 * KIB && a.runtime->options.reserved == 20 * KIB);
    assert_exact(device, (world *const[]){&a, &b}, 2);
    assert_ok(step(&a));
    assert_ok(step(&a));
    assert_true(has(&a) > 80 * KIB);
    assert_ok(sth_runtime_set_reserved(a.runtime, 0));
    assert_ok(step(&a));
    assert_ok(step(&a));
    assert_int_equal(has(&a), 96 * KIB); /* grown again */
    assert_ok(sth_runtime_set_budget(a.runtime, 96 * KIB));
    assert_ok(sth_runtime_set_reserved(a.runtime, 4 * KIB)); /* 4 KiB are free, but not within the budget */
    assert_true(has(&a) <= 96 * KIB);
    assert_exact(device, (world *const[]){&a, &b}, 2);
    world_close(&a);
    world_close(&b);
    sthi_device_release(device);
}

/* A tensor over a weight is kept: places cannot be laid out anew, and nothing may go above the budget silently. */
static void reserved_bytes_do_not_exceed_the_budget_while_a_lease_is_held(void **state) {
    (void)state;
    for (int tight = 0; tight < 2; tight++) { /* the device has room beyond the budget, or none */
        sth_device *device = open_device(tight ? 64 * KIB : 400 * KIB);
        world a;
        sth_lease lease;
        open_model(&a, device, "a", 6, 64);
        assert_ok(step(&a));
        assert_ok(step(&a));
        uint64_t held = has(&a);
        assert_ok(sthi_unit_acquire(a.runtime, 0, 0, &lease));
        assert_ok(sthi_step_pause(a.runtime));
        assert_status(sth_runtime_set_reserved(a.runtime, 24 * KIB), STH_BUDGET_TOO_SMALL);
        assert_non_null(strstr(sth_last_error()->message, "are held"));
        assert_int_equal(has(&a), held);
        assert_exact(device, (world *const[]){&a}, 1);
        sthi_lease_release(a.runtime, &lease);
        assert_ok(sth_runtime_set_reserved(a.runtime, 24 * KIB));
        assert_true(has(&a) <= 64 * KIB);
        assert_ok(step(&a));
        assert_exact(device, (world *const[]){&a}, 1);
        world_close(&a);
        sthi_device_release(device);
    }
}

typedef struct borrower {
    sth_runtime *runtime;
    sth_lease lease;
} borrower;

static void *bring_back(void *arg) {
    borrower *b = arg;
    struct timespec some = {.tv_nsec = 30000000};
    nanosleep(&some, NULL);
    sthi_lease_release(b->runtime, &b->lease);
    return NULL;
}

/* Whose turn it is has done nothing wrong where another thread is at the end of a call. */
static void reserved_bytes_wait_for_leases_that_other_threads_let_go(void **state) {
    (void)state;
    sth_device *device = open_device(400 * KIB);
    world a;
    sthi_thread thread;
    open_model(&a, device, "a", 6, 64);
    assert_ok(step(&a));
    assert_ok(step(&a));
    borrower b = {.runtime = a.runtime};
    assert_ok(sthi_unit_acquire(a.runtime, 0, 0, &b.lease));
    assert_ok(sthi_thread_start(&thread, "borrower", bring_back, &b));
    assert_ok(sth_runtime_set_reserved(a.runtime, 24 * KIB));
    sthi_thread_join(thread);
    assert_true(has(&a) <= 64 * KIB);
    assert_ok(step(&a));
    assert_exact(device, (world *const[]){&a}, 1);
    world_close(&a);
    sthi_device_release(device);
}

static void a_runtime_that_cannot_be_sealed_occupies_nothing(void **state) {
    (void)state;
    sth_device *device = open_device(100 * KIB);
    sth_runtime_options o;
    sth_runtime_options_init(&o);
    o.budget = 8 * KIB;
    sth_runtime *small;
    static uint8_t image[16384];
    sth_unit_desc unit = {.name = "large", .bytes = sizeof image, .host = image};
    uint32_t number;
    assert_ok(sthi_runtime_create(device, &o, &small));
    assert_ok(sthi_runtime_add_unit(small, &unit, &number));
    assert_status(sthi_runtime_seal(small), STH_BUDGET_TOO_SMALL);
    assert_int_equal(info_of(device).occupied, 0);
    assert_int_equal(info_of(device).free, 100 * KIB);
    sthi_runtime_destroy(small);
    sthi_device_release(device);
}

static void the_cap_is_below_the_memory_where_one_is_set(void **state) {
    (void)state;
    sth_device *device = open_device(200 * KIB);
    world a, b;
    assert_ok(sth_residency_set_cap(device, 100 * KIB));
    open_model(&a, device, "a", 6, 96);
    open_model(&b, device, "b", 6, 96);
    assert_ok(step(&a));
    assert_ok(step(&b));
    assert_int_equal(info_of(device).peak, 96 * KIB);
    assert_status(sth_residency_set_cap(device, 90 * KIB), STH_BUDGET_TOO_SMALL);
    assert_ok(sth_residency_set_cap(device, 0));
    assert_int_equal(info_of(device).cap, 200 * KIB);
    assert_ok(step(&a));
    assert_int_equal(has(&a) + has(&b), 192 * KIB);
    world_close(&a);
    world_close(&b);
    sthi_device_release(device);
}

/* What else the process has there may leave less than a model of a pipeline needs. Its step goes above the cap then. */
static void a_model_whose_turn_it_is_exceeds_a_cap_that_was_found(void **state) {
    (void)state;
    for (uint64_t phase = 0; phase < 2; phase++) {
        sth_device *device = open_device(1024 * KIB);
        world a, b;
        open_model(&b, device, "b", 6, 96);
        assert_ok(step(&b));
        open_model(&a, device, "a", 6, 96);
        sth_lease lease;
        assert_ok(sth_step_begin(a.runtime));
        assert_ok(sth_unit_acquire(a.runtime, 2, 0, &lease)); /* its caller keeps it */
        assert_ok(sth_step_end(a.runtime));
        assert_ok(sth_runtime_lend(b.runtime, 1024 * KIB));
        assert_int_equal(has(&b), 0);
        sth_memory_reading none = reading_of(&b, 0);
        sth_budget_verdict v;
        none.phase = phase;
        none.runs = true;
        assert_ok(sth_runtime_find_budget(b.runtime, &none, 0, &v));
        assert_int_equal(info_of(device).cap, info_of(device).occupied); /* nothing is left for it */
        sth_status rc = step(&b);
        if (phase) {
            assert_ok(rc);
            assert_true(has(&b) >= 16 * KIB && has(&b) <= 96 * KIB && has(&a) >= 16 * KIB);
            assert_int_equal(info_of(device).occupied, has(&a) + has(&b));
            assert_true(info_of(device).cap >= info_of(device).occupied);
        } else {
            assert_status(rc, STH_BUDGET_TOO_SMALL);
        }
        assert_true(world_right(&a, &lease));
        sth_lease_release(a.runtime, &lease);
        world_close(&a);
        world_close(&b);
        sthi_device_release(device);
    }
}

/* ---- threads */

enum { THREADS = 3, TURNS = 12, FIXED = 4 * 1024 };

static void *run_guest(void *arg) {
    world *w = arg;
    for (int i = 0; i < TURNS; i++) {
        sth_status rc = sth_runtime_guest_begin(w->runtime);
        if (rc == STH_OK) rc = sth_runtime_set_reserved(w->runtime, FIXED);
        if (rc == STH_BUDGET_TOO_SMALL) rc = STH_OK; /* nothing is held while it asks: somebody was faster */
        if (rc == STH_OK) rc = step(w);
        if (rc == STH_OK) rc = step(w);
        if (rc == STH_OK) rc = sth_runtime_guest_end(w->runtime, NULL);
        if (rc != STH_OK) {
            print_message("turn %d: %s\n", i, sth_last_error()->message);
            return w;
        }
    }
    return NULL;
}

typedef struct sweeper {
    world *worlds;
    atomic_bool stop;
} sweeper;

/* Takes what parked ones have reserved home, as a model does that needs the room. */
static void *sweep(void *arg) {
    sweeper *s = arg;
    while (!atomic_load(&s->stop))
        for (int i = 0; i < THREADS; i++)
            if (sth_runtime_is_parked(s->worlds[i].runtime)) (void)sth_runtime_set_reserved(s->worlds[i].runtime, 0);
    return NULL;
}

/* Any two of them are too large together: they take turns, and wait for each other. */
typedef struct waiter {
    sth_device *device;
    atomic_int begun;
    bool first, in_time, first_then;
} waiter;

static void *wait_for_turn(void *argument) {
    waiter *w = argument;
    assert_ok(sth_residency_turn_begin(w->device));
    assert_ok(sth_residency_turn_begin(w->device)); /* one turn, however often the thread begins it */
    w->first = sth_residency_turn_is_first(w->device);
    atomic_store(&w->begun, 1);
    w->in_time = sth_residency_turn_wait(w->device);
    w->first_then = sth_residency_turn_is_first(w->device);
    sth_residency_turn_end(w->device);
    sth_residency_turn_end(w->device);
    return NULL;
}

static void a_thread_that_came_later_waits_until_the_first_has_ended(void **state) {
    (void)state;
    sth_device *device = open_device(128 * KIB);
    waiter w = {.device = device};
    sthi_thread thread;
    assert_false(sth_residency_turn_wait(device)); /* it has begun none */
    assert_ok(sth_residency_turn_begin(device));
    assert_true(sth_residency_turn_is_first(device) && sth_residency_turn_wait(device));
    assert_ok(sthi_thread_start(&thread, "waiter", wait_for_turn, &w));
    while (!atomic_load(&w.begun)) sched_yield();
    assert_true(sth_residency_turn_is_first(device));
    sth_residency_turn_end(device);
    sthi_thread_join(thread);
    assert_true(!w.first && w.in_time && w.first_then);
    assert_false(sth_residency_turn_is_first(device));
    sthi_device_release(device);
}

static void guests_of_several_threads_take_turns(void **state) {
    (void)state;
    static const uint64_t sizes[] = {16384, 16384, 16384, 16384, 16384, 16384};
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.memory_bytes = 60 * KIB;
    sth_device *device;
    assert_ok(sthi_device_open("sim", &sim, &device));
    world w[THREADS];
    sthi_thread thread[THREADS], home;
    sweeper sweeping = {.worlds = w};
    for (int i = 0; i < THREADS; i++) {
        world_spec s = world_default(6, sizes, 56 * KIB);
        s.flags = 0;
        s.device = device;
        s.name = "guest";
        assert_ok(world_open(&w[i], &s));
    }
    for (int i = 0; i < THREADS; i++) assert_ok(sthi_thread_start(&thread[i], "guest", run_guest, &w[i]));
    assert_ok(sthi_thread_start(&home, "sweep", sweep, &sweeping));
    bool failed = false;
    for (int i = 0; i < THREADS; i++) {
        void *result;
        pthread_join(thread[i], &result);
        failed = failed || result;
    }
    atomic_store(&sweeping.stop, true);
    pthread_join(home, NULL);
    assert_false(failed);
    assert_true(info_of(device).peak <= 60 * KIB);
    assert_exact(device, (world *const[]){&w[0], &w[1], &w[2]}, THREADS);
    for (int i = 0; i < THREADS; i++) world_close(&w[i]);
    assert_int_equal(info_of(device).occupied, 0);
    sthi_device_release(device);
}

/* ---- random schedules */

static uint64_t next(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

enum { MODELS = 4, EVENTS = 60 };

typedef struct game {
    sth_device *device;
    world world[MODELS];
    world *all[MODELS];
    uint32_t keeps[MODELS], guests[MODELS];
    sth_resident_priority priority[MODELS];
    uint64_t before[MODELS]; /* charges before the event */
} game;

static const char *const NAMES[MODELS] = {"a", "b", "c", "d"};

/* Most that the model could have if everybody gave way who must. */
static uint64_t reach(const game *g, uint32_t i) {
    uint64_t others = 0;
    for (uint32_t k = 0; k < MODELS; k++)
        if (k != i && g->world[k].runtime && (g->keeps[k] || g->priority[k] == STH_PRIORITY_PRIMARY))
            others += g->before[k];
    return info_of(g->device).cap - others;
}

/* What comes to the device may be refused only if it does not fit beside what is protected. */
static bool came(const game *g, uint32_t i, sth_status rc) {
    if (rc == STH_OK) return true;
    uint64_t least = sthi_smallest_budget(g->world[i].runtime);
    if (rc != STH_BUDGET_TOO_SMALL || least <= reach(g, i))
        fail_msg("model %s: %s, %llu of %llu needed", NAMES[i], sth_last_error()->message,
                 (unsigned long long)least, (unsigned long long)reach(g, i));
    return false;
}

static void open_random(game *g, uint32_t i, uint64_t *s) {
    world_spec spec = spec_of(g->device, NAMES[i], 2 + (uint32_t)(next(s) % 9), 0);
    spec.budget = (34 + next(s) % 100) * KIB;
    spec.policy = next(s) % 5 ? STH_POLICY_PLANNED : STH_POLICY_STATIC;
    g->keeps[i] = g->guests[i] = 0;
    g->priority[i] = STH_PRIORITY_NONE;
    if (world_open(&g->world[i], &spec) != STH_OK)
        fail_msg("budget %llu: %s", (unsigned long long)spec.budget, sth_last_error()->message);
}

static void event(game *g, uint32_t i, uint64_t *s) {
    world *w = &g->world[i];
    switch (next(s) % 10) {
    case 0:
        if (came(g, i, sth_runtime_keep_begin(w->runtime))) g->keeps[i]++;
        break;
    case 1:
        sth_runtime_keep_end(w->runtime);
        if (g->keeps[i]) g->keeps[i]--;
        break;
    case 2: {
        sth_resident_priority p = (sth_resident_priority)(next(s) % 3);
        if (came(g, i, sth_runtime_reserve(w->runtime, p))) g->priority[i] = p;
        break;
    }
    case 3:
        sth_runtime_release(w->runtime);
        g->priority[i] = STH_PRIORITY_NONE;
        break;
    case 4:
        if (came(g, i, sth_runtime_guest_begin(w->runtime))) g->guests[i]++;
        break;
    case 5:
        assert_ok(sth_runtime_guest_end(w->runtime, NULL));
        if (g->guests[i]) g->guests[i]--;
        if (!g->guests[i] && !g->keeps[i] && !g->priority[i]) assert_int_equal(has(w), w->runtime->options.reserved);
        break;
    case 6:
        if (next(s) % 2 && w->runtime->options.policy == STH_POLICY_PLANNED) {
            sth_status rc = sth_runtime_set_reserved(w->runtime, next(s) % 5 * KIB);
            if (rc != STH_OK) assert_int_equal(rc, STH_BUDGET_TOO_SMALL);
        }
        if (next(s) % 4) break;
        world_close(w);
        open_random(g, i, s);
        break;
    default:
        if (came(g, i, step(w))) assert_int_equal(w->runtime->share.parked, false);
    }
    assert_int_equal(w->runtime->share.member.keeps, g->keeps[i]);
    assert_int_equal(w->runtime->share.member.guests, g->guests[i]);
}

static void play(uint64_t seed) {
    uint64_t s = seed;
    game g = {.device = open_device((110 + next(&s) % 120) * KIB)};
    for (uint32_t i = 0; i < MODELS; i++) {
        g.all[i] = &g.world[i];
        open_random(&g, i, &s);
    }
    for (int n = 0; n < EVENTS; n++) {
        uint32_t i = (uint32_t)(next(&s) % MODELS);
        for (uint32_t k = 0; k < MODELS; k++) g.before[k] = has(g.all[k]);
        event(&g, i, &s);
        for (uint32_t k = 0; k < MODELS; k++) /* what is protected has kept all of its bytes */
            if (k != i && (g.keeps[k] || g.priority[k] == STH_PRIORITY_PRIMARY))
                assert_int_equal(has(g.all[k]), g.before[k]);
        assert_exact(g.device, g.all, MODELS);
    }
    for (uint32_t i = 0; i < MODELS; i++) world_close(&g.world[i]);
    assert_int_equal(info_of(g.device).occupied, 0);
    sthi_device_release(g.device);
}

static void random_schedules_hold_the_cap_and_every_promise(void **state) {
    (void)state;
    const char *one = getenv("STH_RESIDENCY_SEED");
    uint64_t first = one ? strtoull(one, NULL, 10) : 1, last = one ? first : few_under_tsan(10, 60);
    for (uint64_t seed = first; seed <= last; seed++) {
        print_message("# seed %llu\r", (unsigned long long)seed);
        play(seed);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runtimes_share_what_the_device_has),
        cmocka_unit_test(a_part_of_the_budget_that_the_device_refused_is_asked_for_when_it_is_due),
        cmocka_unit_test(a_budget_that_is_found_keeps_the_smallest_and_does_not_grow_while_leased),
        cmocka_unit_test(opening_takes_only_what_is_free),
        cmocka_unit_test(a_model_of_one_step_streams_past_one_of_many_steps),
        cmocka_unit_test(whoever_comes_back_to_as_much_room_has_the_plan_of_before),
        cmocka_unit_test(what_was_lent_comes_back_for_another_plan_too),
        cmocka_unit_test(a_primary_larger_than_the_device_reserves_its_plan),
        cmocka_unit_test(what_does_not_fit_beside_a_primary_says_so),
        cmocka_unit_test(a_secondary_gives_way_last_and_only_to_what_would_fail),
        cmocka_unit_test(keeping_is_counted),
        cmocka_unit_test(a_reservation_ends_with_its_runtime),
        cmocka_unit_test(the_next_model_comes_while_the_last_one_runs),
        cmocka_unit_test(who_is_in_a_step_does_not_give_way),
        cmocka_unit_test(leased_places_stay_until_their_leases_end),
        cmocka_unit_test(reserved_bytes_count_and_stay),
        cmocka_unit_test(soft_reserved_bytes_are_given_rather_than_that_a_lease_is_refused),
        cmocka_unit_test(places_give_way_to_their_own_reserved_bytes),
        cmocka_unit_test(reserved_bytes_do_not_exceed_the_budget_while_a_lease_is_held),
        cmocka_unit_test(a_runtime_that_cannot_be_sealed_occupies_nothing),
        cmocka_unit_test(reserved_bytes_wait_for_leases_that_other_threads_let_go),
        cmocka_unit_test(the_cap_is_below_the_memory_where_one_is_set),
        cmocka_unit_test(a_model_whose_turn_it_is_exceeds_a_cap_that_was_found),
        cmocka_unit_test(a_thread_that_came_later_waits_until_the_first_has_ended),
        cmocka_unit_test(guests_of_several_threads_take_turns),
        cmocka_unit_test(random_schedules_hold_the_cap_and_every_promise),
    };
    return cmocka_run_group_tests_name("stream/residency", tests, NULL, NULL);
}
