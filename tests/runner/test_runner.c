/* The runner: what streams gives the bits of what is resident, figures are what the simulated world says, failures name
 * the layer and pass. */
#include "support/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runner/rig.h"
#include "store/tempfiles.h"

enum { MOST = 1 << 14 };
static uint8_t first[MOST], second[MOST];

/* What the resident model says, all layers at once on the device. */
static void resident(rig_spec s, void *to) {
    rig g;
    s.budget = 0;
    s.source = RIG_MEMORY;
    s.group = 1;
    s.lookahead = 0;
    assert_ok(rig_open(&g, &s));
    assert_true(g.in_bytes <= MOST);
    assert_ok(rig_run(&g, to));
    rig_close(&g);
}

static void what_streams_gives_the_bits_of_what_is_resident(void **state) {
    static const sth_dtype dtypes[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};
    uint32_t world = 0;
    for (int source = RIG_FILE; source <= RIG_OWN; source++)
        for (uint32_t group = 1; group <= STH_MAX_GROUP; group++)
            for (uint32_t lookahead = 0; lookahead < 4; lookahead++, world++) {
                rig g;
                rig_spec s = rig_default();
                s.source = source;
                s.folder = *state;
                s.group = group;
                s.lookahead = lookahead;
                s.dtype = dtypes[world % 3];
                s.layers = 5 + world % 4;
                s.residual = world % 2;
                s.after_last = world % 5 == 0;
                s.readers = world % 3;
                s.virtual_time = world % 4 < 2;
                s.budget = 1; /* set below */
                resident(s, first);
                uint64_t each = 4 * 512 + s.width * s.hidden * (sth_dtype_bits(s.dtype) / 8) * 2;
                s.budget = (2 * group + 1) * each + 8192;
                assert_ok(rig_open(&g, &s));
                for (int run = 0; run < 4; run++) {
                    assert_ok(rig_run(&g, second));
                    assert_memory_equal(first, second, g.in_bytes);
                }
                sth_runtime_stats stats;
                assert_ok(sth_runtime_stats_get(sth_runner_runtime(g.runner), &stats));
                assert_true(stats.device_peak <= s.budget);
                rig_close(&g);
            }
}

static rig_spec long_compute(void *folder) {
    rig_spec s = rig_default();
    s.source = RIG_FILE;
    s.folder = folder;
    s.layers = RIG_LAYERS;
    s.width = s.hidden = 48;
    s.rows = 16;
    uint64_t layer = 2 * 48 * 48 * 4;
    s.budget = 5 * (layer + 2048) + 65536;
    s.staging = 2 * (layer + 4096);
    s.link = UINT64_C(1000000000);
    double copy_s = (double)layer / (double)s.link, flops = 4.0 * 16 * 48 * 48;
    s.flops_per_s = flops / (1.5 * copy_s); /* compute takes half as long again as the copy */
    return s;
}

static void where_compute_is_longer_copies_hide(void **state) {
    for (uint32_t way = 0; way < 4; way++) { /* planned, and a lookahead of 2; by one and by two layers */
        rig g;
        rig_spec s = long_compute(*state);
        sth_run_metrics m;
        s.lookahead = way % 2 * 2;
        s.group = way / 2 + 1;
        s.budget += way / 2 * 5 * 20480;
        s.staging *= s.group;
        resident(s, first);
        assert_ok(rig_open(&g, &s));
        for (int run = 0; run < 6; run++) {
            assert_ok(rig_run(&g, second));
            assert_memory_equal(first, second, g.in_bytes);
        }
        assert_ok(sth_runner_metrics(g.runner, &m));
        assert_int_equal(m.run, 5);
        assert_true(m.h2d_bytes > RIG_LAYERS / 2 * g.layers[0].bytes); /* most of it streamed */
        if (m.overlap_ratio < 0.95)
            fail_msg("lookahead %u, group %u: overlap %g, stall %g of %g ms", s.lookahead, s.group, m.overlap_ratio,
                     m.stall_ms, m.latency_ms);
        print_message("# lookahead %u, group %u: overlap %g; %g ms of which %g stalls, %g copies\n", s.lookahead,
                      s.group, m.overlap_ratio, m.latency_ms, m.stall_ms, m.copy_ms);
        assert_true(m.latency_ms < 1.05 * m.compute_ms);
        assert_true(m.bandwidth_gb_s > 0.8 && m.bandwidth_gb_s <= 1.001);
        rig_close(&g);
    }
}

