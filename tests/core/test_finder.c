/* A budget that is found: from readings in a world of our own, with its activations, its neighbour and its
 * allocator. */
#include "core/finder.h"
#include "support/check.h"

#include <string.h>

#include "base/random.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

/* A card, a process on it whose allocator holds our places, and a neighbour. */
typedef struct world {
    sthi_finder finder;
    sth_budget_verdict verdict;
    uint64_t total, neighbour;
    uint64_t steady, moving;      /* of the rest of the process: between steps, and on top within one */
    uint64_t ours, outside;       /* in the allocator, and not */
    uint64_t ours_peak;           /* of the former, when it was more since the last reading */
    uint64_t cached, peak, failures, retries;
    uint64_t want, budget, steps, limit;
    double growth;
    uint64_t changes;
} world;

static void ask(world *w) {
    uint64_t held = w->ours + w->steady, reserved = held > w->cached ? held : w->cached;
    if (reserved + w->outside + w->neighbour > w->total) reserved = held; /* it had to give its cache back */
    sth_memory_reading r = {.total = w->total, .free = w->total - w->neighbour - reserved - w->outside,
                            .framework_reserved = reserved, .framework_allocated = held,
                            .framework_peak = w->peak > held ? w->peak : held, .failures = w->failures,
                            .retries = w->retries, .limit = w->limit, .growth = w->growth, .budget = w->budget,
                            .want = w->want, .steps = w->steps};
    sthi_finder_observe(&w->finder, &r, w->ours, w->ours_peak, w->outside, &w->verdict);
    w->ours_peak = 0;
    sthi_finder_share(&w->finder, &r, &w->verdict);
    if (w->verdict.budget != w->budget) w->changes++;
    w->budget = w->verdict.budget;
    w->ours = w->budget - w->outside;
    if (w->verdict.reset_peak) w->peak = 0;
    if (w->verdict.why == STH_BUDGET_NEIGHBOUR || w->verdict.why == STH_BUDGET_FAILED) w->cached = 0;
}

/* A step with its reading before it. False: out of memory. */
static bool step(world *w) {
    ask(w);
    uint64_t use = w->ours + w->steady + w->moving;
    w->steps++;
    if (use + w->outside + w->neighbour > w->total) {
        w->failures++;
        return false;
    }
    if (use > w->peak) w->peak = use;
    if (use > w->cached) w->cached = use;
    return true;
}

static void steps(world *w, int n) {
    for (int i = 0; i < n; i++) assert_true(step(w));
}

static world card(uint64_t want, uint64_t moving) {
    world w = {.total = 24 * GIB, .neighbour = GIB, .moving = moving, .want = want};
    ask(&w);
    return w;
}

static uint64_t left(const world *w) {
    return w->total - w->neighbour - w->ours - w->outside - w->steady - w->moving;
}

static void it_begins_with_half_and_then_fills_the_card(void **state) {
    (void)state;
    world w = card(40 * GIB, 4 * GIB);
    assert_int_equal(w.verdict.why, STH_BUDGET_FIRST);
    assert_true(w.budget < 12 * GIB && w.budget > 10 * GIB);
    steps(&w, 2);
    assert_int_equal(w.verdict.why, STH_BUDGET_FIRST);
    steps(&w, 1);
    assert_int_equal(w.verdict.others, 4 * GIB);
    assert_true(left(&w) >= w.verdict.reserve / 2);
    assert_true(left(&w) <= w.verdict.reserve + w.moving / 8 + 8);
    uint64_t before = w.changes;
    steps(&w, 300);
    assert_int_equal(w.changes, before);
    assert_int_equal(w.verdict.why, STH_BUDGET_PEAK); /* of the cap: the first activations shrank it */
}

static void a_model_that_fits_has_all_it_wants_at_once(void **state) {
    (void)state;
    world w = card(5 * GIB, 4 * GIB);
    assert_int_equal(w.budget, 5 * GIB);
    steps(&w, 20);
    assert_int_equal(w.changes, 1);
    assert_int_equal(w.verdict.why, STH_BUDGET_FITS);
}

