/* Exported calls about executors and runners: check the arguments, lock, then hand over to runner/. */
#include <string.h>

#include "api/arguments.h"
#include "runner/runner.h"
#include "runtime/runtime.h"

/* ---- executors */

sth_status sth_executor_create(const sth_executor_ops *ops, void *self, sth_executor **out_executor) {
    if (!ops || !out_executor) return null_argument("ops or out_executor");
    return sthi_executor_create(ops, self, out_executor);
}

void sth_executor_close(sth_executor *executor) { sthi_executor_close(executor); }
const char *sth_executor_name(const sth_executor *executor) { return executor ? executor->name : ""; }

void sth_mlp_options_init(sth_mlp_options *options) {
    if (options) sthi_mlp_options_init(options);
}

static sth_status check_mlp(const sth_mlp_options *options) {
    if (!options || options->size != sizeof *options)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "options were not set up by sth_mlp_options_init of this version");
    if ((unsigned)options->nonlinearity >= STH_NONLINEARITY_COUNT || !(options->sim_flops_per_s >= 0))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "there is no such nonlinearity, or the rate is negative");
    return STH_OK;
}

sth_status sth_executor_cpu_create(const sth_mlp_options *options, sth_executor **out_executor) {
    sthi_dense *dense;
    if (!out_executor) return null_argument("out_executor");
    STHI_TRY(check_mlp(options));
    STHI_TRY(sthi_dense_cpu_create(options->sim_flops_per_s, &dense));
    return sthi_mlp_create("cpu", options, dense, out_executor);
}

sth_status sth_executor_cuda_create(sth_device *device, const sth_mlp_options *options, sth_executor **out_executor) {
    sthi_dense *dense;
    if (!device || !out_executor) return null_argument("device or out_executor");
    STHI_TRY(check_mlp(options));
    STHI_TRY(sthi_dense_cuda_create(device, &dense));
    return sthi_mlp_create("cuda", options, dense, out_executor);
}

/* ---- runners */

void sth_runner_options_init(sth_runner_options *options) {
    if (options) sthi_runner_options_init(options);
}

sth_status sth_runner_create(sth_device *device, sth_store *store, sth_executor *executor,
                             const sth_runner_options *options, sth_runner **out_runner) {
    if (!device || !store || !executor || !out_runner) return null_argument("device, store, executor or out_runner");
    if (!options || options->size != sizeof *options || options->runtime.size != sizeof options->runtime)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "options were not set up by sth_runner_options_init of this version");
    return sthi_runner_create(device, store, executor, options, out_runner);
}

void sth_runner_destroy(sth_runner *runner) { sthi_runner_destroy(runner); }

sth_status sth_runner_add_adapter(sth_runner *runner, const char *layer, const char *tensor, sth_dtype dtype,
                                  uint32_t rank, const void *a, const void *b, double scale) {
    if (!runner || !layer || !tensor || !a || !b) return null_argument("runner, layer, tensor, a or b");
    sth_layer_adapter pair = {.rank = rank, .dtype = dtype, .scale = scale};
    STHI_TRY(sthi_runtime_usable(runner->runtime));
    sthi_lock(&runner->lock);
    sth_status rc = sthi_runner_add_adapter(runner, layer, tensor, &pair, a, b);
    sthi_unlock(&runner->lock);
    return rc;
}

sth_status sth_runner_output(sth_runner *runner, const sth_activations *input, sth_activations *out_output) {
    if (!runner || !input || !out_output) return null_argument("runner, input or out_output");
    STHI_TRY(sthi_runtime_usable(runner->runtime));
    sthi_lock(&runner->lock);
    sth_status rc = sthi_runner_ask(runner, input, out_output);
    sthi_unlock(&runner->lock);
    return rc;
}

sth_status sth_runner_run(sth_runner *runner, const sth_activations *input, sth_activations *output,
                          sth_stream stream) {
    if (!runner || !input || !output) return null_argument("runner, input or output");
    STHI_TRY(sthi_runtime_usable(runner->runtime));
    sthi_lock(&runner->lock);
    sth_status rc = sthi_runner_run(runner, input, output, stream);
    sthi_unlock(&runner->lock);
    return rc;
}

sth_status sth_runner_run_host(sth_runner *runner, const sth_activations *input, sth_activations *output) {
    if (!runner || !input || !output) return null_argument("runner, input or output");
    STHI_TRY(sthi_runtime_usable(runner->runtime));
    sthi_lock(&runner->lock);
    sth_status rc = sthi_runner_run_host(runner, input, output);
    sthi_unlock(&runner->lock);
    return rc;
}

sth_status sth_runner_layer_metrics(sth_runner *runner, uint32_t layer, sth_layer_metrics *out_metrics) {
    if (!runner || !out_metrics) return null_argument("runner or out_metrics");
    if (layer >= runner->layer_count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "there is no layer %u; the runner has %u", layer,
                         runner->layer_count);
    STHI_TRY(sthi_runtime_usable(runner->runtime));
    sthi_lock(&runner->lock);
    sth_status rc = sthi_runner_settle(runner);
    if (rc == STH_OK) sthi_runner_layer_figures(runner, layer, out_metrics);
    sthi_unlock(&runner->lock);
    return rc;
}

sth_status sth_runner_metrics(sth_runner *runner, sth_run_metrics *out_metrics) {
    if (!runner || !out_metrics) return null_argument("runner or out_metrics");
    STHI_TRY(sthi_runtime_usable(runner->runtime));
    sthi_lock(&runner->lock);
    sth_status rc = sthi_runner_settle(runner);
    if (rc == STH_OK) rc = sthi_runner_figures(runner, out_metrics);
    sthi_unlock(&runner->lock);
    return rc;
}

sth_runtime *sth_runner_runtime(sth_runner *runner) { return runner ? runner->runtime : NULL; }
