/* Where trained weights live: prices against a search of all choices, room, order, slack. */
#include "core/trainables.h"
#include "support/check.h"

#include <string.h>

#include "base/random.h"

#define MIB (UINT64_C(1) << 20)
enum { MOST = 12 };

static sth_trainables_input input_of(const sth_trainable *weights, uint32_t count, uint64_t room, uint64_t slack) {
    sth_trainables_input in;
    sth_trainables_input_init(&in);
    in.weights = weights;
    in.count = count;
    in.room = room;
    in.slack = slack;
    return in;
}

/* n elements of float32, with two moments. */
static sth_trainable of(uint64_t n) { return (sth_trainable){4 * n, 4 * n, 8 * n}; }
static uint64_t need(const sth_trainable *w) { return w->bytes + w->gradient_bytes + w->state_bytes; }

static uint64_t drawn;
static uint64_t below(uint64_t n) { return sthi_random64(20, drawn++) % n; }

/* Nanoseconds a step of a choice, as trainables.c has it. */
static double price(const sth_trainables_input *in, uint32_t there) {
    double ns = 0;
    uint64_t beside = 0;
    for (uint32_t i = 0; i < in->count; i++) {
        const sth_trainable *w = &in->weights[i];
        if (there >> i & 1) beside += w->gradient_bytes + w->state_bytes;
        else ns += (double)in->host_ns + (double)(w->bytes + w->gradient_bytes) * 1e9 / in->link_bytes_per_s;
    }
    return ns + (beside > in->slack ? 2 * (double)(beside - in->slack) * 1e9 / in->link_bytes_per_s : 0);
}

static double cheapest(const sth_trainables_input *in) {
    double best = 1e300;
    for (uint32_t there = 0; there < 1u << in->count; there++) {
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < in->count; i++) bytes += there >> i & 1 ? need(&in->weights[i]) : 0;
        if (bytes <= in->room && price(in, there) < best) best = price(in, there);
    }
    return best;
}

static uint32_t set_of(const sth_trainables_input *in, const sth_home *homes) {
    uint32_t there = 0;
    for (uint32_t i = 0; i < in->count; i++) there |= (uint32_t)(homes[i] == STH_HOME_DEVICE) << i;
    return there;
}

static uint32_t chosen(const sth_trainables_input *in, uint64_t *out_bytes) {
    sth_home homes[MOST];
    assert_ok(sth_trainables_choose(in, homes, out_bytes));
    return set_of(in, homes);
}

static void adapters_live_on_the_device_and_large_weights_on_the_host(void **state) {
    (void)state;
    sth_trainable weights[] = {of(16 * 4096), of(4096 * 4096), of(16 * 14336)};
    sth_home homes[3];
    uint64_t bytes;
    sth_trainables_input in = input_of(weights, 3, 1024 * MIB, 0);
    assert_ok(sth_trainables_choose(&in, homes, &bytes));
    assert_int_equal(homes[0], STH_HOME_DEVICE);
    assert_int_equal(homes[1], STH_HOME_PRICE);
    assert_int_equal(homes[2], STH_HOME_DEVICE);
    assert_int_equal(bytes, need(&weights[0]) + need(&weights[2]));
    in.slack = 1024 * MIB; /* room that nobody else would use */
    assert_int_equal(chosen(&in, &bytes), 7);
    in.slack = 0;
    in.wanted = true;
    assert_int_equal(chosen(&in, &bytes), 7);
    in.room = need(&weights[0]);
    assert_ok(sth_trainables_choose(&in, homes, &bytes));
    assert_int_equal(set_of(&in, homes), 1);
    assert_int_equal(homes[1], STH_HOME_ROOM);
    in.room--;
    assert_int_equal(chosen(&in, &bytes), 0);
    assert_int_equal(bytes, 0);
}

