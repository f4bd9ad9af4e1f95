/* stagehand/runner.h - drive a model, layer by layer, from a store (store.h) through an executor
 * (executor.h), with less device memory than its weights need. It is a runtime (runtime.h) whose
 * steps are made for you.
 *
 * Life: sth_runner_create -> (sth_runner_add_adapter) -> sth_runner_run, again and again ->
 * sth_runner_destroy.
 *
 * Unless a function says otherwise: Threads: any, one after the other (a lock orders them).
 * Blocks: for a call of another thread. Allocates: no. In a forked child calls return
 * INVALID_STATE, and destroy does nothing. */
#ifndef STAGEHAND_RUNNER_H
#define STAGEHAND_RUNNER_H
#include <stddef.h>
#include <stdint.h>

#include "stagehand/executor.h"
#include "stagehand/runtime.h"
#include "stagehand/store.h"

#ifdef __cplusplus
extern "C" {
#endif

#define STH_MAX_GROUP 4

typedef struct sth_runner_options {
    size_t size;        /* sizeof(sth_runner_options), set by init */
    uint32_t lookahead; /* W: transfers kept ahead of the layer that runs; the first W are requested before a run
                           begins. 0: as many, and which, as the plan for the budget says. Default 0 */
    uint32_t group;     /* layers per transfer, 1 to STH_MAX_GROUP. Default 1 */
    sth_runtime_options runtime; /* budget (required) holds for weights, adapters, and what lies between layers.
                                    `policy` and `prefetch_window` are set by the runner, `reserved` is added to */
} sth_runner_options;
STH_API void sth_runner_options_init(sth_runner_options *options);

typedef struct sth_runner sth_runner;

/* Store and executor must outlive the runner. options NULL is an error: the budget is required.
 * Returns INVALID_ARGUMENT, and as sth_runtime_create, _add_unit and _seal. Blocks, Allocates:
 * as those. */
STH_API sth_status sth_runner_create(sth_device *device, sth_store *store, sth_executor *executor,
                                     const sth_runner_options *options, sth_runner **out_runner);
/* NULL is fine. Threads: one, the last user. Blocks: for the work that uses its memory, and
 * copies in flight. */
STH_API void sth_runner_destroy(sth_runner *runner);

/* Adds a resident LoRA pair to weight `tensor` [outputs, inputs] of layer `layer`: a [rank,
 * inputs] and b [outputs, rank] of `dtype`, in host memory, copied before this returns.
 * Executors see it in sth_layer_spec. Returns NOT_FOUND (names what), SHAPE_MISMATCH where the
 * tensor has not rank 2, BUDGET_TOO_SMALL, OUT_OF_DEVICE_MEMORY. Blocks: for the copies, and as
 * sth_runtime_set_reserved. Allocates: host and device memory. */
STH_API sth_status sth_runner_add_adapter(sth_runner *runner, const char *layer, const char *tensor,
                                          sth_dtype dtype, uint32_t rank, const void *a,
                                          const void *b, double scale);

/* Describes the model's output for an input of such dtypes and shapes: counts, dtypes, shapes and
 * bytes, addresses 0. Returns the executor's refusal. Allocates: scratch, freed before it returns. */
STH_API sth_status sth_runner_output(sth_runner *runner, const sth_activations *input,
                                     sth_activations *out_output);

/* One pass on `stream`. The input is read, the output written, in device memory of the caller's,
 * each tensor contiguous. `output` needs count, addresses and, as `bytes`, the room at each; the
 * rest is filled in. Enqueues like its executor does: the output is there when the stream is.
 * The stream must stay until the next call or destroy. Returns INVALID_ARGUMENT,
 * BUDGET_TOO_SMALL, the store's or the executor's failure with the layer's name; then the output
 * is of no use, and the next run begins afresh. Blocks: as sth_unit_acquire, and as the
 * executor. Allocates: device memory for what lies between layers, when shapes grow. */
STH_API sth_status sth_runner_run(sth_runner *runner, const sth_activations *input,
                                  sth_activations *output, sth_stream stream);

/* The same with host memory: the addresses are those of host memory, cast. The input is copied
 * to the device, the output from it, and the call returns when it is there; the runner has a
 * stream of its own for it. Blocks: for all of it. Allocates: also device memory for input and
 * output, of the budget, when shapes grow. */
STH_API sth_status sth_runner_run_host(sth_runner *runner, const sth_activations *input,
                                       sth_activations *output);

/* Means since the runner was made, of the runs whose figures are known. Blocks: for the work of
 * the last run, and copies that were issued in it. Returns INVALID_ARGUMENT past the end. */
typedef struct sth_layer_metrics {
    const char *name;      /* lives as long as the store */
    uint64_t bytes;        /* of its tensors; what a transfer of it moves */
    uint64_t runs;
    double h2d_ms;         /* copying it to the device, once; its share by bytes of its group's. 0: it was copied before
                              the first run alone */
    double compute_ms;
    /* the stream waited for its copy; a group's counts for its first layer */
    double stall_ms;
} sth_layer_metrics;
STH_API sth_status sth_runner_layer_metrics(sth_runner *runner, uint32_t layer,
                                            sth_layer_metrics *out_metrics);

/* Metrics of the newest run. Copies that the next run will use count in the run that issued them.
 * Blocks: as above. Returns NOT_FOUND before the first run. */
typedef struct sth_run_metrics {
    uint64_t run;          /* its number, from 0 */
    double latency_ms;     /* from the first layer's arrival to the end of the last */
    double compute_ms;     /* sum over layers */
    double stall_ms;       /* the same */
    uint64_t h2d_bytes;    /* copied to the device */
    double copy_ms;        /* time with at least one copy under way */
    double bandwidth_gb_s; /* h2d_bytes over copy_ms */
    /* share of copy_ms in which the stream did not wait for a copy; 1 where nothing was copied */
    double overlap_ratio;
    uint64_t file_bytes;   /* read from files meanwhile */
} sth_run_metrics;
STH_API sth_status sth_runner_metrics(sth_runner *runner, sth_run_metrics *out_metrics);

/* The runtime below, for its statistics: do not use its units or steps while a run is under way.
 * Lives as long as the runner. */
STH_API sth_runtime *sth_runner_runtime(sth_runner *runner);

#ifdef __cplusplus
}
#endif
#endif