static void activations_that_grow_within_the_reserve_shrink_it_between_steps(void **state) {
    (void)state;
    world w = card(40 * GIB, 2 * GIB);
    steps(&w, 10);
    uint64_t full = w.budget;
    for (int i = 0; i < 60; i++) {
        w.moving += 100 * MIB;
        steps(&w, 1);
    }
    assert_true(w.budget < full - 5 * GIB);
    assert_int_equal(w.verdict.why, STH_BUDGET_PEAK);
    assert_true(w.finder.shrinks < 30); /* not one for each step */
}

static void a_step_that_fails_is_followed_by_one_that_fits(void **state) {
    (void)state;
    world w = card(40 * GIB, 2 * GIB);
    steps(&w, 10);
    w.moving = 4 * GIB;
    assert_false(step(&w));
    assert_true(step(&w));
    assert_int_equal(w.verdict.why, STH_BUDGET_FAILED);
    steps(&w, 500);
    assert_int_equal(w.verdict.others, 4 * GIB);
    assert_int_equal(w.verdict.margin, 0); /* seen by now: nothing is held back for the failure */
    assert_true(left(&w) < 2 * GIB);
}

static void failures_in_a_row_push_harder_and_end(void **state) {
    (void)state;
    world w = card(40 * GIB, GIB);
    steps(&w, 10);
    w.moving = 16 * GIB;
    int failed = 0;
    while (!step(&w)) assert_true(++failed < 6);
    assert_true(failed > 0);
    steps(&w, 1000);
}

static void what_a_growing_input_says_is_believed_before_it_runs(void **state) {
    (void)state;
    world w = card(40 * GIB, 3 * GIB);
    w.steady = GIB;
    steps(&w, 10);
    w.growth = 2;
    w.moving = 6 * GIB;
    steps(&w, 1);
    assert_int_equal(w.verdict.why, STH_BUDGET_EXPECTED);
    w.growth = 0;
    steps(&w, 50);
    assert_int_equal(w.failures, 0);
}

static void a_neighbour_gets_room_and_it_comes_back_when_it_leaves(void **state) {
    (void)state;
    world w = card(40 * GIB, 2 * GIB);
    steps(&w, 10);
    uint64_t full = w.budget;
    for (int i = 0; i < 20; i++) {
        w.neighbour += left(&w) / 2; /* takes half of what is free, again and again */
        steps(&w, 1);
        assert_true(left(&w) >= w.verdict.reserve / 2);
    }
    assert_int_equal(w.verdict.why, STH_BUDGET_NEIGHBOUR);
    assert_true(w.budget < full - 4 * GIB);
    w.neighbour = GIB;
    steps(&w, 300);
    assert_true(w.budget >= full - full / 16);
    assert_int_equal(w.verdict.why, STH_BUDGET_FULL);
}

static void a_runtime_that_cannot_begin_waits_for_no_calm(void **state) {
    (void)state;
    world w = card(40 * GIB, 2 * GIB);
    steps(&w, 10);
    w.neighbour = w.total - GIB / 2; /* our places went, and it took all */
    w.ours = w.budget = w.steady = w.peak = w.cached = 0;
    sth_memory_reading r = {.total = w.total, .free = GIB / 2, .want = w.want, .least = GIB, .steps = w.steps};
    sth_budget_verdict v;
    sthi_finder_observe(&w.finder, &r, 0, 0, 0, &v);
    assert_true(v.cap < r.least);
    r.free = 12 * GIB; /* and is gone at once */
    sthi_finder_observe(&w.finder, &r, 0, 0, 0, &v);
    assert_true(v.cap >= r.least);
    r.free = 20 * GIB; /* now it could begin: what is more has to last */
    uint64_t cap = v.cap;
    sthi_finder_observe(&w.finder, &r, 0, 0, 0, &v);
    assert_int_equal(v.cap, cap);
}

