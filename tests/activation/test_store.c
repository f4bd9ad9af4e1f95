/* The store: states, order on the device, room, caps, prediction, host memory, sums, failures. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "activation/rig.h"
#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"

static const uint64_t KIB = 1 << 10, MIB = 1 << 20;

static sth_activation_options marks(uint64_t high, uint64_t low) {
    sth_activation_options o;
    sth_activation_options_init(&o);
    o.high = high;
    o.low = low;
    o.max_d2h = 8;
    o.max_h2d = 4;
    return o;
}

static void pass(rig *g, uint64_t step) { assert_ok(sth_activation_pass(g->store, step)); }

/* n things of 100 KiB, asked for in the order last in, first out, and released. */
static void forward(rig *g, int n) {
    for (int i = 0; i < n; i++) assert_ok(rig_save(g, i, 100 * KIB, (unsigned)i, false));
}

static void backward(rig *g, int n) {
    for (int i = n; i-- > 0;) {
        assert_ok(rig_ask(g, i));
        assert_ok(rig_ahead(g));
        assert_ok(rig_release(g, i));
    }
}

static void what_is_spilled_comes_back_in_every_kind_of_time(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        rig g;
        sth_activation_options o = marks(400 * KIB, 300 * KIB);
        rig_init(&g, kind & 1, 100 * MIB, &o, kind & 2);
        for (unsigned step = 0; step < 4; step++) {
            pass(&g, step);
            forward(&g, 12);
            assert_true(rig_stats(&g).kept_bytes <= 400 * KIB);
            backward(&g, 12);
            sth_activation_stats s = rig_stats(&g);
            assert_true(s.peak_bytes <= 400 * KIB);
            assert_int_equal(s.records + s.kept_bytes + s.slab_bytes, 0);
            assert_true(s.spilled >= 8 * (step + 1));
            if (step > 1 && !(kind & 1)) assert_in_range(s.link_bytes_per_s, MIB, 101 * MIB);
            if (step > 1 && kind & 1) assert_in_range(s.link_bytes_per_s, 97 * MIB, 101 * MIB);
            if (step) assert_true(s.ahead > 0);
            rig_rest(&g);
        }
        rig_fini(&g);
    }
}

static void below_the_mark_everything_stays(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(1200 * KIB, 300 * KIB);
    rig_init(&g, true, 0, &o, false);
    forward(&g, 12);
    backward(&g, 12);
    assert_int_equal(rig_stats(&g).spilled, 0);
    assert_int_equal(rig_stats(&g).host_bytes, 0);
    rig_fini(&g);
}

/* Above the high mark down to the low one, the oldest first. */
static void the_marks_are_a_band(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(500 * KIB, 200 * KIB);
    rig_init(&g, true, 0, &o, false);
    forward(&g, 5);
    assert_int_equal(rig_stats(&g).spilled, 0);
    assert_ok(rig_save(&g, 5, 100 * KIB, 5, false));
    assert_int_equal(rig_stats(&g).spilled, 4);
    for (int i = 0; i < 6; i++) assert_int_equal(rig_state(&g, i) == STH_ACTIVATION_KEPT, i >= 4);
    for (int i = 6; i < 9; i++) assert_ok(rig_save(&g, i, 100 * KIB, (unsigned)i, false));
    assert_int_equal(rig_stats(&g).spilled, 4); /* within the band */
    rig_fini(&g);
}

/* Every second one can be computed again: with 5 of 10 gone that way nothing crosses the link. */
static void what_can_be_computed_again_is_dropped_before_others_are_spilled(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(650 * KIB, 550 * KIB);
    rig_init(&g, true, 0, &o, false);
    for (unsigned step = 0; step < 3; step++) {
        pass(&g, step);
        sth_activation_stats before = rig_stats(&g);
        for (int i = 0; i < 10; i++) {
            g.recomputable = i & 1;
            assert_ok(rig_save(&g, i, 100 * KIB, (unsigned)i, false));
        }
        if (step) assert_int_equal(rig_stats(&g).spilled, before.spilled);
        assert_true(rig_stats(&g).dropped >= before.dropped + 3);
        for (int i = 0; i < 10; i++)
            if (rig_state(&g, i) == STH_ACTIVATION_DROPPED) assert_true(i & 1);
        for (int i = 9; i >= 0; i--) {
            assert_ok(rig_ask(&g, i));
            assert_ok(rig_release(&g, i));
        }
        sth_activation_stats after = rig_stats(&g);
        assert_int_equal(after.recomputed - before.recomputed, after.dropped - before.dropped);
        assert_int_equal(after.records + after.kept_bytes, 0);
        assert_true(after.peak_bytes <= 650 * KIB);
    }
    rig_fini(&g);
}