static void where_copying_is_longer_the_figures_say_so(void **state) {
    rig g;
    rig_spec s = long_compute(*state);
    sth_run_metrics m;
    s.flops_per_s *= 6; /* compute takes a quarter of the copy */
    assert_ok(rig_open(&g, &s));
    for (int run = 0; run < 4; run++) assert_ok(rig_run(&g, second));
    assert_ok(sth_runner_metrics(g.runner, &m));
    assert_true(m.overlap_ratio < 0.6);
    assert_true(m.stall_ms > m.compute_ms);
    assert_true(fabs(m.stall_ms + m.compute_ms - m.latency_ms) < 0.02 * m.latency_ms);
    rig_close(&g);
}

static void figures_of_layers_are_those_of_the_world(void **state) {
    (void)state;
    for (uint32_t group = 1; group <= 3; group++) {
        rig g;
        rig_spec s = rig_default();
        s.group = group;
        s.layers = 12;
        s.flops_per_s = 1e9;
        s.budget = 2 * group * (4 * 512 + 2 * 24 * 40 * 4) + 16384;
        assert_ok(rig_open(&g, &s));
        for (int run = 0; run < 3; run++) assert_ok(rig_run(&g, second));
        double stall = 0;
        uint32_t streamed = 0;
        for (uint32_t i = 0; i < s.layers; i++) {
            sth_layer_metrics m;
            assert_ok(sth_runner_layer_metrics(g.runner, i, &m));
            assert_string_equal(m.name, g.names[i]);
            assert_int_equal(m.runs, 3);
            assert_int_equal(m.bytes, g.layers[i].bytes);
            double ms = 4.0 * (double)(s.rows * s.width * s.hidden) / s.flops_per_s * 1e3;
            assert_true(fabs(m.compute_ms - ms) < 0.01 * ms);
            double copy_ms = (double)m.bytes / (double)s.link * 1e3;
            stall += m.stall_ms;
            if (m.h2d_ms == 0) continue; /* it has stayed since the runner was made */
            assert_true(m.h2d_ms > 0.9 * copy_ms && m.h2d_ms < 3 * copy_ms);
            streamed++;
        }
        assert_true(streamed > s.layers / 2);
        sth_layer_metrics none;
        assert_int_equal(sth_runner_layer_metrics(g.runner, s.layers, &none), STH_INVALID_ARGUMENT);
        sth_run_metrics run;
        assert_ok(sth_runner_metrics(g.runner, &run));
        assert_int_equal(run.run, 2);
        assert_true(run.latency_ms >= run.compute_ms && stall >= 0);
        rig_close(&g);
    }
}

static void there_are_no_figures_before_the_first_run(void **state) {
    (void)state;
    rig g;
    rig_spec s = rig_default();
    sth_run_metrics m;
    assert_ok(rig_open(&g, &s));
    assert_int_equal(sth_runner_metrics(g.runner, &m), STH_NOT_FOUND);
    rig_close(&g);
}

static void shapes_may_change_from_run_to_run(void **state) {
    (void)state;
    rig g;
    rig_spec s = rig_default();
    s.rows = 8;
    s.budget = 3 * (4 * 512 + 2 * 24 * 40 * 4) + 16384;
    resident(s, first);
    assert_ok(rig_open(&g, &s));
    static const uint64_t rows[] = {1, 8, 3, 8, 5};
    for (int i = 0; i < 5; i++) {
        sth_activations in = {1, {{STH_DTYPE_F32, 2, {rows[i], 24}, g.in, 0}}}, out = {.count = 1}, said;
        assert_ok(sth_runner_output(g.runner, &in, &said));
        assert_int_equal(said.tensors[0].bytes, rows[i] * 24 * 4);
        out.tensors[0].address = g.out;
        out.tensors[0].bytes = rows[i] * 24 * 4;
        assert_ok(sth_runner_run(g.runner, &in, &out, 0));
        assert_int_equal(out.tensors[0].shape[0], rows[i]);
        assert_memory_equal(first, (void *)(uintptr_t)g.out, rows[i] * 24 * 4);
    }
    sth_runtime_stats stats;
    assert_ok(sth_runtime_stats_get(sth_runner_runtime(g.runner), &stats));
    uint64_t between = 2 * 1024 + 1536; /* two outputs of 8 x 24, a hidden one of 8 x 40 in the scratch */
    assert_true(stats.device_bytes + between <= stats.budget);
    rig_close(&g);
}

