/* The CUDA executor on a card: what streams has the bits of what is resident, both are close to the reference on the
 * CPU, adapters too, and where computing is longer than copying and reading the copies hide. Skipped without a card or
 * cuBLAS. */
#include "support/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runner/rig.h"
#include "store/tempfiles.h"

static rig_spec base(void *folder) {
    rig_spec s = rig_default();
    s.cuda = true;
    s.source = RIG_FILE;
    s.folder = folder;
    s.layers = RIG_LAYERS;
    s.readers = STH_READERS_AUTO;
    s.link = 0;
    return s;
}

static void open_or_skip(rig *g, const rig_spec *s) {
    sth_device *card = NULL; /* asked for first: making the layers takes seconds */
    sth_status rc = sth_device_open("cuda", NULL, &card);
    if (rc == STH_BACKEND_UNAVAILABLE) skip_because(sth_last_error()->message);
    assert_ok(rc);
    sth_device_close(card);
    assert_ok(rig_open(g, s));
}

static double difference(sth_dtype dtype, const void *a, const void *b, uint64_t count) {
    double error = 0, size = 0;
    for (uint64_t i = 0; i < count; i++) {
        double x = (double)rig_load(dtype, a, i), d = x - (double)rig_load(dtype, b, i);
        error += d * d;
        size += x * x;
    }
    return sqrt(error / size);
}

static sth_status adapt(rig *g, const void *ab) {
    return sth_runner_add_adapter(g->runner, "blocks.7", "2.weight", g->spec.dtype, 4, ab, ab, 0.5);
}

static void streamed_resident_and_cpu_agree(void **state) {
    static const sth_dtype dtypes[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};
    static const double allowed[] = {1e-4, 5e-2, 1e-2};
    for (int world = 0; world < 12; world++) {
        rig_spec s = base(*state), all, cpu;
        s.dtype = dtypes[world % 3];
        s.width = 256;
        s.hidden = 520 + (uint64_t)(world % 2) * 8;
        s.rows = 9;
        s.f = (sth_nonlinearity)(world % STH_NONLINEARITY_COUNT);
        s.residual = true;
        s.group = 1 + (uint32_t)world % 4;
        s.lookahead = world / 4 % 2 * 2;
        all = s;
        all.lookahead = 0;
        uint64_t layer = 2 * s.width * s.hidden * (sth_dtype_bits(s.dtype) / 8);
        s.budget = (2 * s.group + 3) * layer + (UINT64_C(2) << 20);
        cpu = all;
        cpu.cuda = false;
        cpu.readers = 0;
        rig g;
        open_or_skip(&g, &s);
        uint64_t bytes = s.rows * s.width * 4;
        void *streamed = malloc(bytes), *resident = malloc(bytes), *reference = malloc(bytes);
        float ab[4 * 1024];
        for (uint64_t i = 0; i < 4 * 1024; i++) rig_store(s.dtype, ab, i, rig_value(5, i) * 0.1f);
        for (int run = 0; run < 3; run++) assert_ok(rig_run(&g, streamed));
        assert_ok(adapt(&g, ab));
        for (int run = 0; run < 2; run++) assert_ok(rig_run(&g, streamed));
        sth_runtime_stats stats;
        assert_ok(sth_runtime_stats_get(sth_runner_runtime(g.runner), &stats));
        assert_true(stats.device_peak <= s.budget);
        assert_true(stats.h2d_bytes > 2 * RIG_LAYERS * layer); /* it streamed */
        rig_close(&g);
        assert_ok(rig_open(&g, &all));
        assert_ok(adapt(&g, ab));
        assert_ok(rig_run(&g, resident));
        rig_close(&g);
        assert_ok(rig_open(&g, &cpu));
        assert_ok(adapt(&g, ab));
        assert_ok(rig_run(&g, reference));
        assert_memory_equal(streamed, resident, g.in_bytes);
        double off = difference(s.dtype, reference, streamed, s.rows * s.width);
        if (!(off < allowed[world % 3])) fail_msg("world %d: off the CPU's by %g", world, off);
        rig_close(&g);
        free(streamed);
        free(resident);
        free(reference);
    }
}

/* hidden 0: weights [0, n] and [n, 0]. */
static void a_layer_of_no_hidden_width_is_the_cpus(void **state) {
    rig_spec s = base(*state), cpu;
    s.source = RIG_MEMORY;
    s.hidden = 0;
    cpu = s;
    cpu.cuda = false;
    float out[2][RIG_ROWS * 24];
    for (int way = 0; way < 2; way++) {
        rig g;
        open_or_skip(&g, way ? &cpu : &s);
        memset(out[way], 0xFF, sizeof out[way]);
        assert_ok(rig_run(&g, out[way]));
        rig_close(&g);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
}

static void where_computing_is_longer_copies_hide(void **state) {
    rig_spec s = base(*state);
    s.dtype = STH_DTYPE_F16;
    s.width = 1024;
    s.hidden = 4096;
    s.rows = 131072; /* some 4 ms for a layer of 17 MB: slower than any link, and than the page cache */
    s.residual = true;
    s.budget = UINT64_C(2220) << 20; /* of which the activations take 2048 MiB: room for 10 layers of 24 */
    rig g;
    open_or_skip(&g, &s);
    void *out = malloc(g.in_bytes);
    sth_run_metrics m;
    for (int run = 0; run < 5; run++) assert_ok(rig_run(&g, out));
    assert_ok(sth_runner_metrics(g.runner, &m));
    print_message("# %g ms, of which %g stalls; %g MB copied at %g GB/s; overlap ratio %g\n", m.latency_ms, m.stall_ms,
                  (double)m.h2d_bytes / 1e6, m.bandwidth_gb_s, m.overlap_ratio);
    assert_true(m.h2d_bytes > 0);
    assert_true(m.overlap_ratio >= 0.95);
    free(out);
    rig_close(&g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(streamed_resident_and_cpu_agree, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(a_layer_of_no_hidden_width_is_the_cpus, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(where_computing_is_longer_copies_hide, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests_name("runner on cuda", tests, NULL, NULL);
}
