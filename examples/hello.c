/* Streams the tensors of a model file through a device that has room for a part of them.
 *
 *   hello FILE BUDGET      for example: hello model.safetensors 60MB
 *
 * Build: cc -std=c17 hello.c $(pkg-config --cflags --libs stagehand) -o hello */
#include <inttypes.h>
#include <stdio.h>

#include <stagehand/stagehand.h>

/* One unit for each tensor; each is read from its place in the file. */
static sth_status add_units(sth_runtime *runtime, sth_checkpoint *file) {
    for (uint64_t i = 0; i < sth_checkpoint_tensor_count(file); i++) {
        const sth_tensor_info *t = sth_checkpoint_tensor(file, i);
        sth_file_range range = {.file = t->file, .file_offset = t->offset, .bytes = t->bytes};
        sth_unit_desc desc = {
            .name = t->name, .bytes = t->bytes, .checkpoint = file, .ranges = &range, .range_count = 1};
        uint32_t unit;
        sth_status status = t->bytes ? sth_runtime_add_unit(runtime, &desc, &unit) : STH_OK;
        if (status != STH_OK) return status;
    }
    return sth_runtime_seal(runtime);
}

/* One pass of the model. After a failure sth_last_error() says what and why. */
static sth_status one_step(sth_runtime *runtime, sth_stream stream) {
    sth_lease lease;
    sth_status status = sth_step_begin(runtime);
    for (uint32_t unit = 0; status == STH_OK && unit < sth_runtime_unit_count(runtime); unit++) {
        if ((status = sth_unit_acquire(runtime, unit, stream, &lease)) != STH_OK) break;
        /* Enqueue your kernels on `stream` here: they find the unit's bytes at lease.address. */
        sth_lease_release(runtime, &lease); /* its place is refilled once those kernels are done */
    }
    return status == STH_OK ? sth_step_end(runtime) : status;
}

static sth_status run(sth_device *device, sth_checkpoint *file, const char *budget) {
    sth_runtime_options options;
    sth_runtime_options_init(&options);
    sth_runtime *runtime = NULL;
    sth_status status = sth_parse_size(budget, &options.budget);
    if (status == STH_OK) status = sth_runtime_create(device, &options, &runtime);
    if (status == STH_OK) status = add_units(runtime, file);
    for (int step = 0; step < 5 && status == STH_OK; step++) status = one_step(runtime, 0);
    sth_runtime_stats stats;
    if (status == STH_OK) status = sth_runtime_stats_get(runtime, &stats);
    if (status == STH_OK)
        printf("%" PRIu64 " steps, %" PRIu64 " bytes moved in %" PRIu64 " copies, %" PRIu64
               " bytes of device memory at most\n",
               stats.steps, stats.h2d_bytes, stats.copies, stats.device_peak);
    sth_runtime_destroy(runtime);
    return status;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: hello FILE BUDGET\n");
        return 2;
    }
    sth_checkpoint *file = NULL;
    sth_device *device = NULL;
    sth_status status = sth_checkpoint_open(argv[1], &file);
    if (status == STH_OK) status = sth_device_open("sim", NULL, &device);
    if (status == STH_OK) status = run(device, file, argv[2]);
    if (status != STH_OK) fprintf(stderr, "%s: %s\n", sth_status_name(status), sth_last_error()->message);
    sth_device_close(device);
    sth_checkpoint_close(file);
    return status == STH_OK ? 0 : 1;
}