static void another_backward_computes_it_again(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(150 * KIB, 100 * KIB);
    rig_init(&g, true, 0, &o, false);
    g.recomputable = true;
    assert_ok(rig_save(&g, 0, 100 * KIB, 0, false));
    g.recomputable = false;
    assert_ok(rig_save(&g, 1, 100 * KIB, 1, false));
    for (int round = 1; round < 3; round++) {
        assert_int_equal(rig_state(&g, 0), STH_ACTIVATION_DROPPED);
        assert_int_equal(sth_activation_recomputable(g.store, g.things[0].record), STH_INVALID_STATE);
        assert_ok(rig_ask(&g, 0));
        assert_int_equal(rig_state(&g, 0), STH_ACTIVATION_RESTORED);
        assert_int_equal(sth_activation_recomputed(g.store, g.things[0].record), STH_INVALID_STATE);
        assert_ok(sth_activation_let_go(g.store, g.things[0].record, g.stream));
        g.things[0].copy = 0;
        assert_int_equal(rig_stats(&g).recomputed, round);
    }
    assert_ok(rig_release(&g, 0));
    assert_ok(rig_save(&g, 2, 100 * KIB, 2, true));
    assert_int_equal(sth_activation_recomputable(g.store, g.things[2].record), STH_INVALID_STATE); /* passing */
    assert_ok(rig_release(&g, 1));
    assert_ok(rig_release(&g, 2));
    rig_fini(&g);
}

/* What somebody else may still write to is copied when it is let loose, with what was written last, in its turn. */
static void held_ones_go_when_they_are_let_loose(void **state) {
    (void)state;
    for (int cheap = 0; cheap < 2; cheap++) {
        rig g;
        sth_activation_options o = marks(350 * KIB, 150 * KIB);
        rig_init(&g, true, 0, &o, false);
        g.recomputable = cheap;
        for (unsigned step = 0; step < 3; step++) {
            pass(&g, step);
            for (int i = 0; i < 6; i++) {
                g.held = i < 2;
                assert_ok(rig_save(&g, i, 100 * KIB, (unsigned)i, false));
            }
            assert_int_equal(rig_state(&g, 0), STH_ACTIVATION_KEPT);
            assert_int_equal(rig_state(&g, 1), STH_ACTIVATION_KEPT);
            assert_int_not_equal(rig_state(&g, 2), STH_ACTIVATION_KEPT);
            assert_int_equal(sth_activation_set_held(g.store, g.things[2].record, true), STH_INVALID_STATE);
            assert_ok(rig_let_loose(&g, 0, 100 + step));
            g.held = false;
            assert_ok(rig_save(&g, 6, 100 * KIB, 6, false));
            assert_int_not_equal(rig_state(&g, 0), STH_ACTIVATION_KEPT); /* before later ones */
            assert_int_equal(rig_state(&g, 1), STH_ACTIVATION_KEPT);
            assert_ok(rig_ask(&g, 1)); /* backward does not mind who holds it */
            assert_ok(rig_let_loose(&g, 1, 200));
            for (int i = 6; i >= 0; i--) {
                assert_ok(rig_ask(&g, i));
                assert_ok(rig_release(&g, i));
            }
            assert_int_equal(rig_stats(&g).kept_bytes, 0);
        }
        rig_fini(&g);
    }
}

