/* What the shipped executors compute, against sums in double; adapters; layers that they must refuse. */
#include "support/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "runner/rig.h"

static double nonlinear(sth_nonlinearity f, double x) {
    switch (f) {
    case STH_NONLINEARITY_RELU: return x > 0 ? x : 0;
    case STH_NONLINEARITY_GELU: return 0.5 * x * (1 + erf(x * 0.70710678118654752));
    case STH_NONLINEARITY_SILU: return x / (1 + exp(-x));
    default: return x;
    }
}

static double rounded(sth_dtype dtype, double v) {
    float back;
    rig_store(dtype, &back, 0, (float)v);
    return (double)rig_load(dtype, &back, 0);
}

typedef struct adapter {
    int weight; /* tensor 1 or 3 */
    uint32_t rank;
    double scale;
    void *a, *b;
} adapter;

/* One linear map of a layer on `x`, [rows, in] -> [rows, out], with the roundings that executor.h names. */
static void linear(const rig *g, uint32_t layer, int w, const double *x, double *y, bool f, const adapter *pair) {
    const rig_spec *s = &g->spec;
    const sth_store_tensor *weight = &g->tensors[layer][w], *bias = &g->tensors[layer][w - 1];
    const uint8_t *data = g->data[layer];
    uint64_t out = weight->shape[0], in = weight->shape[1];
    double ws = weight->scale == 0 ? 1 : weight->scale, bs = bias->scale == 0 ? 1 : bias->scale;
    for (uint64_t r = 0; r < s->rows; r++) {
        double down[8] = {0};
        for (uint32_t k = 0; pair && k < pair->rank; k++) {
            for (uint64_t i = 0; i < in; i++)
                down[k] += x[r * in + i] * (double)rig_load(s->dtype, pair->a, k * in + i);
            down[k] = rounded(s->dtype, down[k]);
        }
        for (uint64_t o = 0; o < out; o++) {
            double sum = 0, up = 0;
            for (uint64_t i = 0; i < in; i++)
                sum += x[r * in + i] * (double)rig_load(s->dtype, data + weight->offset, o * in + i);
            sum = rounded(s->dtype, sum * ws);
            for (uint32_t k = 0; pair && k < pair->rank; k++)
                up += down[k] * (double)rig_load(s->dtype, pair->b, o * pair->rank + k);
            if (pair) sum = rounded(s->dtype, sum + pair->scale * up);
            sum += bs * (double)rig_load(s->dtype, data + bias->offset, o);
            y[r * out + o] = rounded(s->dtype, nonlinear(f ? s->f : STH_NONLINEARITY_NONE, sum));
        }
    }
}

static void expected(const rig *g, double *x, const adapter *pair, uint32_t pair_layer) {
    const rig_spec *s = &g->spec;
    double *hidden = calloc(s->rows * s->hidden, sizeof *hidden), *y = calloc(s->rows * s->width, sizeof *y);
    for (uint64_t i = 0; i < s->rows * s->width; i++) x[i] = rounded(s->dtype, (double)rig_value(999, i));
    for (uint32_t l = 0; l < s->layers; l++) {
        const adapter *here = pair && l == pair_layer ? pair : NULL;
        linear(g, l, 1, x, hidden, true, here && here->weight == 1 ? here : NULL);
        linear(g, l, 3, hidden, y, s->after_last, here && here->weight == 3 ? here : NULL);
        for (uint64_t i = 0; i < s->rows * s->width; i++)
            x[i] = s->residual ? rounded(s->dtype, x[i] + y[i]) : y[i];
    }
    free(hidden);
    free(y);
}

static void close_to(const rig *g, const void *got, const double *want) {
    double error = 0, size = 0;
    for (uint64_t i = 0; i < g->spec.rows * g->spec.width; i++) {
        double d = (double)rig_load(g->spec.dtype, got, i) - want[i];
        error += d * d;
        size += want[i] * want[i];
    }
    /* Where sums differ in the last bit a value may be rounded the other way. */
    double allowed = g->spec.dtype == STH_DTYPE_F32 ? 1e-6 : g->spec.dtype == STH_DTYPE_F16 ? 5e-4 : 4e-3;
    if (!(sqrt(error / size) < allowed)) fail_msg("relative error %g", sqrt(error / size));
    assert_true(size > 1e-3);
}

