/* stagehand/executor.h - what is done with a layer whose weights are on the device: a table of
 * functions that you may fill yourself, and executors for layers of linear maps on the CPU and
 * on CUDA.
 *
 * Life: sth_executor_cpu_create(), sth_executor_cuda_create() or sth_executor_create(your table)
 * -> sth_runner_create() (runner.h) -> sth_executor_close(), after the last runner that uses it.
 *
 * Tensors are contiguous and row-major; addresses are of the runner's device and multiples of
 * 512.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_EXECUTOR_H
#define STAGEHAND_EXECUTOR_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "stagehand/device.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define STH_EXECUTOR_VERSION 1
#define STH_MAX_ACTIVATIONS 8

/* A weight of a layer. */
typedef struct sth_layer_tensor {
    const char *name;      /* within the layer, such as "mlp.up.weight" */
    sth_dtype dtype;
    int rank;
    uint64_t shape[STH_MAX_RANK];
    /* valid in `run` only, and for what `run` enqueues on its stream; 0 in `prepare` */
    sth_devptr address;
    uint64_t bytes;
    double scale;          /* a value is the stored number times this; mostly 1 */
} sth_layer_tensor;

/* LoRA: with the weight W [outputs, inputs] goes y = x W^T + scale * (x A^T) B^T. Resident,
 * unlike the weight. */
typedef struct sth_layer_adapter {
    uint32_t tensor;       /* index of W among the layer's tensors */
    uint32_t rank;
    sth_dtype dtype;       /* of A and B: the one of the activations */
    sth_devptr a;          /* [rank, inputs] */
    sth_devptr b;          /* [outputs, rank] */
    double scale;
} sth_layer_adapter;

/* A layer's description; live until the call that gets it returns. */
typedef struct sth_layer_spec {
    uint32_t index;        /* in the order of use, from 0 */
    const char *name;
    const sth_layer_tensor *tensors; /* in the store's order */
    uint32_t tensor_count;
    const sth_layer_adapter *adapters;
    uint32_t adapter_count;
} sth_layer_spec;

typedef struct sth_activation_tensor {
    sth_dtype dtype;
    int rank;
    uint64_t shape[STH_MAX_RANK];
    sth_devptr address;    /* 0 where only the shape is meant */
    uint64_t bytes;        /* product of shape x size of an element */
} sth_activation_tensor;

/* The tensors that go into a layer, or come out of it. */
typedef struct sth_activations {
    uint32_t count;        /* 1 to STH_MAX_ACTIVATIONS */
    sth_activation_tensor tensors[STH_MAX_ACTIVATIONS];
} sth_activations;

/* One layer's run. */
typedef struct sth_layer_call {
    sth_device *device;
    const sth_layer_spec *layer;
    const sth_activations *input;  /* read only, and never the memory of `output` */
    const sth_activations *output; /* shapes as `prepare` said; every byte is to be written */
    /* scratch_bytes of device memory for this call; 0 where none was asked for */
    sth_devptr scratch;
    uint64_t scratch_bytes;
    sth_stream stream;             /* what reads weights, or writes the output, is enqueued here */
} sth_layer_call;

/* The functions of an executor. Set struct_size to sizeof(sth_executor_ops), version to
 * STH_EXECUTOR_VERSION, and what you do not have to NULL. A function that fails says why with
 * sth_error_set(); the runner puts the layer's name in front. Threads: those that call the runner,
 * one at a time for each runner, which they must not call from here. */
typedef struct sth_executor_ops {
    size_t struct_size;
    uint32_t version;
    const char *name;      /* for messages; copied */
    /* Optional. Describes the layer's output for such an input, and the scratch that it needs.
     * out_output has the input's count, dtypes and shapes when this is called; `bytes` of it need
     * not be set. Called when a runner sees shapes that it does not know, before the first layer
     * runs. Without it the output is as the input, and there is no scratch. */
    sth_status (*prepare)(void *self, const sth_layer_spec *layer, const sth_activations *input,
                          sth_activations *out_output, uint64_t *out_scratch_bytes);
    /* Runs the layer, or enqueues it on call->stream. May return before the device is done; work
     * that it put on other streams must be joined to call->stream before it returns, because the
     * weights' place is refilled behind that. On stream 0 of the simulated device everything
     * before has happened and memory is the host's. */
    sth_status (*run)(void *self, const sth_layer_call *call);
    /* Optional. Ends `self`. */
    void (*close)(void *self);
} sth_executor_ops;