static void caps_are_kept(void **state) {
    (void)state;
    for (uint32_t cap = 0; cap < 3; cap++) {
        rig g;
        sth_activation_options o = marks(250 * KIB, 0);
        o.max_d2h = cap;
        o.max_h2d = cap;
        rig_init(&g, false, 50 * MIB, &o, false);
        for (unsigned step = 0; step < 2; step++) {
            pass(&g, step);
            forward(&g, 10);
            assert_true(g.most_spilling <= cap);
            assert_int_equal(rig_stats(&g).spilled > 0, cap > 0);
            backward(&g, 10);
            if (!cap) assert_int_equal(rig_stats(&g).ahead, 0);
        }
        rig_fini(&g);
    }
}

static void the_second_pass_spills_at_once_and_brings_back_in_the_order_of_the_first(void **state) {
    (void)state;
    static const int order[] = {3, 7, 0, 5, 1, 6, 2, 4};
    rig g;
    sth_activation_options o = marks(350 * KIB, 300 * KIB);
    o.max_h2d = 1;
    rig_init(&g, true, 0, &o, false);
    for (unsigned step = 0; step < 3; step++) {
        pass(&g, step);
        uint64_t before = rig_stats(&g).spilled, ahead = rig_stats(&g).ahead;
        for (int i = 0; i < 8; i++) {
            assert_ok(rig_save(&g, i, 100 * KIB, (unsigned)i, false));
            if (step == 2 && i == 1) assert_true(rig_stats(&g).spilled - before >= 1); /* far below the mark */
        }
        for (int k = 0; k < 8; k++) {
            bool there = rig_state(&g, order[k]) != STH_ACTIVATION_SPILLED;
            if (step && k) assert_true(there);
            assert_ok(rig_ask(&g, order[k]));
            assert_ok(rig_release(&g, order[k]));
            assert_ok(rig_ahead(&g));
        }
        if (step) assert_true(rig_stats(&g).ahead - ahead >= 3);
        rig_rest(&g);
    }
    rig_fini(&g);
}

/* Something else under the same number is no reason to expect anything. */
static void a_pass_that_differs_is_right(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(350 * KIB, 300 * KIB);
    rig_init(&g, true, 0, &o, false);
    pass(&g, 0);
    forward(&g, 8);
    backward(&g, 8);
    pass(&g, 1);
    for (int i = 0; i < 20; i++) assert_ok(rig_save(&g, i, (uint64_t)(20 + i) * KIB, (unsigned)i, false));
    for (int i = 0; i < 20; i++) { /* first in, first out */
        assert_ok(rig_ask(&g, i));
        assert_ok(rig_ahead(&g));
        if (i % 3) assert_ok(rig_release(&g, i));
    }
    for (int i = 0; i < 20; i += 3) {
        assert_ok(rig_ask(&g, i));
        assert_ok(rig_release(&g, i));
    }
    assert_int_equal(rig_stats(&g).records, 0);
    pass(&g, 2);
    forward(&g, 3); /* far fewer */
    backward(&g, 3);
    rig_fini(&g);
}

static void more_room_spills_less(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(350 * KIB, 300 * KIB);
    rig_init(&g, true, 0, &o, false);
    uint64_t spilled = 0;
    for (unsigned step = 0; step < 6; step++) {
        pass(&g, step);
        uint64_t before = rig_stats(&g).spilled;
        forward(&g, 10);
        backward(&g, 10);
        spilled = rig_stats(&g).spilled - before;
        if (step == 2) {
            assert_true(spilled >= 7);
            assert_ok(sth_activation_set_marks(g.store, 800 * KIB, 750 * KIB));
        }
        rig_rest(&g);
    }
    assert_true(spilled >= 2 && spilled <= 4);
    rig_fini(&g);
}

static void asked_for_while_it_goes_out_it_stays(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(10 * MIB, 9 * MIB);
    rig_init(&g, false, 20 * MIB, &o, false);
    forward(&g, 2);
    assert_ok(sth_activation_spill(g.store, g.things[0].record, g.things[0].memory, g.stream));
    assert_int_equal(rig_state(&g, 0), STH_ACTIVATION_SPILLING);
    assert_ok(rig_ask(&g, 0));
    assert_int_equal(rig_state(&g, 0), STH_ACTIVATION_KEPT);
    assert_int_equal(rig_stats(&g).recalled, 1);
    assert_ok(rig_release(&g, 0)); /* scribbled over, behind the copy that is under way */
    assert_int_equal(rig_stats(&g).slab_bytes, 0);
    assert_ok(sth_activation_spill(g.store, g.things[1].record, g.things[1].memory, g.stream)); /* into the same slab */
    assert_int_equal(rig_stats(&g).pool_hits, 1);
    assert_ok(sth_activation_set_marks(g.store, 0, 0));
    assert_ok(rig_room(&g, 0));
    assert_ok(rig_ask(&g, 1));
    rig_fini(&g);
}

