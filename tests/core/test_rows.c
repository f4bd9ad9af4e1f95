/* Rows and slots: what is missing gets what is worth least; shares of a budget; random calls from seeds against a slow
 * simulation of frequency with recency. */
#include <math.h>
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/random.h"
#include "core/rows.h"
#include "support/check.h"

static void assert_sound(const sthi_rows *r) {
    const char *why;
    if (!sthi_rows_sound(r, &why)) fail_msg("%s", why);
}

static sthi_rows make(uint32_t tables, uint32_t rows, uint32_t slots, uint32_t view_most) {
    sthi_rows r;
    sthi_rows_init(&r);
    for (uint32_t i = 0; i < tables; i++) {
        uint32_t table;
        assert_ok(sthi_rows_add(&r, rows, &table));
        assert_int_equal(table, i);
    }
    assert_ok(sthi_rows_lay(&r, slots, view_most));
    return r;
}

/* One call of one token; returns how many rows were missing. */
static uint32_t call(sthi_rows *r, uint32_t table, const uint32_t *rows, uint32_t count) {
    sthi_rows_load loads[64];
    uint32_t uses[64] = {0}, missing;
    for (uint32_t i = 0; i < count; i++) uses[i] = 1;
    assert_true(sthi_rows_ask(r, table, rows, uses, count, 1, loads, &missing));
    for (uint32_t i = 1; i < missing; i++)
        assert_true(loads[i - 1].row < loads[i].row && loads[i - 1].slot < loads[i].slot);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = sthi_rows_slot_of(r, table, rows[i]);
        assert_int_not_equal(slot, STHI_NO_ROW);
        assert_int_equal(r->slots[slot].row, rows[i]);
        sthi_rows_end(r, slot);
    }
    assert_sound(r);
    return missing;
}

static uint32_t call_one(sthi_rows *r, uint32_t table, uint32_t row) { return call(r, table, &row, 1); }

static void a_row_that_is_there_is_not_brought_again(void **state) {
    (void)state;
    sthi_rows r = make(2, 8, 4, 100);
    assert_int_equal(call(&r, 0, (uint32_t[]){1, 3}, 2), 2);
    assert_int_equal(call(&r, 0, (uint32_t[]){1, 3}, 2), 0);
    assert_int_equal(call(&r, 1, (uint32_t[]){1, 3}, 2), 2); /* of another table */
    assert_int_equal(call(&r, 0, (uint32_t[]){1, 3}, 2), 0);
    assert_int_equal(r.tables[0].asked, 6);
    assert_int_equal(r.tables[0].hits, 4);
    assert_int_equal(r.tables[0].brought, 2);
    assert_int_equal(r.tables[1].held, 2);
    sthi_rows_fini(&r);
}

static void what_is_used_often_outlives_what_came_later(void **state) {
    (void)state;
    sthi_rows r = make(1, 8, 2, 100);
    for (int i = 0; i < 5; i++) call_one(&r, 0, 7);
    for (uint32_t row = 0; row < 6; row++) assert_int_equal(call_one(&r, 0, row), 1);
    assert_int_equal(call_one(&r, 0, 7), 0);
    sthi_rows_fini(&r);
}

static void what_was_used_long_ago_leaves_in_the_end(void **state) {
    (void)state;
    sthi_rows r = make(1, 8, 2, 100);
    for (int i = 0; i < 3; i++) call_one(&r, 0, 7);
    for (int i = 0; i < 8 * STHI_ROWS_HALF_LIFE; i++) call_one(&r, 0, i % 2);
    assert_int_equal(sthi_rows_slot_of(&r, 0, 7), STHI_NO_ROW);
    sthi_rows_fini(&r);
}

/* A pass over tables is a loop: the last to be used again must not be thought the freshest. */
static void tables_that_take_turns_are_as_old_as_each_other(void **state) {
    (void)state;
    enum { TABLES = 4, EACH = 2 };
    sthi_rows r = make(TABLES, 8, TABLES * EACH, 100);
    for (int pass = 0; pass < 20; pass++)
        for (uint32_t t = 0; t < TABLES; t++) (void)call(&r, t, (uint32_t[]){1, 5}, EACH);
    /* One row too many in each pass costs one row, not a whole round of them. */
    uint32_t missing = 0;
    for (int pass = 0; pass < 20; pass++)
        for (uint32_t t = 0; t < TABLES; t++)
            missing += t == 0 ? call(&r, t, (uint32_t[]){1, 3, 5}, 3) : call(&r, t, (uint32_t[]){1, 5}, EACH);
    assert_in_range(missing, 1, 20 * 2 + 4);
    sthi_rows_fini(&r);
}

