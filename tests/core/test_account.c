/* The account of a device: sums, claims, protection, who gives way; then random schedules from seeds. */
#include "core/account.h"
#include "support/check.h"

#include <string.h>

enum { ME = 1, OTHER = 2 };

static void assert_sound(const sthi_account *a) {
    const char *why;
    if (!sthi_account_check(a, &why)) fail_msg("%s", why);
}

static void charges_never_pass_the_cap(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x, y;
    sthi_account_join(&a, &x, NULL, "x");
    sthi_account_join(&a, &y, NULL, "y");
    assert_true(sthi_account_take(&a, &x, 60));
    assert_false(sthi_account_take(&a, &y, 41));
    assert_int_equal(y.charge, 0);
    assert_true(sthi_account_take(&a, &y, 40));
    assert_int_equal(sthi_account_free(&a), 0);
    sthi_account_give(&a, &x, 10);
    assert_int_equal(sthi_account_free(&a), 10);
    sthi_account_leave(&a, &y);
    sthi_account_leave(&a, &y);
    assert_int_equal(sthi_account_free(&a), 50);
    assert_int_equal(a.peak, 100);
    assert_sound(&a);
}

static void what_is_freed_in_a_change_of_plan_stays_claimed(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x, y;
    sthi_account_join(&a, &x, NULL, "x");
    sthi_account_join(&a, &y, NULL, "y");
    assert_true(sthi_account_take(&a, &x, 50));
    assert_true(sthi_account_take(&a, &y, 30));
    assert_int_equal(sthi_account_hold(&a, &x, 200), 70);
    sthi_account_give(&a, &x, 50);
    assert_false(sthi_account_take(&a, &y, 1));
    assert_int_equal(sthi_account_hold(&a, &x, 40), 40); /* holds nest */
    assert_true(sthi_account_take(&a, &x, 40));
    sthi_account_settle(&a, &x);
    assert_false(sthi_account_take(&a, &y, 1));
    assert_sound(&a);
    sthi_account_settle(&a, &x);
    assert_int_equal(x.charge, 40);
    assert_int_equal(x.claim, 0);
    assert_true(sthi_account_take(&a, &y, 30));
    assert_sound(&a);
}

static void a_run(sthi_account *a, sthi_member *m, int steps) {
    for (int i = 0; i < steps; i++) sthi_account_ran(a, m);
}

static void who_runs_once_in_a_while_asks_for_what_a_step_streams_through(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member text, image, vae;
    sthi_account_join(&a, &text, NULL, "text");
    sthi_account_join(&a, &image, NULL, "image");
    sthi_account_join(&a, &vae, NULL, "vae");
    assert_int_equal(sthi_account_asks(&a, &text, 10, 20, 90), 90); /* nothing is known of it */
    a_run(&a, &text, 1);
    a_run(&a, &image, 1);
    assert_true(sthi_account_take(&a, &image, 80) && sthi_account_take(&a, &text, 12));
    assert_int_equal(sthi_account_asks(&a, &text, 10, 20, 90), 12); /* two that take turns would swap */
    assert_int_equal(sthi_account_asks(&a, &text, 15, 20, 90), 20); /* it cannot run with what it has */
    assert_int_equal(sthi_account_asks(&a, &text, 15, 20, 18), 18);
    a_run(&a, &image, 2);
    assert_true(sthi_account_stays(&image));
    assert_int_equal(sthi_account_asks(&a, &text, 10, 20, 90), 20); /* image has a long run: it lends */
    a_run(&a, &vae, 1);
    a_run(&a, &text, 1);
    assert_int_equal(sthi_account_asks(&a, &image, 10, 20, 90), 90); /* as long as the one before */
    a_run(&a, &image, 1);
    a_run(&a, &text, 1);
    assert_int_equal(sthi_account_asks(&a, &image, 10, 20, 90), 80); /* and no more */
    image.keeps = 1;
    assert_int_equal(sthi_account_asks(&a, &image, 10, 20, 90), 90); /* the user says so */
    a_run(&a, &text, 2);
    assert_true(sthi_account_stays(&text)); /* a run that has become long */
    sthi_account_leave(&a, &text);
    a_run(&a, &vae, 1);
    assert_int_equal(vae.run, 1);
    assert_sound(&a);
}

