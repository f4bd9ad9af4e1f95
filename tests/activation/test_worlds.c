/* Random passes from seeds: sizes, orders, drops, second backwards, marks and caps that change. Bytes are right at
 * every question, the store's figures agree with what the caller holds, and the peak holds. A seed given as an argument
 * in STH_SEED is the only one. */
#include <stdio.h>
#include <stdlib.h>

#include "activation/rig.h"
#include "conductor/conductor.h"
#include "base/arith.h"
#include "base/memory.h"

static const uint64_t KIB = 1 << 10, MIB = 1 << 20;

static unsigned roll(unsigned *seed, unsigned sides) {
    *seed = *seed * 1664525 + 1013904223;
    return (*seed >> 10) % sides;
}

static void agree(rig *g) {
    uint64_t bytes = 0, count = 0;
    for (int i = 0; i < THINGS; i++) {
        const thing *t = &g->things[i];
        if (!t->record) continue;
        count++;
        if (t->memory || t->copy) bytes += t->bytes;
        sth_activation_state s = rig_state(g, i);
        bool on_device = s == STH_ACTIVATION_KEPT || s == STH_ACTIVATION_SPILLING;
        assert_int_equal(t->memory != 0, on_device);
        assert_int_equal(t->copy != 0, s == STH_ACTIVATION_RESTORING || s == STH_ACTIVATION_RESTORED);
    }
    sth_activation_stats s = rig_stats(g);
    assert_int_equal(s.records, count);
    assert_int_equal(s.kept_bytes, bytes);
}

/* Those that somebody else holds are written once more before they are let loose. Returns the bytes that stay held. */
static uint64_t let_loose(rig *g, unsigned *seed, int count, unsigned sides) {
    uint64_t held = 0;
    for (int i = 0; i < count; i++) {
        if (!g->things[i].record || !g->things[i].held) continue;
        if (roll(seed, sides)) held += g->things[i].bytes;
        else assert_ok(rig_let_loose(g, i, roll(seed, 1000)));
    }
    return held;
}

static void one_pass(rig *g, unsigned *seed, const uint64_t *sizes, int count, const int *order, uint64_t high) {
    assert_ok(sth_activation_pass(g->store, *seed));
    bool some_held = roll(seed, 2);
    uint64_t most_held = 0;
    for (int i = 0; i < count; i++) {
        g->recomputable = roll(seed, 3) == 0;
        g->held = some_held && roll(seed, 3) == 0;
        assert_ok(rig_save(g, i, sizes[i], roll(seed, 1000), false));
        if (some_held) most_held = sthi_max_u64(most_held, let_loose(g, seed, i + 1, 3) + sizes[i]);
        if (roll(seed, 4) == 0) agree(g);
        if (roll(seed, 30) == 0) assert_ok(rig_ask(g, (int)roll(seed, (unsigned)i + 1)));
    }
    g->held = false;
    if (roll(seed, 6) == 0) { /* the graph is dropped */
        for (int i = 0; i < count; i++) assert_ok(rig_release(g, i));
        agree(g);
        return;
    }
    (void)let_loose(g, seed, count, 1);
    assert_ok(rig_room(g, 0));
    int rounds = roll(seed, 4) ? 1 : 2;
    for (int round = 1; round <= rounds; round++)
        for (int k = 0; k < count; k++) {
            int i = roll(seed, 12) ? order[k] : order[(int)roll(seed, (unsigned)count)];
            if (!g->things[i].record) continue;
            assert_ok(rig_ask(g, i));
            if (roll(seed, 3)) assert_ok(rig_ahead(g));
            if (round == rounds && roll(seed, 5)) assert_ok(rig_release(g, i));
            else if (roll(seed, 2)) {
                assert_ok(sth_activation_let_go(g->store, g->things[i].record, g->stream));
                g->things[i].copy = 0;
            }
            if (roll(seed, 4) == 0) agree(g);
        }
    assert_true(rig_stats(g).peak_bytes <= high + most_held);
    for (int i = 0; i < count; i++)
        if (g->things[i].record) assert_ok(rig_release(g, i));
    agree(g);
    assert_int_equal(rig_stats(g).slab_bytes, 0);
}

static void world(unsigned seed) {
    uint64_t sizes[THINGS];
    int order[THINGS];
    rig g;
    sth_activation_options o;
    sth_conductor *conductor = NULL;
    bool conducted = seed % 3 == 1;
    if (conducted) {
        sth_conductor_options c;
        sth_conductor_options_init(&c);
        c.piece_bytes = 4 * KIB; /* nearly everything is split */
        assert_ok(sthi_conductor_create(&c, &conductor));
    }
    sth_activation_options_init(&o);
    o.high = (300 + roll(&seed, 500)) * KIB;
    o.low = o.high * roll(&seed, 5) / 4;
    o.max_d2h = 1 + roll(&seed, 6);
    o.max_h2d = roll(&seed, 6);
    o.ahead_bytes = roll(&seed, 3) * 100 * KIB;
    o.checksums = roll(&seed, 4) == 0;
    if (roll(&seed, 3) == 0) {
        o.class_count = 2;
        o.class_bytes[0] = 16 * KIB;
        o.class_bytes[1] = 128 * KIB;
        o.class_slabs[0] = o.class_slabs[1] = 1 + roll(&seed, 20);
    }
    static const uint64_t links[] = {0, 50, 400, 4000};
    rig_init(&g, roll(&seed, 2), links[roll(&seed, 4)] * MIB, &o, roll(&seed, 3) == 0);
    if (conducted) assert_ok(sth_activation_set_conductor(g.store, conductor));
    int count = 5 + (int)roll(&seed, THINGS - 5);
    for (int i = 0; i < count; i++) {
        sizes[i] = 1 + roll(&seed, roll(&seed, 2) ? 2000 : 120000);
        order[i] = count - 1 - i;
    }
    for (int i = 0; i < 6; i++) {
        int a = (int)roll(&seed, (unsigned)count), b = (int)roll(&seed, (unsigned)count), c = order[a];
        order[a] = order[b];
        order[b] = c;
    }
    for (int step = 0; step < 5; step++) {
        if (roll(&seed, 8) == 0) sizes[roll(&seed, (unsigned)count)] = 1 + roll(&seed, 100000);
        one_pass(&g, &seed, sizes, count, order, o.high);
        rig_rest(&g);
    }
    if (conducted) sth_conductor_destroy(conductor); /* the store's lanes keep it */
    rig_fini(&g);
}

static void random_worlds(void **state) {
    (void)state;
    const char *only = getenv("STH_SEED");
    unsigned first = only ? (unsigned)strtoul(only, NULL, 10) : 1, last = only ? first : cases_to_try(200);
    for (unsigned seed = first; seed <= last; seed++) {
        long live = sthi_alloc_live();
        print_message("# seed %u\r", seed);
        world(seed);
        assert_int_equal(sthi_alloc_live(), live);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_worlds)};
    return cmocka_run_group_tests_name("activation worlds", tests, NULL, NULL);
}