static void a_table_that_is_called_no_more_ages_with_the_others(void **state) {
    (void)state;
    sthi_rows r = make(2, 8, 2, 100);
    for (int i = 0; i < 6; i++) call_one(&r, 0, 0);
    for (int i = 0; i < 8 * STHI_ROWS_HALF_LIFE; i++) call_one(&r, 1, i % 2);
    assert_int_equal(r.tables[0].held, 0);
    sthi_rows_fini(&r);
}

/* Prompts use all rows of each table in turn. With fewer slots than rows the least recently used would always be the
 * one that is needed next. */
static void a_scan_over_all_tables_finds_a_part_again(void **state) {
    (void)state;
    enum { TABLES = 4, ROWS = 16, SLOTS = 40 };
    sthi_rows r = make(TABLES, ROWS, SLOTS, 100);
    uint32_t all[ROWS], missing = 0;
    for (uint32_t i = 0; i < ROWS; i++) all[i] = i;
    for (int pass = 0; pass < 6; pass++) {
        missing = 0;
        for (uint32_t t = 0; t < TABLES; t++) missing += call(&r, t, all, ROWS);
    }
    /* The rows of the table under way need their slots; those beside them stay. */
    assert_true(missing <= TABLES * ROWS - (SLOTS - ROWS));
    sthi_rows_fini(&r);
}

static void rows_in_use_keep_their_slots_and_too_many_change_nothing(void **state) {
    (void)state;
    sthi_rows r = make(1, 8, 4, 100);
    sthi_rows_load loads[8];
    uint32_t missing, ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    assert_true(sthi_rows_ask(&r, 0, (uint32_t[]){0, 1, 2}, ones, 3, 1, loads, &missing));
    uint32_t slot = sthi_rows_slot_of(&r, 0, 1);
    assert_false(sthi_rows_ask(&r, 0, (uint32_t[]){2, 3, 4}, ones, 3, 1, loads, &missing));
    assert_int_equal(r.slots[sthi_rows_slot_of(&r, 0, 2)].leases, 1);
    assert_int_equal(r.tables[0].asked, 3);
    assert_true(sthi_rows_ask(&r, 0, (uint32_t[]){2, 3}, ones, 2, 1, loads, &missing));
    assert_int_equal(missing, 1);
    assert_int_equal(sthi_rows_slot_of(&r, 0, 1), slot);
    assert_int_equal(r.slots[sthi_rows_slot_of(&r, 0, 2)].leases, 2);
    assert_sound(&r);
    sthi_rows_fini(&r);
}

static void a_forgotten_table_leaves_slots_that_are_free_once_their_leases_end(void **state) {
    (void)state;
    sthi_rows r = make(1, 8, 2, 100);
    sthi_rows_load loads[8];
    uint32_t missing, ones[2] = {1, 1};
    assert_true(sthi_rows_ask(&r, 0, (uint32_t[]){0, 1}, ones, 2, 1, loads, &missing));
    uint32_t was = sthi_rows_slot_of(&r, 0, 0);
    sthi_rows_forget(&r, 0);
    assert_int_equal(r.tables[0].held, 0);
    assert_false(sthi_rows_ask(&r, 0, (uint32_t[]){0}, ones, 1, 1, loads, &missing));
    sthi_rows_end(&r, was);
    assert_true(sthi_rows_ask(&r, 0, (uint32_t[]){0}, ones, 1, 1, loads, &missing));
    assert_int_equal(missing, 1);
    assert_int_equal(sthi_rows_slot_of(&r, 0, 0), was);
    assert_sound(&r);
    sthi_rows_fini(&r);
}

static void ahead_takes_what_nobody_uses_and_not_the_tables_own_rows(void **state) {
    (void)state;
    sthi_rows r = make(2, 4, 6, 100);
    sthi_rows_load loads[4];
    uint32_t missing, ones[4] = {1, 1, 1, 1};
    call(&r, 1, (uint32_t[]){0, 1}, 2);
    assert_true(sthi_rows_ask(&r, 0, (uint32_t[]){0, 1, 2}, ones, 3, 1, loads, &missing));
    assert_int_equal(sthi_rows_ahead(&r, 1, 4, loads), 1); /* rows 2 and 3 are missing, and one slot is left */
    assert_int_equal(loads[0].row, 2);
    assert_int_equal(r.tables[1].held, 3);
    assert_int_equal(r.tables[1].ahead, 1);
    assert_int_equal(r.tables[1].brought, 2);
    assert_sound(&r);
    sthi_rows_fini(&r);
}