static void host_memory_is_copied_there_and_back(void **state) {
    (void)state;
    for (int virtual_time = 0; virtual_time < 2; virtual_time++) {
        rig g;
        rig_spec s = rig_default();
        s.rows = 8;
        s.virtual_time = virtual_time;
        s.budget = 3 * (4 * 512 + 2 * 24 * 40 * 4) + 32768;
        resident(s, first);
        assert_ok(rig_open(&g, &s));
        uint8_t in_host[8 * 96], out_host[8 * 96];
        memcpy(in_host, (const void *)(uintptr_t)g.in, sizeof in_host);
        static const uint64_t rows[] = {2, 8, 1, 8};
        for (int i = 0; i < 4; i++) {
            sth_activations in = {1, {{STH_DTYPE_F32, 2, {rows[i], 24}, (uintptr_t)in_host, 0}}};
            sth_activations out = {1, {{.address = (uintptr_t)out_host, .bytes = rows[i] * 96 - 1}}};
            assert_int_equal(sth_runner_run_host(g.runner, &in, &out), STH_INVALID_ARGUMENT);
            out.count = 2;
            assert_int_equal(sth_runner_run_host(g.runner, &in, &out), STH_INVALID_ARGUMENT);
            assert_non_null(strstr(sth_last_error()->message, "the model has 1 outputs; there is room for 2"));
            out.count = 1;
            out.tensors[0].bytes = sizeof out_host;
            memset(out_host, 0xFF, sizeof out_host);
            assert_ok(sth_runner_run_host(g.runner, &in, &out));
            assert_int_equal(out.tensors[0].bytes, rows[i] * 96);
            assert_ptr_equal((void *)(uintptr_t)out.tensors[0].address, out_host);
            assert_memory_equal(first, out_host, rows[i] * 96);
        }
        sth_runtime_stats stats;
        assert_ok(sth_runtime_stats_get(sth_runner_runtime(g.runner), &stats));
        assert_true(stats.device_bytes + 2 * 1024 <= stats.budget);
        rig_close(&g);
    }
}

static void what_does_not_fit_is_said_and_changes_nothing(void **state) {
    (void)state;
    rig g;
    rig_spec s = rig_default();
    s.budget = 2 * (4 * 512 + 2 * 24 * 40 * 4) + 8192;
    resident(s, first);
    assert_ok(rig_open(&g, &s));
    sth_activations in = {1, {{STH_DTYPE_F32, 2, {4096, 24}, g.in, 0}}}, out = {1, {{.address = g.out,
                                                                                     .bytes = 1 << 30}}};
    assert_int_equal(sth_runner_run(g.runner, &in, &out, 0), STH_BUDGET_TOO_SMALL);
    in.tensors[0].shape[0] = UINT64_MAX / 2;
    assert_int_equal(sth_runner_run(g.runner, &in, &out, 0), STH_INVALID_ARGUMENT);
    in.tensors[0].shape[0] = s.rows;
    in.tensors[0].shape[1] = 23;
    assert_int_equal(sth_runner_run(g.runner, &in, &out, 0), STH_SHAPE_MISMATCH);
    assert_non_null(strstr(sth_last_error()->message, "layer 'blocks.0', executor 'cpu': weight '0.weight' takes 24"));
    in.tensors[0].shape[1] = 24;
    in.tensors[0].dtype = STH_DTYPE_F16;
    assert_int_equal(sth_runner_run(g.runner, &in, &out, 0), STH_DTYPE_MISMATCH);
    in.tensors[0].dtype = STH_DTYPE_F32;
    out.tensors[0].bytes = 10;
    assert_int_equal(sth_runner_run(g.runner, &in, &out, 0), STH_INVALID_ARGUMENT);
    assert_non_null(strstr(sth_last_error()->message, "room for 10"));
    out.count = 2;
    assert_int_equal(sth_runner_run(g.runner, &in, &out, 0), STH_INVALID_ARGUMENT);
    in.tensors[0].address = 0;
    assert_int_equal(sth_runner_run(g.runner, &in, &out, 0), STH_INVALID_ARGUMENT);
    assert_ok(rig_run(&g, second));
    assert_memory_equal(first, second, g.in_bytes);
    rig_close(&g);
}