static void a_neighbour_that_comes_and_goes_does_not_make_it_swing(void **state) {
    (void)state;
    world w = card(40 * GIB, 2 * GIB);
    steps(&w, 10);
    uint64_t before = w.changes;
    for (int i = 0; i < 2000; i++) {
        w.neighbour = GIB + (i / 8 % 2 ? 0 : left(&w) > 400 * MIB ? 400 * MIB : 0);
        if (i / 8 % 2 == 0) w.neighbour += i % 8 * 300 * MIB;
        if (left(&w) > w.total) w.neighbour = GIB;
        (void)step(&w);
    }
    assert_true(w.changes - before < 60);
}

static void memory_outside_of_the_allocator_is_not_taken_for_activations(void **state) {
    (void)state;
    world w = card(40 * GIB, 2 * GIB);
    w.outside = 2 * GIB;
    w.ours = w.budget - w.outside;
    steps(&w, 10);
    assert_int_equal(w.verdict.others, 2 * GIB);
    assert_true(left(&w) <= w.verdict.reserve + w.moving / 8 + 8);
}

static void what_others_of_the_device_give_back_is_not_taken_for_activations(void **state) {
    (void)state;
    world w = card(9 * GIB, 2 * GIB);
    steps(&w, 5);
    w.ours += 6 * GIB; /* another runtime was there, too, and leaves */
    w.peak = w.ours + w.moving;
    ask(&w);
    w.peak = 15 * GIB + w.moving;
    steps(&w, 5);
    assert_int_equal(w.verdict.others, 2 * GIB);
}

static void a_guest_between_two_readings_is_not_taken_for_activations(void **state) {
    (void)state;
    world w = card(9 * GIB, 2 * GIB);
    steps(&w, 5);
    w.ours_peak = w.ours + 6 * GIB;
    w.peak = w.ours_peak + w.moving;
    steps(&w, 5);
    assert_int_equal(w.verdict.others, 2 * GIB);
}

static void what_lay_between_steps_and_is_gone_is_used_again(void **state) {
    (void)state;
    world w = {.total = 24 * GIB, .neighbour = GIB, .steady = 8 * GIB, .moving = 2 * GIB, .want = 40 * GIB};
    ask(&w);
    steps(&w, 10);
    assert_int_equal(w.verdict.others, 10 * GIB);
    uint64_t before = w.budget;
    w.steady = GIB;
    steps(&w, 40);
    assert_int_equal(w.budget, before); /* it may be for a moment only */
    steps(&w, 100);
    assert_int_equal(w.verdict.others, 3 * GIB);
    assert_true(w.budget > before + 6 * GIB);
    w.steady = 2 * GIB;
    steps(&w, 50);
    assert_int_equal(w.verdict.others, 4 * GIB);
}

static void an_allocator_that_empties_its_cache_gets_a_margin_for_a_while(void **state) {
    (void)state;
    world w = card(40 * GIB, 2 * GIB);
    steps(&w, 10);
    uint64_t full = w.budget;
    for (int i = 0; i < 4; i++) {
        w.retries++;
        steps(&w, 1);
    }
    assert_true(w.budget < full && w.verdict.margin > 0);
    steps(&w, 1000);
    assert_true(w.verdict.margin < w.verdict.reserve / 4);
}

static void the_users_limit_and_the_smallest_that_works_hold(void **state) {
    (void)state;
    world w = card(40 * GIB, GIB);
    w.limit = 6 * GIB;
    steps(&w, 10);
    assert_int_equal(w.budget, 6 * GIB);
    sth_memory_reading r = {.total = GIB, .free = GIB / 2, .want = 4 * GIB, .least = GIB, .steps = 9};
    sthi_finder f = {0};
    sth_budget_verdict v;
    sthi_finder_observe(&f, &r, 0, 0, 0, &v);
    sthi_finder_share(&f, &r, &v);
    assert_int_equal(v.budget, GIB);
    assert_int_equal(v.why, STH_BUDGET_LEAST);
}

typedef struct dice {
    uint64_t seed, thrown;
} dice;

static uint64_t below(dice *d, uint64_t n) { return sthi_random64(d->seed, d->thrown++) % n; }

/* Whatever happens, budget and cap stay numbers of this world, and a step that failed is followed, within a few, by one
 * that fits, where one can fit at all. */