static void the_order_of_tables_is_known_from_their_calls(void **state) {
    (void)state;
    sthi_rows r = make(3, 4, 6, 100);
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t t = 0; t < 3; t++) call_one(&r, (t * 2) % 3, 0);
    assert_int_equal(r.tables[0].next, 2);
    assert_int_equal(r.tables[2].next, 1);
    assert_int_equal(r.tables[1].next, 0);
    sthi_rows_fini(&r);
}

static void views_are_of_equal_size_and_no_larger_than_they_may_be(void **state) {
    (void)state;
    sthi_rows r = make(5, 8, 25, 10);
    assert_int_equal(r.views, 3);
    for (uint32_t t = 0; t < 5; t++) {
        uint32_t first, count = sthi_rows_view(&r, t, &first);
        assert_int_equal(count, 8);
        assert_int_equal(first, t % 3 * 8);
        for (uint32_t row = 0; row < 8; row++) call_one(&r, t, row);
    }
    assert_int_equal(r.tables[0].held, 0); /* table 3 has the same view */
    assert_int_equal(r.tables[2].held, 8);
    sthi_rows_fini(&r);
}

static void shares_of_a_budget(void **state) {
    (void)state;
    sth_rows_budget b = {.part_count = 2, .part_bytes = {1024, 512}, .units_all = 60000, .units_least = 15000,
                         .stays_bytes = 5000, .rows = 1000, .rows_largest = 32, .rows_token = 4};
    uint64_t all = b.stays_bytes + b.units_all, least = b.stays_bytes + b.units_least, row = 1536;
    assert_int_equal(sthi_rows_slots(&b, all + 60 * row), 60);         /* what all units leave */
    assert_int_equal(sthi_rows_slots(&b, least + 40 * row), 32);       /* a table's, and units stream */
    assert_int_equal(sthi_rows_slots(&b, least + 11 * row - 1), 10);   /* what the least of the units leaves */
    assert_int_equal(sthi_rows_slots(&b, least + 4 * row), 4);
    assert_int_equal(sthi_rows_slots(&b, least + 4 * row - 1), 4);     /* a token's in any case */
    assert_int_equal(sthi_rows_slots(&b, 0), 4);
    assert_int_equal(sthi_rows_slots(&b, UINT64_MAX), 1000);           /* all rows */
    assert_int_equal(sthi_rows_bytes(&b, 7), 7 * row);
    b.part_bytes[1] = 100;
    assert_int_equal(sthi_rows_bytes(&b, 7), 7 * 1024 + 1024); /* each part is rounded up */
    assert_int_equal(sthi_rows_bytes(&b, 0), 0);
}

static void the_smallest_budget_of_a_pool_is_the_least_that_has_its_slots(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= cases_to_try(200); seed++) {
        uint64_t drawn = 0;
        sth_rows_budget b = {.part_count = 1 + (uint32_t)(sthi_random64(seed, drawn++) % STH_ROWS_PARTS_MAX)};
        for (uint32_t i = 0; i < b.part_count; i++) b.part_bytes[i] = 1 + sthi_random64(seed, drawn++) % 5000;
        b.rows_token = 1 + (uint32_t)(sthi_random64(seed, drawn++) % 8);
        b.rows_largest = b.rows_token + (uint32_t)(sthi_random64(seed, drawn++) % 100);
        b.rows = b.rows_largest + (uint32_t)(sthi_random64(seed, drawn++) % 1000);
        b.units_least = sthi_random64(seed, drawn++) % 100000;
        b.units_all = b.units_least + sthi_random64(seed, drawn++) % 1000000;
        b.stays_bytes = sthi_random64(seed, drawn++) % 100000;
        for (uint32_t slots = b.rows_token; slots <= b.rows_largest; slots++) {
            uint64_t smallest = sthi_rows_smallest(&b, slots);
            assert_true(sthi_rows_slots(&b, smallest) >= slots);
            if (slots > b.rows_token) assert_true(sthi_rows_slots(&b, smallest - 1) < slots);
            /* The pool and the least of the rest are in it. */
            assert_true(b.stays_bytes + b.units_least + sthi_rows_bytes(&b, slots) <= smallest);
        }
    }
}

