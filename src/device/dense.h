/* Products of matrices on a device, for the shipped executors (runner/mlp.c). Not part of the back-end interface: the
 * CPU has them where device memory is the host's, CUDA through cuBLAS. Matrices are row-major without gaps. */
#ifndef STHI_DENSE_H
#define STHI_DENSE_H
#include "device/device.h"
#include "stagehand/executor.h"

/* y[m, n] = alpha x[m, k] w[n, k]^T (+ y), summed in float32 or better, rounded to the dtype. */
typedef struct sthi_product {
    sth_dtype dtype;
    uint64_t m, n, k;
    sth_devptr x, w, y;
    double alpha;
    bool add;
} sthi_product;

/* y[rows, cols] = f(y + bias_scale bias[cols]), rounded; then, with a residual, y = residual[rows, cols] + y,
 * rounded. */
typedef struct sthi_finish {
    sth_dtype dtype;
    uint64_t rows, cols;
    sth_devptr y, bias, residual; /* bias, residual: 0 for none */
    double bias_scale;
    sth_nonlinearity f;
} sthi_finish;

typedef struct sthi_dense sthi_dense;
struct sthi_dense { /* the first member of each kind's own struct */
    sth_status (*product)(sthi_dense *, sth_device *, const sthi_product *, sth_stream);
    sth_status (*finish)(sthi_dense *, sth_device *, const sthi_finish *, sth_stream);
    void (*close)(sthi_dense *);
};

/* runner/dense_cpu.c */
sth_status sthi_dense_cpu_create(double sim_flops_per_s, sthi_dense **out);
/* device/cuda/dense.c. Keeps the device alive. */
sth_status sthi_dense_cuda_create(sth_device *device, sthi_dense **out);
#endif