static void members_give_way_in_order_of_protection_then_of_use(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member m[7];
    bool wait;
    for (int i = 0; i < 7; i++) {
        sthi_account_join(&a, &m[i], NULL, "m");
        if (i) assert_true(sthi_account_take(&a, &m[i], 10));
    }
    m[2].priority = STH_PRIORITY_SECONDARY;
    m[3].guests = 1;
    m[4].priority = STH_PRIORITY_PRIMARY;
    m[5].keeps = 2;
    sthi_account_used(&a, &m[1]); /* after m[6] */
    const int order[] = {6, 1, 3, 2};
    for (int i = 0; i < 4; i++) {
        assert_ptr_equal(sthi_account_victim(&a, &m[0], 1, true, ME, &wait), &m[order[i]]);
        m[order[i]].tried = 1;
    }
    assert_null(sthi_account_victim(&a, &m[0], 1, true, ME, &wait));
    assert_false(wait);
    assert_ptr_equal(sthi_account_victim(&a, &m[0], 2, false, ME, &wait), &m[6]);
    m[6].charge -= 10, m[1].charge -= 10, a.charge -= 20;
    assert_null(sthi_account_victim(&a, &m[0], 2, false, ME, &wait)); /* a wish takes nothing from guests */
    assert_int_equal(sthi_account_reach(&a, &m[0]), 80);
}

static void who_is_in_use_is_waited_for_only_on_other_threads(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x, y;
    bool wait;
    sthi_account_join(&a, &x, NULL, "x");
    sthi_account_join(&a, &y, NULL, "y");
    assert_true(sthi_account_take(&a, &y, 10));
    y.busy = true, y.thread = ME;
    assert_null(sthi_account_victim(&a, &x, 1, true, ME, &wait));
    assert_false(wait);
    assert_true(sthi_account_thread_busy(&a, ME));
    assert_false(sthi_account_thread_busy(&a, OTHER));
    assert_null(sthi_account_victim(&a, &x, 1, true, OTHER, &wait));
    assert_true(wait);
    y.busy = false, y.fixed = 10; /* nothing of it can go */
    assert_null(sthi_account_victim(&a, &x, 1, true, OTHER, &wait));
    assert_false(wait);
    assert_int_equal(sthi_account_reach(&a, &x), 100); /* but its caller may move it once it has parked */
}

static void who_leaves_takes_all_that_it_has_along(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x, y, z;
    sthi_account_join(&a, &x, &a, "x");
    sthi_account_join(&a, &y, &a, "y");
    sthi_account_join(&a, &z, &a, "z");
    assert_true(sthi_account_take(&a, &x, 20) && sthi_account_take(&a, &y, 30) && sthi_account_take(&a, &z, 10));
    assert_int_equal(sthi_account_hold(&a, &y, 45), 45);
    assert_true(a.charge == 75 && a.claims == 15 && a.peak == 60);
    sthi_account_leave(&a, &y);
    for (int again = 0; again < 2; again++) {
        assert_true(a.charge == 30 && a.claims == 0 && y.charge == 0 && y.claim == 0);
        assert_true(a.first == &z && z.next == &x && !x.next);
        assert_sound(&a);
        sthi_account_leave(&a, &y);
    }
    sthi_account_leave(&a, &z);
    assert_true(a.first == &x && a.charge == 20);
}

static void the_peak_is_without_what_is_only_claimed(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x;
    sthi_account_join(&a, &x, NULL, "x");
    assert_true(sthi_account_take(&a, &x, 30));
    assert_int_equal(sthi_account_hold(&a, &x, 90), 90);
    assert_int_equal(a.peak, 30);
    assert_true(sthi_account_take(&a, &x, 20)); /* of the claim */
    assert_int_equal(a.peak, 50);
    sthi_account_settle(&a, &x);
    assert_true(a.charge == 50 && a.peak == 50);
}

static void who_was_used_least_lately_goes_first(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x, y, asker;
    bool wait;
    sthi_account_join(&a, &x, NULL, "x");
    sthi_account_join(&a, &y, NULL, "y");
    sthi_account_join(&a, &asker, NULL, "asker");
    assert_true(sthi_account_take(&a, &x, 10) && sthi_account_take(&a, &y, 10));
    assert_ptr_equal(sthi_account_victim(&a, &asker, 1, false, ME, &wait), &x); /* joining is a use */
    sthi_account_used(&a, &x);
    assert_ptr_equal(sthi_account_victim(&a, &asker, 2, false, ME, &wait), &y);
}

static void who_is_pinned_or_changes_its_plan_is_waited_for(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x, y;
    bool wait;
    sthi_account_join(&a, &x, NULL, "x");
    sthi_account_join(&a, &y, NULL, "y");
    assert_true(sthi_account_take(&a, &y, 10));
    y.pins = 1;
    assert_null(sthi_account_victim(&a, &x, 1, true, ME, &wait));
    assert_true(wait);
    y.pins = 0, y.holds = 1;
    assert_null(sthi_account_victim(&a, &x, 1, true, ME, &wait));
    assert_true(wait);
    y.holds = 0;
    assert_ptr_equal(sthi_account_victim(&a, &x, 1, true, ME, &wait), &y);
    assert_false(wait);
    assert_null(sthi_account_victim(&a, &y, 1, true, ME, &wait)); /* nobody gives way to itself */
}