static void random_lives_settle(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        dice random = {.seed = seed};
        world w = card((1 + below(&random, 60)) * GIB, below(&random, 8) * GIB);
        int failed = 0;
        for (int i = 0; i < 400; i++) {
            switch (below(&random, 40)) {
            case 0: w.moving = below(&random, 10 * 1024) * MIB; break;
            case 1: w.steady = below(&random, 4 * 1024) * MIB; break;
            case 2: w.neighbour += left(&w) < w.total ? left(&w) / 2 : 0; break;
            case 3: w.neighbour = GIB; break;
            case 4: w.retries++; break;
            }
            if (w.ours + w.outside + w.steady + w.neighbour > w.total) w.steady = 0;
            failed = step(&w) || w.steady + w.moving + w.neighbour + GIB > w.total ? 0 : failed + 1;
            if (failed >= 7) fail_msg("seed %llu: %d steps failed in a row", (unsigned long long)seed, failed);
            assert_true(w.budget <= w.want && w.verdict.cap <= w.total);
            w.growth = 0;
        }
    }
}

/* ---- models that take turns */

typedef struct turn {
    sthi_finder finder;
    sth_budget_verdict verdict;
    uint64_t want, weights, moving, steps;
} turn;

/* A step of `mine` behind one of `before` below a ceiling: its activations, beside its weights. */
static void take_turn(turn *mine, turn *before, uint64_t total, uint64_t ceiling) {
    sth_memory_reading r = {.total = total, .free = total - before->weights, .framework_reserved = before->weights,
                            .framework_allocated = before->weights,
                            .framework_peak = before->weights + (before->steps ? before->moving : 0), .phase = 1,
                            .runs = true, .ceiling = ceiling, .want = mine->want, .budget = mine->weights,
                            .steps = mine->steps};
    sth_budget_verdict ignored;
    if (mine != before) {
        sthi_finder_observe(&before->finder, &r, before->weights, before->weights, 0, &ignored);
        sthi_finder_follow(&mine->finder, &before->finder);
        r.framework_peak = r.framework_allocated;
    }
    sthi_finder_observe(&mine->finder, &r, before->weights, before->weights, 0, &mine->verdict);
    sthi_finder_share(&mine->finder, &r, &mine->verdict);
    mine->weights = mine->verdict.budget;
    mine->steps++;
    /* The finder learns what is there now, before the step's activations come. */
    mine->finder.inside = mine->finder.peak = mine->weights;
}

static void models_that_take_turns_have_what_their_own_activations_leave(void **state) {
    (void)state;
    uint64_t total = 80 * GIB, ceiling = 16 * GIB;
    turn text = {.want = 9 * GIB, .moving = GIB / 8}, image = {.want = 24 * GIB, .moving = GIB / 2};
    turn vae = {.want = GIB / 4, .moving = 3 * GIB};
    turn *last = &vae;
    for (int call = 0; call < 3; call++) {
        take_turn(&text, last, total, ceiling);
        for (int i = 0; i < 4; i++) {
            take_turn(&image, i ? &image : &text, total, ceiling);
            if (!call && !i) assert_true(image.verdict.cap <= ceiling / 2); /* half, until its step is seen */
        }
        assert_true(image.weights > ceiling - GIB - GIB / 4); /* whatever the others take when they run */
        assert_true(image.weights + image.moving <= ceiling);
        take_turn(&vae, &image, total, ceiling);
        assert_int_equal(vae.verdict.why, STH_BUDGET_FITS);
        assert_true(vae.verdict.cap + vae.moving <= ceiling); /* what all models may occupy meanwhile */
        last = &vae;
    }
    assert_true(text.weights == 9 * GIB);
}