/* Each byte that is less moves at most the next weights: no budget at which all leave at once. */
static void as_many_as_there_is_room_for_and_small_ones_first(void **state) {
    (void)state;
    sth_trainable weights[MOST];
    uint64_t all = 0, before = 0, bytes;
    for (uint32_t i = 0; i < MOST; i++) weights[i] = of(1000 * (1 + (i * 7) % MOST)); /* 1000 to 12000, mixed */
    for (uint32_t i = 0; i < MOST; i++) all += need(&weights[i]);
    for (uint64_t room = 0; room <= all; room += 1000) {
        sth_trainables_input in = input_of(weights, MOST, room, 0);
        uint32_t there = chosen(&in, &bytes);
        assert_true(bytes <= room && bytes >= before);
        uint64_t largest = 0, smallest = UINT64_MAX;
        for (uint32_t i = 0; i < MOST; i++) {
            uint64_t each = need(&weights[i]);
            if (there >> i & 1) largest = each > largest ? each : largest;
            else smallest = each < smallest ? each : smallest;
        }
        assert_true(largest <= smallest);
        assert_true(there == (1u << MOST) - 1 || bytes + smallest > room);
        before = bytes;
    }
    assert_int_equal(before, all);
}

/* Of weights of one dtype the choice is the cheapest that there is, where room does not decide. */
static void no_other_choice_is_cheaper(void **state) {
    (void)state;
    for (int trial = 0; trial < 300; trial++) {
        sth_trainable weights[MOST];
        uint32_t count = 1 + (uint32_t)below(9);
        uint64_t all = 0, bytes;
        for (uint32_t i = 0; i < count; i++) {
            weights[i] = of(1 + below(1u << (10 + below(14))));
            all += need(&weights[i]);
        }
        sth_trainables_input in = input_of(weights, count, all, 0);
        in.link_bytes_per_s = 1e9 * (double)(1 + below(60));
        in.host_ns = (int64_t)below(2000000);
        double best = cheapest(&in), mine = price(&in, chosen(&in, &bytes));
        if (mine > best * (1 + 1e-9)) fail_msg("trial %d: %.0f ns, and %.0f can be had", trial, mine, best);
        in.slack = below(all); /* within one weight of the best */
        best = cheapest(&in);
        mine = price(&in, chosen(&in, &bytes));
        double largest = 0;
        for (uint32_t i = 0; i < count; i++)
            if (need(&weights[i]) > largest) largest = (double)need(&weights[i]);
        assert_true(mine <= best + (double)in.host_ns + 2 * largest * 1e9 / in.link_bytes_per_s);
        sth_trainables_input again = in;
        uint64_t twice;
        assert_int_equal(chosen(&in, &bytes), chosen(&again, &twice));
        assert_int_equal(bytes, twice);
    }
}

static void bad_input_is_refused(void **state) {
    (void)state;
    sth_trainable weight = {UINT64_MAX, 1, 0};
    sth_home home;
    uint64_t bytes;
    sth_trainables_input in = input_of(&weight, 1, 0, 0);
    assert_int_equal(sth_trainables_choose(&in, &home, &bytes), STH_INVALID_ARGUMENT);
    weight.bytes = 1;
    in.link_bytes_per_s = 0;
    assert_int_equal(sth_trainables_choose(&in, &home, &bytes), STH_INVALID_ARGUMENT);
    in = input_of(&weight, 1, 0, 0);
    in.host_ns = -1;
    assert_int_equal(sth_trainables_choose(&in, &home, &bytes), STH_INVALID_ARGUMENT);
    in = input_of(NULL, 1, 0, 0);
    assert_int_equal(sth_trainables_choose(&in, &home, &bytes), STH_INVALID_ARGUMENT);
    in = input_of(&weight, 1, 0, 0);
    in.size = 8;
    assert_int_equal(sth_trainables_choose(&in, &home, &bytes), STH_INVALID_ARGUMENT);
    assert_int_equal(sth_trainables_choose(NULL, &home, &bytes), STH_INVALID_ARGUMENT);
    in = input_of(NULL, 0, 5, 5);
    assert_ok(sth_trainables_choose(&in, NULL, &bytes));
    assert_int_equal(bytes, 0);
    assert_string_equal(sth_home_text(STH_HOME_COUNT), "");
    assert_true(strlen(sth_home_text(STH_HOME_ROOM)) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adapters_live_on_the_device_and_large_weights_on_the_host),
        cmocka_unit_test(as_many_as_there_is_room_for_and_small_ones_first),
        cmocka_unit_test(no_other_choice_is_cheaper),
        cmocka_unit_test(bad_input_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