static rig_spec small(uint32_t world) {
    static const sth_dtype dtypes[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16};
    rig_spec s = rig_default();
    s.layers = 2;
    s.dtype = dtypes[world % 3];
    s.f = (sth_nonlinearity)(world / 3 % STH_NONLINEARITY_COUNT);
    s.residual = world / 12 % 2;
    s.after_last = world / 24 % 2;
    s.width = 24 + world % 5;  /* some are no multiple of 8 */
    s.hidden = 31 + world % 7;
    return s;
}

static void layers_are_what_the_header_says(void **state) {
    (void)state;
    for (uint32_t world = 0; world < 48; world++) {
        rig g;
        rig_spec s = small(world);
        double want[RIG_ROWS * 32];
        uint8_t got[RIG_ROWS * 32 * 4];
        assert_ok(rig_open(&g, &s));
        assert_ok(rig_run(&g, got));
        expected(&g, want, NULL, 0);
        close_to(&g, got, want);
        rig_close(&g);
    }
}

static void fill(sth_dtype dtype, void *p, uint64_t n, uint32_t seed) {
    for (uint64_t i = 0; i < n; i++) rig_store(dtype, p, i, rig_value(seed, i) * 0.5f);
}

static void an_adapter_adds_its_product(void **state) {
    (void)state;
    for (uint32_t world = 0; world < 24; world++) {
        rig g;
        rig_spec s = small(world);
        s.source = RIG_OWN;
        s.budget = 24 << 10;
        float a[8 * 64], b[64 * 8];
        adapter pair = {world % 2 ? 1 : 3, 1 + world % 5, 0.25 + world, a, b};
        double want[RIG_ROWS * 32];
        uint8_t got[RIG_ROWS * 32 * 4], plain[RIG_ROWS * 32 * 4];
        uint64_t in = pair.weight == 1 ? s.width : s.hidden, out = pair.weight == 1 ? s.hidden : s.width;
        fill(s.dtype, a, pair.rank * in, 5);
        fill(s.dtype, b, pair.rank * out, 6);
        assert_ok(rig_open(&g, &s));
        assert_ok(rig_run(&g, plain));
        const char *name = pair.weight == 1 ? "0.weight" : "2.weight";
        assert_ok(sth_runner_add_adapter(g.runner, "blocks.1", name, s.dtype, pair.rank, a, b, pair.scale));
        memset(a, 0, sizeof a); /* they were copied */
        for (int run = 0; run < 3; run++) assert_ok(rig_run(&g, got));
        fill(s.dtype, a, pair.rank * in, 5);
        expected(&g, want, &pair, 1);
        close_to(&g, got, want);
        assert_memory_not_equal(got, plain, g.in_bytes);
        sth_runtime_stats stats;
        assert_ok(sth_runtime_stats_get(sth_runner_runtime(g.runner), &stats));
        assert_true(stats.device_bytes <= s.budget - 1024); /* adapters are paid from the budget */
        rig_close(&g);
    }
}

static void adapters_that_fit_nothing_are_refused(void **state) {
    (void)state;
    rig g;
    rig_spec s = rig_default();
    float ab[64] = {0};
    uint8_t to[RIG_ROWS * 24 * 4];
    s.budget = 64 << 10;
    assert_ok(rig_open(&g, &s));
    sth_runner *r = g.runner;
    assert_int_equal(sth_runner_add_adapter(r, "blocks.9", "0.weight", STH_DTYPE_F32, 1, ab, ab, 1), STH_NOT_FOUND);
    assert_int_equal(sth_runner_add_adapter(r, "blocks.1", "1.weight", STH_DTYPE_F32, 1, ab, ab, 1), STH_NOT_FOUND);
    assert_non_null(strstr(sth_last_error()->message, "'1.weight'"));
    assert_int_equal(sth_runner_add_adapter(r, "blocks.1", "0.bias", STH_DTYPE_F32, 1, ab, ab, 1), STH_SHAPE_MISMATCH);
    assert_int_equal(sth_runner_add_adapter(r, "blocks.1", "0.weight", STH_DTYPE_F32, 0, ab, ab, 1),
                     STH_INVALID_ARGUMENT);
    assert_int_equal(sth_runner_add_adapter(r, "blocks.1", "0.weight", STH_DTYPE_F32, 4000, ab, ab, 1),
                     STH_BUDGET_TOO_SMALL);
    assert_ok(rig_run(&g, to));
    assert_ok(sth_runner_add_adapter(r, "blocks.1", "0.weight", STH_DTYPE_F16, 1, ab, ab, 1));
    assert_int_equal(rig_run(&g, to), STH_DTYPE_MISMATCH);
    rig_close(&g);
}