static void a_store_that_fails_stops_the_run_only(void **state) {
    (void)state;
    for (uint32_t readers = 0; readers < 3; readers++) {
        rig g;
        rig_spec s = rig_default();
        s.source = RIG_OWN;
        s.readers = readers;
        s.virtual_time = !readers;
        s.budget = 2 * (4 * 512 + 2 * 24 * 40 * 4) + 8192;
        resident(s, first);
        assert_ok(rig_open(&g, &s));
        assert_ok(rig_run(&g, second));
        g.own_fails = g.own_reads + 2;
        sth_status rc = STH_OK;
        for (int i = 0; i < 3 && rc == STH_OK; i++) rc = rig_run(&g, second);
        assert_int_equal(rc, STH_IO);
        assert_non_null(strstr(sth_last_error()->message, "the line is dead"));
        assert_non_null(strstr(sth_last_error()->message, "layer 'blocks."));
        assert_int_equal(sth_last_error()->native_code, 5);
        g.own_fails = 0;
        for (int i = 0; i < 2; i++) {
            assert_ok(rig_run(&g, second));
            assert_memory_equal(first, second, g.in_bytes);
        }
        rig_close(&g);
    }
}

/* ---- an executor of the user's */

typedef struct own_executor {
    uint32_t fails_at; /* layer; STH_MAX: none */
    int prepared, ran, closed;
    bool wrong;
} own_executor;

static sth_status own_prepare(void *self, const sth_layer_spec *l, const sth_activations *in, sth_activations *out,
                              uint64_t *scratch) {
    own_executor *e = self;
    e->prepared++;
    e->wrong = e->wrong || l->tensors[0].address || in->tensors[0].address || out->count != in->count;
    out->count = 2; /* a second activation goes along from the first layer on */
    out->tensors[1] = (sth_activation_tensor){.dtype = STH_DTYPE_I64, .rank = 1, .shape = {l->index + 1}};
    *scratch = 100 * l->index;
    return STH_OK;
}

static sth_status own_run(void *self, const sth_layer_call *c) {
    own_executor *e = self;
    const float *x = (const float *)(uintptr_t)c->input->tensors[0].address;
    const float *b = (const float *)(uintptr_t)c->layer->tensors[0].address;
    float *y = (float *)(uintptr_t)c->output->tensors[0].address;
    int64_t *seen = (int64_t *)(uintptr_t)c->output->tensors[1].address;
    const int64_t *before = (const int64_t *)(uintptr_t)c->input->tensors[1].address;
    uint32_t i = c->layer->index;
    e->ran++;
    if (i == e->fails_at) return STH_DEVICE_ERROR; /* without a word */
    e->wrong = e->wrong || (uintptr_t)y % 512 || (uintptr_t)seen % 512 || c->scratch_bytes < 100 * i || x == y ||
               c->output->tensors[1].bytes != 8 * (i + 1) || c->input->count != (i ? 2 : 1);
    memset((void *)(uintptr_t)c->scratch, 0xEE, c->scratch_bytes); /* ours, and nothing else's */
    for (int k = 0; k < 24; k++) y[k] = x[k] + b[k];
    for (uint32_t k = 0; k < i; k++) seen[k] = before[k];
    seen[i] = i * 7;
    return STH_OK;
}

static void own_close(void *self) { ((own_executor *)self)->closed++; }