static void a_ceiling_above_the_device_changes_nothing(void **state) {
    (void)state;
    sth_memory_reading r = {.total = 24 * GIB, .free = 20 * GIB, .want = 40 * GIB, .steps = 5};
    sthi_finder one = {0}, other = {0};
    sth_budget_verdict a, b;
    sthi_finder_observe(&one, &r, 0, 0, 0, &a);
    r.ceiling = 30 * GIB;
    sthi_finder_observe(&other, &r, 0, 0, 0, &b);
    assert_int_equal(a.cap, b.cap);
    assert_int_equal(a.reserve, b.reserve);
    r.ceiling = 10 * GIB;
    other = (sthi_finder){0};
    sthi_finder_observe(&other, &r, 0, 0, 0, &b);
    assert_int_equal(b.capacity, 10 * GIB);
    assert_true(b.cap + b.reserve == b.capacity && b.reserve < a.reserve);
}

/* ---- before a step of a runtime */

static sth_budget_verdict settled(uint64_t has, uint64_t asked, sth_budget_why why, uint64_t least, bool leased) {
    sth_memory_reading r = {.budget = has};
    sth_budget_verdict v = {.budget = asked, .why = why};
    sthi_finder_settle(&r, least, leased, &v);
    return v;
}

static void a_budget_never_shrinks_below_the_smallest_that_works(void **state) {
    (void)state;
    sth_budget_verdict v = settled(100, 40, STH_BUDGET_NEIGHBOUR, 60, false);
    assert_true(v.budget == 60 && v.why == STH_BUDGET_LEAST && !v.trim);
    v = settled(100, 40, STH_BUDGET_NEIGHBOUR, 40, false);
    assert_true(v.budget == 40 && v.why == STH_BUDGET_NEIGHBOUR && v.trim);
    v = settled(100, 40, STH_BUDGET_PEAK, 160, false); /* it has less than it needs: it does not grow by that */
    assert_true(v.budget == 100 && v.why == STH_BUDGET_LEAST);
    v = settled(100, 120, STH_BUDGET_FULL, 160, false);
    assert_true(v.budget == 120 && v.why == STH_BUDGET_FULL);
}

static void a_budget_does_not_grow_while_places_are_leased(void **state) {
    (void)state;
    assert_int_equal(settled(100, 120, STH_BUDGET_FULL, 0, true).budget, 100);
    assert_int_equal(settled(100, 120, STH_BUDGET_FULL, 0, false).budget, 120);
    assert_int_equal(settled(100, 80, STH_BUDGET_PEAK, 10, true).budget, 80);
}

static void the_allocator_gives_back_for_a_neighbour_and_after_failures(void **state) {
    (void)state;
    assert_true(settled(100, 80, STH_BUDGET_NEIGHBOUR, 0, false).trim);
    assert_true(settled(100, 80, STH_BUDGET_FAILED, 0, false).trim);
    assert_false(settled(100, 80, STH_BUDGET_PEAK, 0, false).trim);
    assert_false(settled(100, 100, STH_BUDGET_NEIGHBOUR, 0, false).trim);
    assert_false(settled(100, 120, STH_BUDGET_FAILED, 0, false).trim);
}

static void random_verdicts_stay_between_what_is_asked_and_what_is_there(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t has = sthi_random64(i, 0) % 64, asked = sthi_random64(i, 1) % 64, least = sthi_random64(i, 2) % 64;
        bool leased = sthi_random64(i, 3) & 1;
        sth_budget_verdict v = settled(has, asked, STH_BUDGET_PEAK, least, leased);
        assert_true(v.budget >= (asked < has ? asked : has) && v.budget <= (asked > has ? asked : has));
        assert_true(v.budget >= (least < has ? least : has));
        assert_false(leased && v.budget > has);
        assert_true(settled(has, asked, STH_BUDGET_PEAK, least + 1, leased).budget >= v.budget);
        assert_true(settled(has, asked + 1, STH_BUDGET_PEAK, least, leased).budget >= v.budget);
    }
}