static void a_cap_below_what_others_keep_leaves_nothing(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x, y;
    sthi_account_join(&a, &x, NULL, "x");
    sthi_account_join(&a, &y, NULL, "y");
    assert_true(sthi_account_take(&a, &y, 80));
    y.keeps = 1;
    assert_int_equal(sthi_account_reach(&a, &x), 20);
    a.cap = 50;
    assert_int_equal(sthi_account_reach(&a, &x), 0);
    assert_int_equal(sthi_account_free(&a), 0);
    assert_false(sthi_account_take(&a, &x, 1));
}

static void the_figures_tell_protections_apart(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member m[5];
    sth_residency_info info;
    for (int i = 0; i < 5; i++) {
        sthi_account_join(&a, &m[i], NULL, "m");
        assert_true(sthi_account_take(&a, &m[i], 1u << i));
    }
    m[0].priority = STH_PRIORITY_PRIMARY;
    m[1].keeps = 1;
    m[2].priority = STH_PRIORITY_SECONDARY;
    m[3].leaving = true;
    sthi_account_info(&a, &info);
    assert_true(info.cap == 100 && info.occupied == 31 && info.free == 69 && info.peak == 31);
    assert_true(info.primary == 1 && info.kept == 2 && info.secondary == 4);
    assert_int_equal(info.runtimes, 4);
}

static void the_description_names_bytes_and_reasons(void **state) {
    (void)state;
    sthi_account a = {.cap = 10000};
    sthi_member x, y, z;
    char text[256], small[16];
    sthi_account_join(&a, &x, NULL, "x");
    sthi_account_join(&a, &y, NULL, "main");
    sthi_account_join(&a, &z, NULL, "text");
    assert_true(sthi_account_take(&a, &y, 4096) && sthi_account_take(&a, &z, 512));
    y.priority = STH_PRIORITY_PRIMARY;
    z.keeps = 1;
    sthi_account_describe(&a, &x, text, sizeof text);
    assert_non_null(strstr(text, "'main' has 4.00 KiB (4096 bytes), reserved as PRIMARY"));
    assert_non_null(strstr(text, "'text' has 512 B (512 bytes), kept resident"));
    assert_int_equal(strlen(sthi_account_describe(&a, &x, small, sizeof small)), sizeof small - 1);
    /* Nobody else, and nobody without bytes; a text that does not fit ends inside its place. */
    assert_string_equal(sthi_account_describe(&a, &z, text, sizeof text),
                        "'main' has 4.00 KiB (4096 bytes), reserved as PRIMARY");
    memset(text, '#', sizeof text);
    sthi_account_describe(&a, &x, text, 64);
    assert_true(strlen(text) == 63 && text[64] == '#');
    sthi_account_leave(&a, &y);
    assert_string_equal(sthi_account_describe(&a, &z, text, sizeof text), "");
}

static void the_description_knows_every_reason(void **state) {
    (void)state;
    sthi_account a = {.cap = 100};
    sthi_member x;
    char text[128];
    sthi_account_join(&a, &x, NULL, "x");
    assert_true(sthi_account_take(&a, &x, 7));
#define SAYS(reason) \
    assert_string_equal(sthi_account_describe(&a, NULL, text, sizeof text), "'x' has 7 B (7 bytes), " reason)
    SAYS("which tensors hold");
    x.busy = true;
    SAYS("in use");
    x.guests = 1;
    SAYS("a guest in use");
    x.priority = STH_PRIORITY_SECONDARY;
    SAYS("reserved as SECONDARY, in use");
    x.busy = false;
    SAYS("reserved as SECONDARY");
    x.priority = STH_PRIORITY_NONE;
    SAYS("a guest");
    x.leaving = true;
    SAYS("shut down, but held by tensors");
#undef SAYS
}

/* Each broken rule is noticed, and named. */
static void check_notices(void **state) {
    (void)state;
    static const char *const says[] = {"larger than its member's", "without a change of plan", "not the sum",
                                       "not the sum", "more is charged"};
    for (size_t fault = 0; fault < sizeof says / sizeof *says; fault++) {
        const char *why;
        sthi_account a = {.cap = 100};
        sthi_member x;
        sthi_account_join(&a, &x, NULL, "x");
        assert_true(sthi_account_take(&a, &x, 10));
        assert_true(sthi_account_hold(&a, &x, 20) == 20 && sthi_account_check(&a, &why));
        switch (fault) {
        case 0: x.claim = a.claims = 21; break;
        case 1: x.holds = 0; break;
        case 2: a.charge = 19; break;
        case 3: a.claims = 11; break;
        default: a.cap = 19;
        }
        assert_false(sthi_account_check(&a, &why));
        if (!strstr(why, says[fault])) fail_msg("fault %zu gave: %s", fault, why);
    }
}

/* ---- random schedules: a model with nothing but counters beside the account */