static void an_executor_of_ones_own(void **state) {
    (void)state;
    rig g;
    rig_spec s = rig_default();
    own_executor own = {.fails_at = UINT32_MAX};
    sth_executor_ops ops = {sizeof ops, STH_EXECUTOR_VERSION, "own", own_prepare, own_run, own_close};
    sth_executor *e = NULL;
    s.rows = 1;
    assert_ok(rig_open(&g, &s));
    assert_ok(sth_executor_create(&ops, &own, &e));
    assert_string_equal(sth_executor_name(e), "own");
    sth_runner_options o;
    sth_runner_options_init(&o);
    sth_runner *r = NULL;
    assert_int_equal(sth_runner_create(g.device, g.store, e, NULL, &r), STH_INVALID_ARGUMENT);
    o.runtime.budget = 48 << 10;
    o.group = 5;
    assert_int_equal(sth_runner_create(g.device, g.store, e, &o, &r), STH_INVALID_ARGUMENT);
    o.group = 2;
    o.runtime.budget = 4096;
    assert_int_equal(sth_runner_create(g.device, g.store, e, &o, &r), STH_BUDGET_TOO_SMALL);
    o.runtime.budget = 48 << 10;
    assert_ok(sth_runner_create(g.device, g.store, e, &o, &r));
    sth_devptr more;
    assert_ok(sth_device_alloc(g.device, 512, &more));
    sth_activations in = {1, {{STH_DTYPE_F32, 1, {24}, g.in, 0}}}, out = {.count = 2};
    out.tensors[0] = (sth_activation_tensor){.address = g.out, .bytes = 96};
    out.tensors[1] = (sth_activation_tensor){.address = more, .bytes = 512};
    for (int run = 0; run < 3; run++) {
        assert_ok(sth_runner_run(r, &in, &out, 0));
        for (int k = 0; k < 24; k++) {
            float y = ((const float *)(uintptr_t)g.in)[k];
            for (uint32_t i = 0; i < s.layers; i++) y = y + ((const float *)g.data[i])[k];
            assert_true(((const float *)(uintptr_t)g.out)[k] == y);
        }
        assert_int_equal(out.tensors[1].bytes, 8 * s.layers);
        for (uint32_t i = 0; i < s.layers; i++) assert_int_equal(((const int64_t *)(uintptr_t)more)[i], i * 7);
        own.fails_at = 3;
        out.tensors[1].bytes = 512;
        assert_int_equal(sth_runner_run(r, &in, &out, 0), STH_DEVICE_ERROR);
        assert_string_equal(sth_last_error()->message,
                            "layer 'blocks.3', executor 'own': the executor gives no reason");
        own.fails_at = UINT32_MAX;
        out.tensors[1].bytes = 512;
    }
    assert_int_equal(own.prepared, s.layers);
    assert_false(own.wrong);
    sth_runner_destroy(r);
    assert_int_equal(own.closed, 0);
    sth_executor_close(e);
    assert_int_equal(own.closed, 1);
    sth_device_free(g.device, more, 512);
    rig_close(&g);
}

static void an_executors_table_is_checked_before_use(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        own_executor own = {0};
        sth_executor_ops ops = {sizeof ops, STH_EXECUTOR_VERSION, "own", own_prepare, own_run, own_close};
        static const char *const words[] = {"no name", "no run", "struct_size", "version"};
        if (i == 0) ops.name = NULL;
        if (i == 1) ops.run = NULL;
        if (i == 2) ops.struct_size = 8;
        if (i == 3) ops.version = 0;
        sth_executor *e = NULL;
        assert_int_equal(sth_executor_create(&ops, &own, &e), STH_INVALID_ARGUMENT);
        assert_non_null(strstr(sth_last_error()->message, words[i]));
        assert_null(e);
        assert_int_equal(own.closed, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_streams_gives_the_bits_of_what_is_resident, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(where_compute_is_longer_copies_hide, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(where_copying_is_longer_the_figures_say_so, temp_setup, temp_teardown),
        cmocka_unit_test(figures_of_layers_are_those_of_the_world),
        cmocka_unit_test(there_are_no_figures_before_the_first_run),
        cmocka_unit_test(shapes_may_change_from_run_to_run),
        cmocka_unit_test(host_memory_is_copied_there_and_back),
        cmocka_unit_test(what_does_not_fit_is_said_and_changes_nothing),
        cmocka_unit_test(a_store_that_fails_stops_the_run_only),
        cmocka_unit_test(an_executor_of_ones_own),
        cmocka_unit_test(an_executors_table_is_checked_before_use),
    };
    return cmocka_run_group_tests_name("runner", tests, NULL, NULL);
}