static void sizes_beyond_64_bits_are_as_large_as_can_be(void **state) {
    (void)state;
    sth_rows_budget b = {.part_count = 2, .part_bytes = {UINT64_MAX / 2, UINT64_MAX / 2}, .units_all = UINT64_MAX,
                         .units_least = UINT64_MAX, .stays_bytes = UINT64_MAX, .rows = 9, .rows_largest = 9,
                         .rows_token = 2};
    assert_true(sthi_rows_bytes(&b, 3) == UINT64_MAX);
    assert_true(sthi_rows_smallest(&b, 9) == UINT64_MAX);
    assert_int_equal(sthi_rows_slots(&b, UINT64_MAX), 2);
}

static void distinct_rows_of_tokens(void **state) {
    (void)state;
    assert_true(fabs(sthi_rows_expected(128, 8, 1) - 8) < 1e-9);
    assert_true(fabs(sthi_rows_expected(128, 8, 2) - (8 + 8 * 120.0 / 128)) < 1e-9);
    assert_true(sthi_rows_expected(128, 8, 512) > 127.99);
}

static void no_memory_is_an_error_and_leaves_nothing(void **state) {
    (void)state;
    long before = sthi_alloc_live();
    for (int n = 1; n < 12; n++) {
        sthi_rows r;
        uint32_t table;
        sthi_rows_init(&r);
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        sth_status rc = sthi_rows_add(&r, 8, &table);
        if (rc == STH_OK) rc = sthi_rows_lay(&r, 4, 100);
        sthi_fault_disarm_all();
        if (rc == STH_OK) assert_int_equal(call_one(&r, 0, 1), 1);
        else assert_int_equal(r.views, 0);
        sthi_rows_fini(&r);
        if (rc == STH_OK) break;
        assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY);
        assert_true(n < 8);
    }
    assert_int_equal(sthi_alloc_live(), before);
}

/* ---- against a slow simulation: uses with their times, worth summed up anew each time */

enum { MOST = 400 };
typedef struct slow_row { uint32_t uses; uint64_t when[MOST]; double share[MOST]; bool in; uint64_t since; } slow_row;

static double slow_worth(const slow_row *row, uint64_t now) {
    double sum = 0;
    for (uint32_t i = 0; i < row->uses; i++)
        sum += row->share[i] * exp2(((double)row->when[i] - (double)now) / STHI_ROWS_HALF_LIFE);
    return sum;
}

/* One table. Returns the misses of both, which must be the same, and no more than those of the least recently and the
 * least frequently used by more than a tenth. */