/* A graph that dies: slabs are free at once, though copies use them, and what takes them next is right. */
static void what_is_dropped_with_copies_under_way_harms_nobody(void **state) {
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        rig g;
        sth_activation_options o = marks(250 * KIB, 0);
        rig_init(&g, kind, 20 * MIB, &o, false);
        for (unsigned round = 0; round < 3; round++) {
            forward(&g, 8);
            if (round == 2) {
                assert_ok(rig_ask(&g, 3));
                assert_ok(rig_ahead(&g)); /* copies back are under way too */
            }
            for (int i = 0; i < 8; i++) assert_ok(rig_release(&g, i));
            assert_int_equal(rig_stats(&g).slab_bytes + rig_stats(&g).kept_bytes + rig_stats(&g).records, 0);
        }
        uint64_t host = rig_stats(&g).host_bytes;
        forward(&g, 8);
        backward(&g, 8);
        assert_int_equal(rig_stats(&g).host_bytes, host);
        rig_fini(&g);
    }
}

static void another_backward_finds_it_again(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(350 * KIB, 200 * KIB);
    rig_init(&g, true, 0, &o, false);
    forward(&g, 8);
    for (int round = 0; round < 3; round++)
        for (int i = 8; i-- > 0;) {
            assert_ok(rig_ask(&g, i));
            assert_ok(sth_activation_let_go(g.store, g.things[i].record, g.stream));
            g.things[i].copy = 0;
            assert_true(rig_stats(&g).kept_bytes <= 350 * KIB);
        }
    for (int i = 0; i < 8; i++) assert_ok(rig_release(&g, i));
    rig_fini(&g);
}

static void what_a_backward_computes_again_stays(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(150 * KIB, 0);
    rig_init(&g, true, 0, &o, false);
    for (int i = 0; i < 4; i++) assert_ok(rig_save(&g, i, 100 * KIB, (unsigned)i, true));
    assert_int_equal(rig_stats(&g).spilled, 0);
    for (int i = 0; i < 4; i++) {
        assert_ok(rig_ask(&g, i));
        assert_ok(rig_release(&g, i));
    }
    rig_fini(&g);
}

/* ---- time */

/* What a block of a transformer saves, in units of 25 KiB; or all alike. */
static uint64_t size_of(int i, bool mixed) {
    static const uint64_t units[] = {1, 1, 3, 1, 1, 1, 4, 4};
    return (mixed ? units[i % 8] : 2) * 25 * KIB;
}

/* A forward of `n` things, each `ns` of compute, and a backward of twice that; the host runs ahead of the
 * device, as it does before a GPU. Returns the device's time for the pass. */
static int64_t timed_pass(rig *g, int n, bool mixed, int64_t ns) {
    const sth_backend_ops *ops = g->device->ops;
    int64_t begin = ops->now_ns(g->device->self);
    pass(g, 0);
    for (int i = 0; i < n; i++) {
        assert_ok(ops->sim_compute(g->device->self, g->stream, ns));
        assert_ok(rig_save(g, i, size_of(i, mixed), (unsigned)i, false));
    }
    for (int i = n; i-- > 0;) {
        assert_ok(rig_ask(g, i));
        assert_ok(rig_ahead(g));
        assert_ok(ops->sim_compute(g->device->self, g->stream, 2 * ns));
        assert_ok(rig_release(g, i));
    }
    assert_ok(ops->stream_synchronize(g->device->self, g->stream));
    int64_t took = ops->now_ns(g->device->self) - begin;
    rig_rest(g);
    return took;
}

static int64_t longer(int64_t a, int64_t b) { return a > b ? a : b; }

