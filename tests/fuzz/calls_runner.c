/* Calls of executor.h and runner.h. */
#include "fuzz/calls.h"

static sth_status run_nothing(void *self, const sth_layer_call *call) {
    (void)self;
    CHECK(call->device && call->layer && call->input->count == call->output->count);
    return STH_OK;
}

static void make_executor(calls *c) {
    sth_executor *made = (void *)c;
    sth_status rc;
    if (calls_byte(c) % 2) {
        sth_executor_ops ops = {sizeof ops, STH_EXECUTOR_VERSION, "fuzz", NULL, run_nothing, NULL};
        switch (calls_byte(c) % 12) {
        case 0: ops.struct_size = (size_t)calls_extreme(c); break;
        case 1: ops.version = (uint32_t)calls_extreme(c); break;
        case 2: ops.name = NULL; break;
        case 3: ops.run = NULL; break;
        default: break;
        }
        rc = CALLS_TRY(sth_executor_create(calls_or_null(c, &ops), NULL, &made));
    } else {
        sth_mlp_options o;
        sth_mlp_options_init(&o);
        sth_mlp_options_init(NULL);
        o.nonlinearity = (sth_nonlinearity)calls_choice(c, STH_NONLINEARITY_COUNT);
        o.after_last = calls_byte(c) & 1;
        o.residual = calls_byte(c) & 1;
        if (calls_once_in(c, 4)) o.sim_flops_per_s = calls_real(c) + 1e6;
        if (calls_once_in(c, 24)) o.size = (size_t)calls_extreme(c);
        calls_device *d = calls_any_device(c);
        rc = calls_once_in(c, 8) && d ? CALLS_TRY(sth_executor_cuda_create(d->device, &o, &made))
                                      : CALLS_TRY(sth_executor_cpu_create(calls_or_null(c, &o), &made));
    }
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->executor = made;
    CHECK(sth_executor_name(c->executor));
}

static void make_runner(calls *c, calls_device *d) {
    sth_runner_options o;
    sth_runner_options_init(&o);
    sth_runner_options_init(NULL);
    o.lookahead = calls_number(c, 4);
    o.group = calls_byte(c) % 4 ? 1 : calls_number(c, STH_MAX_GROUP + 1);
    o.runtime.budget = calls_byte(c) % 4 ? CALLS_MEMORY / 2 : calls_bytes(c, CALLS_MEMORY);
    o.runtime.link_bytes_per_s = 1e9;
    o.runtime.reader_threads = calls_byte(c) % 2;
    if (calls_once_in(c, 16)) o.size = (size_t)calls_extreme(c);
    if (calls_once_in(c, 16)) o.runtime.size = (size_t)calls_extreme(c);
    if (calls_once_in(c, 16)) o.runtime.reserved = calls_extreme(c);
    if (calls_once_in(c, 16)) o.runtime.least_room = calls_extreme(c);
    sth_runner *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_runner_create(calls_or_null(c, d->device), calls_or_null(c, c->store), c->executor,
                                                calls_or_null(c, &o), &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->runner = made;
}

/* Activations in host memory, [rows, 16] of F32 as the layers of the model files want them; `room` bytes at each. */
static sth_activations any_activations(calls *c, uint64_t room) {
    sth_activations a = {.count = 1};
    sth_activation_tensor *t = &a.tensors[0];
    uint64_t rows = 1 + calls_byte(c) % 8u;
    *t = (sth_activation_tensor){.dtype = STH_DTYPE_F32, .rank = 2, .shape = {rows, 16}, .bytes = rows * 64,
                          .address = (sth_devptr)(uintptr_t)(calls_memory + room)};
    switch (calls_byte(c) % 32) {
    case 0: a.count = (uint32_t)calls_extreme(c); break;
    case 1: t->dtype = (sth_dtype)calls_choice(c, STH_DTYPE_COUNT); break;
    case 2: t->rank = (int)calls_extreme(c); break;
    case 3: t->shape[0] = calls_extreme(c); break;
    case 4: t->shape[1] = calls_extreme(c); break;
    case 5: t->bytes = calls_extreme(c); break;
    case 6: t->address = 0; break;
    case 7: t->shape[0] = 0, t->bytes = 0; break;
    default: break;
    }
    return a;
}

static void run(calls *c) {
    sth_activations input = any_activations(c, 0), output = any_activations(c, 1 << 16);
    output.tensors[0].bytes = calls_byte(c) % 8 ? 1 << 16 : calls_byte(c);
    sth_activations asked;
    CALLS_TRY(sth_runner_output(calls_or_null(c, c->runner), calls_or_null_const(c, &input), calls_or_null(c, &asked)));
    CALLS_TRY(sth_runner_run_host(calls_or_null(c, c->runner), calls_or_null_const(c, &input),
                                  calls_or_null(c, &output)));
}

static void adapt(calls *c) {
    double scale = calls_real(c);
    uint32_t rank = calls_byte(c) % 8 ? 1 + calls_byte(c) % 4u : (uint32_t)calls_extreme(c);
    if (rank > 4 && rank < 1 << 30) return; /* the memory behind a and b is not so large */
    sth_dtype dtype = calls_byte(c) % 8 ? STH_DTYPE_F32 : (sth_dtype)calls_choice(c, STH_DTYPE_COUNT);
    CALLS_TRY(sth_runner_add_adapter(calls_or_null(c, c->runner), calls_byte(c) % 4 ? "layer.0" : calls_text(c),
                                     calls_byte(c) % 4 ? "weight" : calls_text(c), dtype, rank,
                                     calls_or_null_const(c, calls_images), calls_images, scale));
}

void calls_on_runner(calls *c) {
    calls_device *d = calls_any_device(c);
    sth_layer_metrics layer;
    sth_run_metrics metrics;
    sth_runtime_stats stats;
    if (!c->executor) make_executor(c);
    else if (!c->runner) {
        if (d && c->store) make_runner(c, d);
    } else if (calls_byte(c) % 4 == 0) {
        CALLS_TRY(sth_runner_layer_metrics(calls_or_null(c, c->runner), calls_number(c, 3), calls_or_null(c, &layer)));
        CALLS_TRY(sth_runner_metrics(calls_or_null(c, c->runner), calls_or_null(c, &metrics)));
        CALLS_TRY(sth_runtime_stats_get(sth_runner_runtime(calls_or_null(c, c->runner)), &stats));
    } else if (calls_byte(c) % 4 == 0) adapt(c);
    else run(c);
}

void calls_end_runner(calls *c) {
    sth_runner_destroy(c->runner);
    sth_executor_close(c->executor);
    sth_runner_destroy(NULL);
    sth_executor_close(NULL);
}