static void random_calls(unsigned seed, double skew, uint32_t slots) {
    enum { ROWS = 24, EACH = 3, CALLS = 400 };
    static slow_row rows[ROWS];
    static uint64_t last[ROWS], often[ROWS];
    static bool in_lru[ROWS], in_lfu[ROWS];
    memset(rows, 0, sizeof rows);
    memset(last, 0, sizeof last);
    memset(often, 0, sizeof often);
    memset(in_lru, 0, sizeof in_lru);
    memset(in_lfu, 0, sizeof in_lfu);
    uint64_t drawn = 0;
    sthi_rows r = make(1, ROWS, slots, 100);
    uint64_t loads = 0, ours = 0, slow = 0, lru = 0, lfu = 0;
    double weights[ROWS], sum = 0;
    for (int i = 0; i < ROWS; i++) sum += weights[i] = pow(i + 1, -skew);
    for (uint64_t now = 1; now <= CALLS; now++) {
        bool want[ROWS] = {false};
        uint32_t asked[EACH], count = 0;
        while (count < EACH) {
            double at = (double)(sthi_random64(seed, drawn++) >> 11) / (double)(1ull << 53) * sum;
            int pick = 0;
            while (pick < ROWS - 1 && (at -= weights[pick]) > 0) pick++;
            if (now > CALLS / 2) pick = ROWS - 1 - pick; /* other rows are in favor from then on */
            if (!want[pick]) want[pick] = ++count > 0;
        }
        count = 0;
        for (uint32_t i = 0; i < ROWS; i++)
            if (want[i]) asked[count++] = i;
        ours += call(&r, 0, asked, count);
        uint32_t in = 0, n_lru = 0, n_lfu = 0;
        for (int i = 0; i < ROWS; i++) {
            in += rows[i].in;
            n_lru += in_lru[i];
            n_lfu += in_lfu[i];
        }
        uint64_t before = now - 1; /* worth is compared before this call's uses count, by the clock as it was */
        for (int i = 0; i < ROWS; i++) {
            if (!want[i]) continue;
            if (!rows[i].in) {
                slow++;
                if (in == slots) {
                    int out = -1;
                    for (int k = 0; k < ROWS; k++) {
                        if (!rows[k].in || want[k]) continue;
                        if (out < 0 || slow_worth(&rows[k], before) < slow_worth(&rows[out], before) ||
                            (slow_worth(&rows[k], before) == slow_worth(&rows[out], before) &&
                             rows[k].since > rows[out].since))
                            out = k;
                    }
                    rows[out].in = false;
                    in--;
                }
                rows[i].in = true;
                rows[i].since = ++loads;
                in++;
            }
            if (!in_lru[i]) {
                lru++;
                if (n_lru == slots) {
                    int out = -1;
                    for (int k = 0; k < ROWS; k++)
                        if (in_lru[k] && !want[k] && (out < 0 || last[k] < last[out])) out = k;
                    in_lru[out] = false;
                    n_lru--;
                }
                in_lru[i] = true;
                n_lru++;
            }
            if (!in_lfu[i]) {
                lfu++;
                if (n_lfu == slots) {
                    int out = -1;
                    for (int k = 0; k < ROWS; k++)
                        if (in_lfu[k] && !want[k] && (out < 0 || often[k] < often[out])) out = k;
                    in_lfu[out] = false;
                    n_lfu--;
                }
                in_lfu[i] = true;
                n_lfu++;
            }
        }
        for (int i = 0; i < ROWS; i++) {
            if (!want[i]) continue;
            rows[i].when[rows[i].uses] = now;
            rows[i].share[rows[i].uses++] = 1;
            last[i] = now;
            often[i]++;
        }
        for (uint32_t i = 0; i < ROWS; i++)
            if (rows[i].in != (sthi_rows_slot_of(&r, 0, i) != STHI_NO_ROW))
                fail_msg("seed %u, call %llu: row %u is %s", seed, (unsigned long long)now, i,
                         rows[i].in ? "missing" : "there");
    }
    assert_int_equal(ours, slow);
    assert_true((double)ours <= 1.1 * (double)(lru < lfu ? lru : lfu) + 8);
    sthi_rows_fini(&r);
}

static void random_calls_keep_what_a_slow_simulation_keeps(void **state) {
    (void)state;
    unsigned cases = cases_to_try(12);
    for (unsigned seed = 1; seed <= cases; seed++)
        random_calls(seed, seed % 3 == 0 ? 0.0 : seed % 3 == 1 ? 0.8 : 1.3, 4 + seed % 13);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_that_is_there_is_not_brought_again),
        cmocka_unit_test(what_is_used_often_outlives_what_came_later),
        cmocka_unit_test(what_was_used_long_ago_leaves_in_the_end),
        cmocka_unit_test(tables_that_take_turns_are_as_old_as_each_other),
        cmocka_unit_test(a_table_that_is_called_no_more_ages_with_the_others),
        cmocka_unit_test(a_scan_over_all_tables_finds_a_part_again),
        cmocka_unit_test(rows_in_use_keep_their_slots_and_too_many_change_nothing),
        cmocka_unit_test(a_forgotten_table_leaves_slots_that_are_free_once_their_leases_end),
        cmocka_unit_test(ahead_takes_what_nobody_uses_and_not_the_tables_own_rows),
        cmocka_unit_test(the_order_of_tables_is_known_from_their_calls),
        cmocka_unit_test(views_are_of_equal_size_and_no_larger_than_they_may_be),
        cmocka_unit_test(shares_of_a_budget),
        cmocka_unit_test(the_smallest_budget_of_a_pool_is_the_least_that_has_its_slots),
        cmocka_unit_test(sizes_beyond_64_bits_are_as_large_as_can_be),
        cmocka_unit_test(distinct_rows_of_tokens),
        cmocka_unit_test(no_memory_is_an_error_and_leaves_nothing),
        cmocka_unit_test(random_calls_keep_what_a_slow_simulation_keeps),
    };
    return cmocka_run_group_tests_name("core/rows", tests, NULL, NULL);
}