/* From the third pass on the device does not wait for the store where the bytes fit behind compute, and elsewhere
 * for no longer than the link takes. */
static void time_is_that_of_compute_or_of_the_link(void **state) {
    (void)state;
    enum { N = 48 };
    const int64_t ns = 500000; /* of compute; the link carries 50 KiB in 1 ms, twice that of an average thing */
    for (unsigned turn = 0; turn < 12; turn += few_under_tsan(5, 1)) {
        rig g;
        bool mixed = turn % 2;
        uint64_t all = 0, most = 0, out = 0;
        for (int i = 0; i < N; i++)
            all += size_of(i, mixed), most = size_of(i, mixed) > most ? size_of(i, mixed) : most;
        uint64_t stays = all * (uint64_t)(14 - turn / 2 * 2) / 16;
        sth_activation_options o = marks(stays, stays - most);
        o.max_d2h = 64;
        o.max_h2d = 16;
        rig_init(&g, true, 50 * KIB * 1000, &o, false);
        g.quiet = true;
        int64_t took = 0;
        for (int step = 0; step < 6; step++) {
            uint64_t before = rig_stats(&g).spill_bytes;
            took = timed_pass(&g, N, mixed, ns);
            out = rig_stats(&g).spill_bytes - before;
            assert_true(rig_stats(&g).peak_bytes <= o.high);
        }
        int64_t copies = (int64_t)(out * 1000000 / (50 * KIB));
        int64_t bound = longer(N * ns, copies) + longer(N * 2 * ns, copies);
        print_message("# %3u of %d stay%s: %llu KiB went out, %.1f ms, bound %.1f ms\n", 14 - turn / 2 * 2, 16,
                      mixed ? ", mixed" : "", (unsigned long long)(out / KIB), (double)took / 1e6, (double)bound / 1e6);
        assert_true(took <= bound + bound / 20);
        assert_true(out <= all - stays + 3 * most);
        rig_fini(&g);
    }
}

/* ---- host memory */

static void classes_have_counts(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(0, 0);
    o.class_count = 2;
    o.class_bytes[0] = 64 * KIB;
    o.class_bytes[1] = 256 * KIB;
    o.class_slabs[0] = 2;
    o.class_slabs[1] = 1;
    rig_init(&g, true, 0, &o, false);
    assert_ok(rig_save(&g, 0, 60 * KIB, 0, false));
    assert_ok(rig_save(&g, 1, 64 * KIB, 1, false));
    assert_int_equal(rig_stats(&g).host_bytes, 128 * KIB);
    assert_ok(rig_save(&g, 2, 10 * KIB, 2, false)); /* the next larger */
    assert_int_equal(rig_stats(&g).host_bytes, 384 * KIB);
    assert_int_equal(rig_stats(&g).pool_hits, 3);
    assert_ok(rig_save(&g, 3, 10 * KIB, 3, false)); /* none is left */
    assert_int_equal(rig_stats(&g).fallbacks, 1);
    assert_int_equal(rig_stats(&g).pool_misses, 1);
    assert_int_equal(rig_stats(&g).host_bytes, 394 * KIB);
    assert_int_equal(rig_stats(&g).pinned_bytes, 384 * KIB);
    assert_ok(rig_save(&g, 4, 300 * KIB, 4, false)); /* larger than any */
    assert_int_equal(rig_stats(&g).fallbacks, 2);
    for (int i = 5; i-- > 0;) {
        assert_ok(rig_ask(&g, i));
        assert_ok(rig_release(&g, i));
    }
    rig_rest(&g);
    assert_ok(rig_save(&g, 0, KIB, 5, false));
    assert_int_equal(rig_stats(&g).pool_hits, 4);
    assert_int_equal(rig_stats(&g).host_bytes, 384 * KIB); /* what fell back has gone */
    rig_fini(&g);
}