static void an_idle_runtime_gives_what_it_works_without(void **state) {
    (void)state;
    assert_int_equal(sthi_finder_without(100, 30, 40), 70);
    assert_int_equal(sthi_finder_without(100, 60, 40), 40);
    assert_int_equal(sthi_finder_without(100, 90, 40), 40);
    assert_int_equal(sthi_finder_without(100, UINT64_MAX, 40), 40);
    assert_int_equal(sthi_finder_without(100, 0, 40), 0);
    assert_int_equal(sthi_finder_without(40, 10, 40), 0);
    assert_int_equal(sthi_finder_without(40, 10, 60), 0);
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t has = sthi_random64(i, 0) % 64, over = sthi_random64(i, 1) % 64, least = sthi_random64(i, 2) % 64;
        uint64_t less = sthi_finder_without(has, over, least);
        if (!less) continue;
        assert_true(less < has && less >= least && has - less <= over);
        assert_true(sthi_finder_without(has, over + 1, least) <= less);
    }
}

static void the_ceiling_counts_weights_activations_and_the_cache(void **state) {
    (void)state;
    sthi_finder f = {0};
    sth_budget_verdict v;
    sth_memory_reading r = {.total = GIB, .free = GIB / 2, .framework_reserved = 40 * MIB,
                            .framework_allocated = 30 * MIB, .framework_peak = 30 * MIB};
    sthi_finder_observe(&f, &r, 0, 0, 0, &v);
    assert_int_equal(v.others, 30 * MIB);
    r.ceiling = 140 * MIB;
    r.budget = 100 * MIB;
    assert_false(sthi_finder_above_ceiling(&f, &r, 0)); /* 100 + 30 + 10 */
    assert_false(sthi_finder_above_ceiling(&f, &r, 100 * MIB));
    assert_true(sthi_finder_above_ceiling(&f, &r, 100 * MIB + 1)); /* others' weights are there, too */
    r.budget++;
    assert_true(sthi_finder_above_ceiling(&f, &r, 0));
    r.framework_reserved--; /* of the cache */
    assert_false(sthi_finder_above_ceiling(&f, &r, 0));
    r.budget = UINT64_MAX;
    assert_true(sthi_finder_above_ceiling(&f, &r, 0));
    r.ceiling = 0;
    assert_false(sthi_finder_above_ceiling(&f, &r, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_that_take_turns_have_what_their_own_activations_leave),
        cmocka_unit_test(a_ceiling_above_the_device_changes_nothing),
        cmocka_unit_test(it_begins_with_half_and_then_fills_the_card),
        cmocka_unit_test(a_model_that_fits_has_all_it_wants_at_once),
        cmocka_unit_test(activations_that_grow_within_the_reserve_shrink_it_between_steps),
        cmocka_unit_test(a_step_that_fails_is_followed_by_one_that_fits),
        cmocka_unit_test(failures_in_a_row_push_harder_and_end),
        cmocka_unit_test(what_a_growing_input_says_is_believed_before_it_runs),
        cmocka_unit_test(a_neighbour_gets_room_and_it_comes_back_when_it_leaves),
        cmocka_unit_test(a_runtime_that_cannot_begin_waits_for_no_calm),
        cmocka_unit_test(a_neighbour_that_comes_and_goes_does_not_make_it_swing),
        cmocka_unit_test(memory_outside_of_the_allocator_is_not_taken_for_activations),
        cmocka_unit_test(what_others_of_the_device_give_back_is_not_taken_for_activations),
        cmocka_unit_test(a_guest_between_two_readings_is_not_taken_for_activations),
        cmocka_unit_test(what_lay_between_steps_and_is_gone_is_used_again),
        cmocka_unit_test(an_allocator_that_empties_its_cache_gets_a_margin_for_a_while),
        cmocka_unit_test(the_users_limit_and_the_smallest_that_works_hold),
        cmocka_unit_test(random_lives_settle),
        cmocka_unit_test(a_budget_never_shrinks_below_the_smallest_that_works),
        cmocka_unit_test(a_budget_does_not_grow_while_places_are_leased),
        cmocka_unit_test(the_allocator_gives_back_for_a_neighbour_and_after_failures),
        cmocka_unit_test(random_verdicts_stay_between_what_is_asked_and_what_is_there),
        cmocka_unit_test(an_idle_runtime_gives_what_it_works_without),
        cmocka_unit_test(the_ceiling_counts_weights_activations_and_the_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