static void layers_of_another_kind_are_refused(void **state) {
    (void)state;
    for (int i = 0; i < 7; i++) {
        rig g;
        rig_spec s = rig_default();
        sth_status want = STH_UNSUPPORTED;
        const char *word = "of your own";
        uint8_t to[RIG_ROWS * 24 * 4];
        assert_ok(rig_open(&g, &s));
        sth_store_tensor *t = g.tensors[1];
        if (i == 0) t[0].name = "norm.scale";
        if (i == 1) t[0].name = "7.bias", word = "bias without a weight";
        if (i == 2) t[1].name = "0.gate";
        if (i == 3) t[1].dtype = STH_DTYPE_I32, want = STH_DTYPE_MISMATCH, word = "is I32 and the input F32";
        if (i == 4)
            t[3].shape[0] = s.hidden, t[3].shape[1] = s.width, want = STH_SHAPE_MISMATCH, word = "takes 24 inputs";
        if (i == 5) t[0].shape[0] = s.hidden / 2, t[0].dtype = STH_DTYPE_F64, want = STH_DTYPE_MISMATCH, word = "F64";
        if (i == 6) t[0].shape[0] = 1, t[0].bytes = 4, want = STH_SHAPE_MISMATCH, word = "1 elements for 40 outputs";
        sth_store *store;
        sth_runner *r;
        sth_runner_options o;
        sth_runner_options_init(&o);
        o.runtime.budget = 1 << 20;
        assert_ok(sth_store_memory_create(g.layers, (const void *const *)g.data, s.layers, &store));
        assert_ok(sth_runner_create(g.device, store, g.executor, &o, &r));
        sth_activations in = {1, {{s.dtype, 2, {s.rows, s.width}, g.in, 0}}}, out = {1, {{.address = g.out,
                                                                                          .bytes = sizeof to}}};
        assert_int_equal(sth_runner_run(r, &in, &out, 0), want);
        assert_non_null(strstr(sth_last_error()->message, word));
        assert_non_null(strstr(sth_last_error()->message, "layer 'blocks.1'"));
        sth_runner_destroy(r);
        sth_store_close(store);
        rig_close(&g);
    }
}

/* hidden 0: weights [0, n] and [n, 0], whose sums are 0. */
static void a_layer_of_no_hidden_width_gives_its_last_bias(void **state) {
    (void)state;
    for (int world = 0; world < 6; world++) {
        rig g;
        rig_spec s = rig_default();
        double want[RIG_ROWS * 24];
        float got[RIG_ROWS * 24] = {0}, ab[24] = {0};
        s.hidden = 0;
        s.dtype = (sth_dtype[]){STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16}[world % 3];
        s.residual = world / 3;
        assert_ok(rig_open(&g, &s));
        assert_int_equal(sth_runner_add_adapter(g.runner, "blocks.1", "2.weight", s.dtype, 1, ab, ab, 1),
                         STH_INVALID_ARGUMENT);
        assert_ok(rig_run(&g, got));
        expected(&g, want, NULL, 0);
        close_to(&g, got, want);
        rig_close(&g);
    }
}

static void scales_of_a_layer_index_count(void **state) {
    (void)state;
    rig g;
    rig_spec s = rig_default();
    double want[RIG_ROWS * 24];
    s.layers = 1;
    assert_ok(rig_open(&g, &s));
    g.tensors[0][1].scale = 0.5;
    g.tensors[0][2].scale = -3;
    sth_store *store;
    sth_runner *r;
    sth_runner_options o;
    sth_runner_options_init(&o);
    o.runtime.budget = 1 << 20;
    assert_ok(sth_store_memory_create(g.layers, (const void *const *)g.data, 1, &store));
    assert_ok(sth_runner_create(g.device, store, g.executor, &o, &r));
    sth_activations in = {1, {{s.dtype, 3, {1, s.rows, s.width}, g.in, 0}}}, out = {1, {{.address = g.out,
                                                                                         .bytes = g.in_bytes}}};
    assert_ok(sth_runner_run(r, &in, &out, 0));
    assert_int_equal(out.tensors[0].rank, 3);
    expected(&g, want, NULL, 0);
    close_to(&g, (const void *)(uintptr_t)g.out, want);
    sth_runner_destroy(r);
    sth_store_close(store);
    rig_close(&g);
}