static void a_pool_that_sizes_itself_misses_only_at_first(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(0, 0);
    rig_init(&g, true, 0, &o, false);
    uint64_t misses = 0, host = 0, bytes = 0;
    for (unsigned step = 0; step < (few_under_tsan(20, 300)); step++) {
        pass(&g, step);
        for (int i = 0; i < 12; i++) {
            assert_ok(rig_save(&g, i, 1 + (uint64_t)(i * i) * 2111, (unsigned)i, false));
            if (!step) bytes += 1 + (uint64_t)(i * i) * 2111;
        }
        backward(&g, 12);
        if (step == 0) misses = rig_stats(&g).pool_misses, host = rig_stats(&g).host_bytes;
        rig_rest(&g);
    }
    assert_int_equal(rig_stats(&g).pool_misses, misses);
    assert_int_equal(rig_stats(&g).host_bytes, host);
    assert_true(host < bytes + bytes / 8 + 12 * 512);
    assert_int_equal(rig_stats(&g).fallbacks, 0);
    rig_fini(&g);
}

static void closed_it_spills_nothing_and_gives_back_what_it_has(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(250 * KIB, 0);
    rig_init(&g, false, 20 * MIB, &o, false);
    forward(&g, 8);
    assert_ok(sth_activation_close(g.store));
    assert_int_equal(rig_stats(&g).host_bytes, rig_stats(&g).slab_bytes);
    uint64_t spilled = rig_stats(&g).spilled;
    assert_ok(rig_save(&g, 8, 300 * KIB, 8, false));
    assert_int_equal(rig_stats(&g).spilled, spilled);
    backward(&g, 9);
    rig_rest(&g);
    assert_ok(sth_activation_close(g.store)); /* again is fine */
    assert_int_equal(rig_stats(&g).host_bytes, 0);
    rig_fini(&g);
}

/* ---- sums */

static sth_backend_ops spying;
static uint8_t *copied_to;
static sth_status (*true_copy)(sth_backend_device *, void *, sth_devptr, uint64_t, sth_stream);

static sth_status spy(sth_backend_device *d, void *dst, sth_devptr src, uint64_t bytes, sth_stream stream) {
    copied_to = dst;
    return true_copy(d, dst, src, bytes, stream);
}

static void bytes_that_change_on_the_host_are_found(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(0, 0);
    o.checksums = true;
    rig_init(&g, false, 100 * MIB, &o, false);
    spying = *g.device->ops;
    true_copy = spying.copy_d2h_foreign;
    spying.copy_d2h_foreign = spy;
    g.device->ops = &spying;
    pass(&g, 41);
    forward(&g, 3);
    assert_ok(rig_ask(&g, 1));
    copied_to[77] ^= 4; /* of the last */
    assert_status(rig_ask(&g, 2), STH_CHANGED_DATA);
    assert_non_null(strstr(sth_last_error()->message, "saved tensor 2 of step 41"));
    copied_to[77] ^= 4;
    assert_ok(rig_ask(&g, 2));
    assert_ok(rig_ask(&g, 0));
    g.device->ops = &sthi_sim_ops;
    rig_fini(&g);
}

/* ---- what cannot be, threads, forks, failures */

static void what_cannot_be_is_refused(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(10 * MIB, 0);
    sth_activation *none;
    sth_record r;
    sth_activation_state s;
    rig_init(&g, true, 0, &o, false);
    o.low = 11 * MIB;
    assert_status(sth_activation_create(g.device, &o, &none), STH_INVALID_ARGUMENT);
    o = marks(1, 0);
    o.class_count = 2;
    o.class_bytes[0] = o.class_bytes[1] = 5;
    o.class_slabs[0] = o.class_slabs[1] = 1;
    assert_status(sth_activation_create(g.device, &o, &none), STH_INVALID_ARGUMENT);
    o.size = 1;
    assert_status(sth_activation_create(g.device, &o, &none), STH_INVALID_ARGUMENT);
    assert_status(sth_activation_create(NULL, NULL, &none), STH_INVALID_ARGUMENT);
    assert_status(sth_activation_save(g.store, 0, false, &r), STH_INVALID_ARGUMENT);
    assert_status(sth_activation_set_marks(g.store, 1, 2), STH_INVALID_ARGUMENT);
    forward(&g, 1);
    r = g.things[0].record;
    assert_status(sth_activation_restore(g.store, r, g.things[0].memory, g.stream), STH_INVALID_STATE);
    assert_status(sth_activation_spill(g.store, r, 0, g.stream), STH_INVALID_ARGUMENT);
    assert_status(sth_activation_spill(g.store, r, g.things[0].memory, 999), STH_INVALID_ARGUMENT); /* no stream */
    assert_int_equal(rig_state(&g, 0), STH_ACTIVATION_KEPT);
    assert_ok(sth_activation_spill(g.store, r, g.things[0].memory, g.stream));
    assert_status(sth_activation_spill(g.store, r, g.things[0].memory, g.stream), STH_INVALID_STATE);
    assert_status(sth_activation_arrive(g.store, r, g.stream), STH_INVALID_STATE);
    assert_ok(sth_activation_release(g.store, r, g.stream));
    assert_status(sth_activation_release(g.store, r, g.stream), STH_STALE);
    assert_status(sth_activation_ask(g.store, r, &s), STH_STALE);
    assert_status(sth_activation_ask(g.store, 0, &s), STH_STALE);
    assert_ok(sth_activation_state_get(g.store, r, &s));
    assert_int_equal(s, STH_ACTIVATION_RELEASED);
    g.things[0].record = 0;
    rig_fini(&g);
    sth_activation_destroy(NULL);
}

