/* Products of matrices on a CUDA device: cuBLAS for the product, one kernel of ours for what follows it. Neither is
 * linked. A row-major x[m, k] is cuBLAS's column-major k x m, so that y = x w^T is y^T = w x^T in its words.
 * Lock: `lock`, held while a call is enqueued: a cuBLAS handle has one stream at a time. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/cuda/cublas.h"
#include "device/cuda/cuda.h"
#include "device/dense.h"

#define STHI_KERNELS(...) static const char kernels[] = #__VA_ARGS__;
#include "device/cuda/dense_kernels.h"
#undef STHI_KERNELS

static const char conversions[] =
    "static __device__ float sthi_of_f16(unsigned short h) { float x; "
    "asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(x) : \"h\"(h)); return x; }\n";

enum { THREADS = 256, MOST_BLOCKS = 4096 };

typedef struct dense_cuda {
    sthi_dense base;
    sth_device *owner;   /* a reference */
    gpu_device *device;  /* of it */
    sthi_mutex lock;
    cublas_handle handle;
    gpu_module module;
    gpu_function finish[3]; /* f32, bf16, f16 */
} dense_cuda;

static sthi_mutex loading = {PTHREAD_MUTEX_INITIALIZER}; /* guards `blas` until it is full */
static cublas_functions blas;

static const gpu_symbol symbols[] = {
#define CUBLAS_ENTRY(member, symbol, parameters) {#symbol, &blas.member},
    CUBLAS_SYMBOLS(CUBLAS_ENTRY)
#undef CUBLAS_ENTRY
};

static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so", "libcublas.so.11", NULL};
static const char *const below[] = {"/nvidia/cu13/lib", "/nvidia/cublas/lib", "/torch/lib", NULL};
static const gpu_library library = {
    .what = "cuBLAS",
    .domain = "cublas",
    .variable = "STAGEHAND_CUBLAS_LIBRARY",
    .names = names,
    .loaded_as = "/libcublas.so",
    .packages = sthi_cuda_packages,
    .below = below,
    .advice = "install nvidia-cublas",
    .too_old = "it is older than CUDA 11",
    .symbols = symbols,
    .symbol_count = sizeof symbols / sizeof *symbols,
};

static sth_status load_blas(void) {
    sthi_lock(&loading);
    sth_status rc = blas.create ? STH_OK : sthi_gpu_library_load(&library);
    sthi_unlock(&loading);
    return rc;
}

static const char *reason_of(int code) {
    if (code == CUBLAS_STATUS_ALLOC_FAILED) return " (no device memory for it)";
    return code == CUBLAS_STATUS_NOT_INITIALIZED ? " (it does not start on this card or driver)" : "";
}

static sth_status checked(const dense_cuda *d, int code, const char *what) {
    if (code == CUBLAS_OK) return STH_OK;
    sth_status status = code == CUBLAS_STATUS_ALLOC_FAILED ? STH_OUT_OF_DEVICE_MEMORY : STH_DEVICE_ERROR;
    return sthi_fail(status, "cublas", code, d->device->name, "%s: cuBLAS reports status %d%s", what, code,
                     reason_of(code));
}

static int type_of(sth_dtype dtype) {
    static const int types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F};
    return types[sthi_gpu_dtype_index(dtype)];
}

static void *at(sth_devptr p) { return (void *)(uintptr_t)p; }