static void a_stream_of_ones_own_gives_the_same_bits(void **state) {
    (void)state;
    for (int virtual_time = 0; virtual_time < 2; virtual_time++) {
        rig g;
        rig_spec s = rig_default();
        s.virtual_time = virtual_time;
        s.budget = 40 << 10;
        s.link = 100000000;
        s.flops_per_s = 1e9;
        uint8_t want[RIG_ROWS * 24 * 4];
        sth_stream stream;
        assert_ok(rig_open(&g, &s));
        assert_ok(rig_run(&g, want));
        assert_ok(g.device->ops->stream_create(g.device->self, 0, &stream));
        sth_activations in = {1, {{s.dtype, 2, {s.rows, s.width}, g.in, 0}}}, out = {1, {{.address = g.out,
                                                                                          .bytes = g.in_bytes}}};
        for (int run = 0; run < 3; run++) {
            memset((void *)(uintptr_t)g.out, 0xFF, g.in_bytes);
            assert_ok(sth_runner_run(g.runner, &in, &out, stream));
            assert_ok(g.device->ops->stream_synchronize(g.device->self, stream));
            assert_memory_equal((const void *)(uintptr_t)g.out, want, g.in_bytes);
        }
        sth_runner_destroy(g.runner);
        g.runner = NULL;
        g.device->ops->stream_destroy(g.device->self, stream);
        rig_close(&g);
    }
}

/* What lies between the layers may be most of the budget. */
static void activations_may_take_most_of_the_budget(void **state) {
    (void)state;
    rig_spec all = rig_default();
    all.rows = 256;
    rig_spec small = all;
    rig g;
    void *resident = NULL, *streamed = NULL;
    for (int way = 0; way < 2; way++) {
        assert_ok(rig_open(&g, way ? &small : &all));
        small.budget = 2 * g.in_bytes + all.rows * all.hidden * 4 + 3 * rig_layer_bytes(&g) + 4096;
        void **out = way ? &streamed : &resident;
        *out = malloc(g.in_bytes);
        for (int run = 0; run < 3; run++) assert_ok(rig_run(&g, *out));
        sth_runtime_stats stats;
        assert_ok(sth_runtime_stats_get(sth_runner_runtime(g.runner), &stats));
        if (way) assert_true(stats.h2d_bytes > 2 * all.layers * rig_layer_bytes(&g)); /* it streamed */
        if (way) assert_memory_equal(resident, streamed, g.in_bytes);
        rig_close(&g);
    }
    free(resident);
    free(streamed);
}

static void options_and_devices_are_checked(void **state) {
    (void)state;
    sth_mlp_options o;
    sth_executor *e = NULL;
    sth_device *sim;
    sth_mlp_options_init(&o);
    assert_int_equal(sth_executor_cpu_create(NULL, &e), STH_INVALID_ARGUMENT);
    o.nonlinearity = STH_NONLINEARITY_COUNT;
    assert_int_equal(sth_executor_cpu_create(&o, &e), STH_INVALID_ARGUMENT);
    sth_mlp_options_init(&o);
    o.size = 1;
    assert_int_equal(sth_executor_cpu_create(&o, &e), STH_INVALID_ARGUMENT);
    sth_mlp_options_init(&o);
    assert_ok(sth_device_open("sim", NULL, &sim));
    assert_int_equal(sth_executor_cuda_create(sim, &o, &e), STH_BACKEND_UNAVAILABLE);
    assert_non_null(strstr(sth_last_error()->message, "\"sim\""));
    assert_null(e);
    sth_device_close(sim);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_are_what_the_header_says),
        cmocka_unit_test(an_adapter_adds_its_product),
        cmocka_unit_test(adapters_that_fit_nothing_are_refused),
        cmocka_unit_test(layers_of_another_kind_are_refused),
        cmocka_unit_test(a_layer_of_no_hidden_width_gives_its_last_bias),
        cmocka_unit_test(scales_of_a_layer_index_count),
        cmocka_unit_test(a_stream_of_ones_own_gives_the_same_bits),
        cmocka_unit_test(activations_may_take_most_of_the_budget),
        cmocka_unit_test(options_and_devices_are_checked),
    };
    return cmocka_run_group_tests_name("mlp", tests, NULL, NULL);
}
