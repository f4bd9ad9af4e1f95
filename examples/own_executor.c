/* Streams a safetensors file through an executor of one's own: it adds up what each tensor of a layer holds, by layers,
 * without ever having all of them in memory.
 *
 *   own_executor FILE BUDGET
 *
 * Build: cc -std=c17 own_executor.c $(pkg-config --cflags --libs stagehand) -o own_executor */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <stagehand/stagehand.h>

/* What goes from layer to layer: one sum so far, and one count. */
static sth_status prepare(void *self, const sth_layer_spec *layer, const sth_activations *input,
                          sth_activations *output, uint64_t *scratch_bytes) {
    (void)self, (void)input, (void)output, (void)scratch_bytes; /* the output is as the input, no scratch */
    for (uint32_t i = 0; i < layer->tensor_count; i++)
        if (layer->tensors[i].dtype != STH_DTYPE_F32)
            return sth_error_set(STH_UNSUPPORTED, "own_executor", 0, layer->tensors[i].name,
                                 "only F32 tensors are added up");
    return STH_OK;
}

/* On device "sim" and stream 0, device memory is the host's and everything before has happened. */
static sth_status run(void *self, const sth_layer_call *call) {
    uint64_t *layers = self;
    const double *before = (const double *)(uintptr_t)call->input->tensors[0].address;
    double *after = (double *)(uintptr_t)call->output->tensors[0].address, sum = 0;
    for (uint32_t i = 0; i < call->layer->tensor_count; i++) {
        const sth_layer_tensor *t = &call->layer->tensors[i];
        const float *values = (const float *)(uintptr_t)t->address;
        for (uint64_t k = 0; k < t->bytes / sizeof *values; k++) sum += (double)values[k];
    }
    printf("%s: %" PRIu32 " tensors, sum %g\n", call->layer->name, call->layer->tensor_count, sum);
    *after = *before + sum;
    ++*layers;
    return STH_OK;
}

static sth_status add_up(sth_device *device, sth_store *store, const char *budget) {
    uint64_t layers = 0;
    sth_executor_ops table = {.struct_size = sizeof table, .version = STH_EXECUTOR_VERSION, .name = "adds up",
                              .prepare = prepare, .run = run};
    sth_executor *executor = NULL;
    sth_runner *runner = NULL;
    sth_runner_options options;
    sth_runner_options_init(&options);
    sth_status rc = sth_parse_size(budget, &options.runtime.budget);
    if (rc == STH_OK) rc = sth_executor_create(&table, &layers, &executor);
    if (rc == STH_OK) rc = sth_runner_create(device, store, executor, &options, &runner);
    sth_devptr sums = 0; /* input and output: on "sim" the host may read and write them */
    if (rc == STH_OK) rc = sth_device_alloc(device, 1024, &sums);
    if (rc == STH_OK) {
        sth_activations in = {1, {{STH_DTYPE_F64, 1, {1}, sums, 0}}}, out = {1, {{.address = sums + 512,
                                                                                  .bytes = 512}}};
        *(double *)(uintptr_t)sums = 0;
        rc = sth_runner_run(runner, &in, &out, 0);
    }
    if (rc == STH_OK) printf("%" PRIu64 " layers, total %g\n", layers, *(double *)(uintptr_t)(sums + 512));
    if (rc != STH_OK) fprintf(stderr, "%s: %s\n", sth_status_name(rc), sth_last_error()->message);
    sth_runner_destroy(runner);
    sth_executor_close(executor);
    if (sums) sth_device_free(device, sums, 1024);
    return rc;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: own_executor FILE BUDGET\n");
        return 2;
    }
    sth_device *device = NULL;
    sth_store *store = NULL;
    sth_status rc = sth_store_files_open(argv[1], NULL, 0, &store);
    if (rc == STH_OK) rc = sth_device_open("sim", NULL, &device);
    if (rc != STH_OK) fprintf(stderr, "%s: %s\n", sth_status_name(rc), sth_last_error()->message);
    if (rc == STH_OK) rc = add_up(device, store, argv[2]);
    sth_store_close(store);
    sth_device_close(device);
    return rc == STH_OK ? 0 : 1;
}