typedef struct sth_executor sth_executor;

/* Checks the table; from then on close is called by sth_executor_close. On failure `self` stays
 * the caller's. Returns INVALID_ARGUMENT (a missing entry, a wrong size or version, by name),
 * OUT_OF_HOST_MEMORY. Allocates: a record. */
STH_API sth_status sth_executor_create(const sth_executor_ops *ops, void *self,
                                       sth_executor **out_executor);
/* Calls the table's close. NULL is fine. Threads: one, the last user. Blocks: as close. */
STH_API void sth_executor_close(sth_executor *executor);
STH_API const char *sth_executor_name(const sth_executor *executor);

/* X(name, text): what stands between the linear maps of a layer; x in float32 */
#define STH_NONLINEARITY_LIST(X)  \
    X(NONE, "none")               \
    X(RELU, "relu")               \
    X(GELU, "gelu")  /* 0.5 x (1 + erf(x / sqrt 2)) */                            \
    X(SILU, "silu")  /* x / (1 + exp(-x)) */
typedef enum sth_nonlinearity {
#define STH_NONLINEARITY_ENUM(name, text) STH_NONLINEARITY_##name,
    STH_NONLINEARITY_LIST(STH_NONLINEARITY_ENUM)
#undef STH_NONLINEARITY_ENUM
        STH_NONLINEARITY_COUNT
} sth_nonlinearity;

/* The shipped executors run multi-layer perceptrons. Each tensor of rank 2 of a layer, in the store's order, is a
 * weight W [outputs, inputs] whose name is "weight" or ends in ".weight"; a tensor of rank 1 with ".bias" in its place
 * is its bias [outputs]. From the layer's input x [..., inputs] on, for each weight:
 *     y = x W^T               summed in float32 or better, times the weight's scale, rounded to the dtype of x
 *     y = y + s (x A^T) B^T   for each of its adapters; x A^T and y are rounded to the dtype
 *     y = f(y + bias)         in float32, rounded to the dtype; f: the nonlinearity, but not behind the last
 * and with `residual` the layer's output is x + y, rounded. All tensors, adapters and the input are of one dtype: F32,
 * BF16 or F16. Any other tensor in a layer is UNSUPPORTED, so that nothing is left out in silence; gated layers, norms
 * and attention are for an executor of your own. The two executors differ in the order of sums alone. */
typedef struct sth_mlp_options {
    size_t size;           /* sizeof(sth_mlp_options), set by init */
    sth_nonlinearity nonlinearity; /* default GELU */
    bool after_last;       /* f also behind a layer's last weight. Default false */
    bool residual;         /* needs as many outputs as inputs. Default false */
    double sim_flops_per_s; /* CPU: on a simulated device the stream is busy for 2 x rows x inputs x outputs over this.
                               0: it is not; the time that the host takes counts in real time */
} sth_mlp_options;
STH_API void sth_mlp_options_init(sth_mlp_options *options);

/* The reference, in plain C on the calling thread, for devices whose memory is the host's (the
 * simulated one). On other streams than 0 it waits for the stream first. Returns
 * INVALID_ARGUMENT, OUT_OF_HOST_MEMORY. Allocates: a record. */
STH_API sth_status sth_executor_cpu_create(const sth_mlp_options *options,
                                           sth_executor **out_executor);

/* Products by cuBLAS (libcublas.so.13 or .12 as the loader finds it or as the process has it, or
 * the absolute path in STAGEHAND_CUBLAS_LIBRARY; nothing is linked), the rest by kernels that
 * NVRTC compiles when the executor is made. The same calls give the same bits. Keeps the device
 * alive. Returns BACKEND_UNAVAILABLE with the reason (no CUDA device, no cuBLAS, no NVRTC),
 * OUT_OF_DEVICE_MEMORY, DEVICE_ERROR. Blocks: for loading and compiling. Allocates: host memory,
 * and what cuBLAS takes of the device: some 10 to 40 MiB. */
STH_API sth_status sth_executor_cuda_create(sth_device *device, const sth_mlp_options *options,
                                            sth_executor **out_executor);

#ifdef __cplusplus
}
#endif
#endif