static sth_status product(sthi_dense *dense, sth_device *device, const sthi_product *p, sth_stream stream) {
    dense_cuda *d = (dense_cuda *)dense;
    if (device != d->owner)
        return sthi_fail(STH_INVALID_ARGUMENT, "cuda", 0, d->device->name, "the executor was made for another device");
    if (p->m > INT_MAX || p->n > INT_MAX || p->k > INT_MAX)
        return sthi_fail(STH_UNSUPPORTED, "cublas", 0, d->device->name, "a product of %llu x %llu x %llu is too large",
                         (unsigned long long)p->m, (unsigned long long)p->n, (unsigned long long)p->k);
    STHI_GPU_CALL(card, d->owner->self);
    STHI_TRY(sthi_gpu_enter(card));
    if (!p->m || !p->n) return STH_OK;
    float alpha = (float)p->alpha, beta = p->add ? 1 : 0;
    int type = type_of(p->dtype), m = (int)p->m, n = (int)p->n, k = (int)p->k;
    int row = k ? k : 1; /* a sum of nothing is 0, but a row of no elements is refused */
    sthi_lock(&d->lock);
    int code = blas.set_stream(d->handle, sthi_gpu_stream(stream));
    if (code == CUBLAS_OK)
        code = blas.gemm(d->handle, CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, &alpha, at(p->w), type, row, at(p->x), type,
                         row, &beta, at(p->y), type, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    sthi_unlock(&d->lock);
    return checked(d, code, "a product of matrices");
}

static sth_status finish(sthi_dense *dense, sth_device *device, const sthi_finish *f, sth_stream stream) {
    dense_cuda *d = (dense_cuda *)dense;
    (void)device; /* product has looked at it */
    STHI_GPU_CALL(card, d->owner->self);
    STHI_TRY(sthi_gpu_enter(card));
    unsigned long long count = f->rows * f->cols;
    unsigned cols = (unsigned)f->cols, blocks = (unsigned)sthi_min_u64((count + THREADS - 1) / THREADS, MOST_BLOCKS);
    gpu_address y = f->y, bias = f->bias, residual = f->residual;
    float scale = (float)f->bias_scale;
    int what = (int)f->f;
    void *arguments[] = {&count, &cols, &y, &bias, &scale, &residual, &what};
    gpu_function kernel = d->finish[sthi_gpu_dtype_index(f->dtype)];
    gpu_result r =
        d->device->driver->launch(kernel, blocks, 1, 1, THREADS, 1, 1, 0, sthi_gpu_stream(stream), arguments, NULL);
    return r == GPU_OK ? STH_OK
                       : sthi_gpu_fail(d->device->vendor, r, d->device->name, "launching the end of a layer", NULL);
}

static void end_kernels(dense_cuda *d) {
    STHI_GPU_CALL(card, d->owner->self);
    if (!sthi_gpu_attach_to_end(card)) return;
    if (d->handle) (void)checked(d, blas.destroy(d->handle), "ending cuBLAS");
    if (!d->module) return;
    sthi_gpu_ended(card->vendor, card->driver->module_unload(d->module), card->name, "unloading the kernels");
}

static void close_dense(sthi_dense *dense) {
    dense_cuda *d = (dense_cuda *)dense;
    end_kernels(d);
    sthi_mutex_fini(&d->lock);
    sthi_device_release(d->owner);
    sthi_free(d);
}

static sth_status load_kernels(dense_cuda *d) {
    static const char *const of_dtype[] = {"sthi_finish_f32", "sthi_finish_bf16", "sthi_finish_f16"};
    const gpu_driver *driver = d->device->driver;
    size_t bytes = strlen(sthi_cuda_prelude) + sizeof conversions + sizeof kernels;
    char *source = sthi_alloc(bytes), *image = NULL;
    if (!source) return sthi_no_memory_in("cuda", "kernels", "kernels");
    snprintf(source, bytes, "%s%s%s", sthi_cuda_prelude, conversions, kernels);
    sth_status rc = sthi_cuda_compile(d->device, source, &image);
    sthi_free(source);
    STHI_TRY(rc);
    gpu_result r = driver->module_load(&d->module, image);
    sthi_free(image);
    for (int i = 0; r == GPU_OK && i < 3; i++) r = driver->module_function(&d->finish[i], d->module, of_dtype[i]);
    if (r == GPU_OK) return STH_OK;
    return sthi_gpu_fail(d->device->vendor, r, d->device->name, "loading the kernels of the executor", NULL);
}

static sth_status start(dense_cuda *d) {
    STHI_TRY(load_blas());
    STHI_GPU_CALL(card, d->owner->self);
    STHI_TRY(sthi_gpu_enter(card));
    int code = blas.create(&d->handle); /* in the context that is current */
    if (code != CUBLAS_OK) d->handle = NULL;
    STHI_TRY(checked(d, code, "starting cuBLAS"));
    code = blas.set_math_mode(d->handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    STHI_TRY(checked(d, code, "setting cuBLAS up"));
    return load_kernels(d);
}

sth_status sthi_dense_cuda_create(sth_device *device, sthi_dense **out) {
    if (device->ops != &sthi_cuda_ops)
        return sthi_fail(
            STH_BACKEND_UNAVAILABLE, "cuda", 0, device->ops->backend,
            "the CUDA executor needs a device of the back end \"cuda\" with no decorator before it, and this is one "
            "of \"%s\"",
            device->ops->backend);
    dense_cuda *d = sthi_zalloc(1, sizeof *d);
    if (!d) return sthi_no_memory_in("cuda", "cuda", "an executor");
    d->base = (sthi_dense){product, finish, close_dense};
    d->owner = device;
    d->device = sthi_gpu_of(device->self);
    sthi_device_retain(device);
    sthi_mutex_init(&d->lock);
    sth_status rc = start(d);
    if (rc == STH_OK) {
        *out = &d->base;
        return STH_OK;
    }
    sthi_error_copy why;
    sthi_error_save(&why);
    close_dense(&d->base);
    return sthi_error_restore(&why);
}