typedef struct player {
    sth_activation *store;
    unsigned seed;
    bool wrong;
} player;

/* As Python's hooks of several threads, each with records of its own; what another's record is told to do, this
 * one cannot, so marks are out of reach and everything is spilled by hand. */
static void *play(void *arg) {
    player *p = arg;
    enum { N = 40000 };
    uint8_t *from = sthi_alloc(N), *to = sthi_alloc(N);
    for (unsigned round = 0; round < 200; round++) {
        sth_record r;
        sth_activation_state s;
        uint64_t bytes = 1 + (p->seed = p->seed * 1103515245 + 12345) / 256 % N;
        memset(from, (int)round, bytes);
        memset(to, 0, bytes);
        p->wrong |= sth_activation_save(p->store, bytes, false, &r) ||
                    sth_activation_spill(p->store, r, (uintptr_t)from, 0);
        if (round % 3 == 0) {
            p->wrong |= sth_activation_release(p->store, r, 0) != STH_OK; /* stream 0 waited: `from` is free */
            continue;
        }
        p->wrong |= sth_activation_ask(p->store, r, &s) || s != STH_ACTIVATION_KEPT ||
                    sth_activation_release(p->store, r, 0);
    }
    sthi_free(from);
    sthi_free(to);
    return NULL;
}

static void several_threads_at_once(void **state) {
    (void)state;
    rig g;
    rig_init(&g, false, 800 * MIB, NULL, true);
    player players[4];
    sthi_thread threads[4];
    for (unsigned i = 0; i < 4; i++) {
        players[i] = (player){.store = g.store, .seed = i + 1};
        assert_ok(sthi_thread_start(&threads[i], "play", play, &players[i]));
    }
    for (int i = 0; i < 4; i++) {
        sthi_thread_join(threads[i]);
        assert_false(players[i].wrong);
    }
    assert_int_equal(rig_stats(&g).records + rig_stats(&g).slab_bytes + rig_stats(&g).kept_bytes, 0);
    rig_fini(&g);
}