static uint64_t next(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *seed >> 33;
}

enum { MEMBERS = 5, EVENTS = 400, SEEDS = 300 };

typedef struct model {
    uint64_t charge[MEMBERS], claim[MEMBERS];
    uint32_t holds[MEMBERS];
} model;

static void play(uint64_t seed) {
    uint64_t s = seed;
    sthi_account a = {.cap = 50 + next(&s) % 200};
    sthi_member m[MEMBERS];
    model w = {0};
    for (int i = 0; i < MEMBERS; i++) sthi_account_join(&a, &m[i], &m[i], "m");
    for (int n = 0; n < EVENTS; n++) {
        uint64_t i = next(&s) % MEMBERS, bytes = next(&s) % 80, sum = 0;
        for (int k = 0; k < MEMBERS; k++) sum += w.charge[k];
        switch (next(&s) % 8) {
        case 0: {
            uint64_t claimed = bytes < w.claim[i] ? bytes : w.claim[i];
            bool fits = bytes - claimed <= a.cap - sum;
            assert_int_equal(sthi_account_take(&a, &m[i], bytes), fits);
            if (fits) w.claim[i] -= claimed, w.charge[i] += bytes - claimed;
            break;
        }
        case 1:
            bytes %= w.charge[i] - w.claim[i] + 1;
            sthi_account_give(&a, &m[i], bytes);
            if (w.holds[i]) w.claim[i] += bytes;
            else w.charge[i] -= bytes;
            break;
        case 2: {
            uint64_t more = bytes > w.charge[i] ? bytes - w.charge[i] : 0;
            more = more < a.cap - sum ? more : a.cap - sum;
            w.holds[i]++, w.claim[i] += more, w.charge[i] += more;
            assert_int_equal(sthi_account_hold(&a, &m[i], bytes), bytes < w.charge[i] ? bytes : w.charge[i]);
            break;
        }
        case 3:
            if (!w.holds[i]) break;
            sthi_account_settle(&a, &m[i]);
            if (!--w.holds[i]) w.charge[i] -= w.claim[i], w.claim[i] = 0;
            break;
        case 4: m[i].priority = (sth_resident_priority)(next(&s) % 3); break;
        case 5: m[i].keeps += next(&s) % 2 ? 1 : m[i].keeps ? -1u : 0; break;
        case 6: m[i].guests += next(&s) % 2 ? 1 : m[i].guests ? -1u : 0; break;
        default: {
            bool wait, required = next(&s) % 2;
            sthi_member *v = sthi_account_victim(&a, &m[i], n + 1u, required, ME, &wait);
            if (!v) break;
            assert_true(v != &m[i] && v->charge && !v->keeps && v->priority != STH_PRIORITY_PRIMARY);
            assert_true(required || (v->priority == STH_PRIORITY_NONE && !v->guests));
            for (int k = 0; k < MEMBERS; k++) /* nobody less protected could have gone instead */
                if (k != (int)i && m[k].charge && !m[k].holds)
                    assert_true(sthi_account_shield(&m[k]) >= sthi_account_shield(v));
        }
        }
        assert_sound(&a);
        sth_residency_info info;
        sthi_account_info(&a, &info);
        uint64_t kept = 0;
        for (int k = 0; k < MEMBERS; k++) {
            assert_int_equal(m[k].charge, w.charge[k]);
            if (m[k].priority == STH_PRIORITY_PRIMARY) kept += w.charge[k];
        }
        assert_int_equal(info.primary, kept);
        assert_true(info.occupied <= info.cap && info.occupied + info.free == info.cap);
    }
}

static void random_schedules_keep_every_sum(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) play(seed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(charges_never_pass_the_cap),
        cmocka_unit_test(what_is_freed_in_a_change_of_plan_stays_claimed),
        cmocka_unit_test(who_runs_once_in_a_while_asks_for_what_a_step_streams_through),
        cmocka_unit_test(members_give_way_in_order_of_protection_then_of_use),
        cmocka_unit_test(who_is_in_use_is_waited_for_only_on_other_threads),
        cmocka_unit_test(the_description_names_bytes_and_reasons),
        cmocka_unit_test(who_leaves_takes_all_that_it_has_along),
        cmocka_unit_test(the_peak_is_without_what_is_only_claimed),
        cmocka_unit_test(who_was_used_least_lately_goes_first),
        cmocka_unit_test(who_is_pinned_or_changes_its_plan_is_waited_for),
        cmocka_unit_test(a_cap_below_what_others_keep_leaves_nothing),
        cmocka_unit_test(the_figures_tell_protections_apart),
        cmocka_unit_test(the_description_knows_every_reason),
        cmocka_unit_test(check_notices),
        cmocka_unit_test(random_schedules_keep_every_sum),
    };
    return cmocka_run_group_tests_name("core/account", tests, NULL, NULL);
}