static void a_forked_child_touches_nothing(void **state) {
    (void)state;
    rig g;
    sth_activation_options o = marks(250 * KIB, 0);
    rig_init(&g, false, 100 * MIB, &o, false);
    forward(&g, 4);
    pid_t child = fork();
    if (!child) {
        sth_record r;
        sth_activation_state s;
        bool right = sth_activation_save(g.store, 8, false, &r) == STH_INVALID_STATE &&
                     sth_activation_ask(g.store, g.things[0].record, &s) == STH_INVALID_STATE &&
                     sth_activation_release(g.store, g.things[0].record, 0) == STH_INVALID_STATE;
        sth_activation_destroy(g.store);
        _exit(right ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    backward(&g, 4);
    rig_fini(&g);
}

static bool fits(sthi_fault_kind kind, sth_status rc) {
    if (kind == STHI_FAULT_ALLOC) return rc == STH_OUT_OF_HOST_MEMORY;
    return kind == STHI_FAULT_DEVICE_CALL && rc == STH_DEVICE_ERROR;
}

/* The n-th call of a kind fails, once or from then on. What fails says so, and when the fault is over all that was
 * saved is right. Returns whether the fault was met. */
static bool fail_once(sthi_fault_kind kind, uint64_t n, bool forever) {
    rig g;
    long live = sthi_alloc_live();
    sth_activation_options o = marks(250 * KIB, 100 * KIB);
    rig_init(&g, false, 0, &o, false);
    sthi_fault_arm(kind, n, forever);
    sth_status rc = STH_OK;
    for (unsigned step = 0; step < 2; step++) {
        rc = sth_activation_pass(g.store, step);
        for (int i = 0; i < 8; i++)
            if (!g.things[i].record) {
                sth_status saved = rig_save(&g, i, 60 * KIB, (unsigned)i, false);
                if (rc == STH_OK) rc = saved;
            }
        for (int i = 8; i-- > 0;) {
            if (!g.things[i].record) continue;
            sth_status asked = rig_ask(&g, i);
            if (rc == STH_OK) rc = asked;
            if (asked == STH_OK && step) asked = rig_release(&g, i);
            if (rc == STH_OK) rc = asked;
            asked = rig_ahead(&g);
            if (rc == STH_OK) rc = asked;
        }
    }
    bool met = sthi_fault_seen(kind) >= n;
    sthi_fault_disarm_all();
    if (rc != STH_OK && !fits(kind, rc))
        fail_msg("kind %d, n = %llu: %s", (int)kind, (unsigned long long)n, sth_status_name(rc));
    for (int i = 8; i-- > 0;)
        if (g.things[i].record) {
            assert_ok(rig_ask(&g, i));
            assert_ok(rig_release(&g, i));
        }
    assert_int_equal(rig_stats(&g).records + rig_stats(&g).kept_bytes + rig_stats(&g).slab_bytes, 0);
    rig_fini(&g);
    if (sthi_alloc_live() != live)
        fail_msg("kind %d, n = %llu%s: %ld records leaked", (int)kind, (unsigned long long)n, forever ? " and on" : "",
                 sthi_alloc_live() - live);
    return met;
}

static void any_call_may_fail(void **state) {
    (void)state;
    static const sthi_fault_kind kinds[] = {STHI_FAULT_ALLOC, STHI_FAULT_PIN, STHI_FAULT_DEVICE_CALL};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int forever = 0; forever < 2; forever++)
            for (uint64_t n = 1; fail_once(kinds[k], n, forever); n += few_under_tsan(5, 1)) assert_true(n < 2000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_spilled_comes_back_in_every_kind_of_time),
        cmocka_unit_test(below_the_mark_everything_stays),
        cmocka_unit_test(the_marks_are_a_band),
        cmocka_unit_test(what_can_be_computed_again_is_dropped_before_others_are_spilled),
        cmocka_unit_test(another_backward_computes_it_again),
        cmocka_unit_test(held_ones_go_when_they_are_let_loose),
        cmocka_unit_test(caps_are_kept),
        cmocka_unit_test(the_second_pass_spills_at_once_and_brings_back_in_the_order_of_the_first),
        cmocka_unit_test(a_pass_that_differs_is_right),
        cmocka_unit_test(more_room_spills_less),
        cmocka_unit_test(asked_for_while_it_goes_out_it_stays),
        cmocka_unit_test(what_is_dropped_with_copies_under_way_harms_nobody),
        cmocka_unit_test(another_backward_finds_it_again),
        cmocka_unit_test(what_a_backward_computes_again_stays),
        cmocka_unit_test(time_is_that_of_compute_or_of_the_link),
        cmocka_unit_test(classes_have_counts),
        cmocka_unit_test(a_pool_that_sizes_itself_misses_only_at_first),
        cmocka_unit_test(closed_it_spills_nothing_and_gives_back_what_it_has),
        cmocka_unit_test(bytes_that_change_on_the_host_are_found),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(several_threads_at_once),
        cmocka_unit_test(a_forked_child_touches_nothing),
        cmocka_unit_test(any_call_may_fail),
    };
    return cmocka_run_group_tests_name("activation store", tests, NULL, NULL);
}
