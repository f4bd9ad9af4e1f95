/* Expansion of packed bytes on a GPU: which kernel, and its launch. */
#include "base/arith.h"
#include "base/error.h"
#include "device/expand.h"
#include "device/gpu/gpu.h"
#include "stagehand/transfer.h"

enum { THREADS = 256, MOST_BLOCKS = 4096 }; /* a thread goes on with the next step that nobody has */

sth_status sthi_gpu_expand_ready(sth_backend_device *device) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    sthi_lock(&d->compiling);
    sth_status rc = d->compiled ? STH_OK : sthi_gpu_compile(d);
    d->compiled = rc == STH_OK;
    sthi_unlock(&d->compiling);
    return rc;
}

static int dtype_index(int dtype) { return dtype == STH_DTYPE_F32 ? 0 : dtype == STH_DTYPE_BF16 ? 1 : 2; }

static sth_status launch(gpu_device *d, const sth_expand *e, gpu_stream stream) {
    unsigned by_eight = e->cols % 8 == 0, cols = (unsigned)e->cols, row_steps = by_eight ? cols / 8 : cols;
    uint64_t steps;
    if (!sthi_mul_u64(e->rows, row_steps, &steps) || steps > INT32_MAX)
        return sthi_fail(STH_UNSUPPORTED, d->vendor->name, 0, "expand",
                         "a segment of %llu x %llu elements is too large for one launch",
                         (unsigned long long)e->rows, (unsigned long long)e->cols);
    unsigned count = (unsigned)steps, blocks = (unsigned)sthi_min_u64((steps + THREADS - 1) / THREADS, MOST_BLOCKS);
    unsigned long long stride = e->stride;
    gpu_address codes = e->codes, scales = e->scales, zeros = e->zeros, place = e->place;
    void *arguments[] = {&count, &row_steps, &by_eight, &cols, &stride, &codes, &scales, &zeros, &place};
    gpu_function f = d->kernels[e->encoding - STH_TRANSFER_INT8][dtype_index(e->dtype)];
    gpu_result r = d->driver->launch(f, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL);
    return r == GPU_OK ? STH_OK : sthi_gpu_fail(d->vendor, r, d->name, "launching an expansion", NULL);
}

sth_status sthi_gpu_expand(sth_backend_device *device, const sth_expand *e, sth_stream stream) {
    STHI_GPU_CALL(d, device);
    sthi_expand_bytes bytes;
    STHI_TRY(sthi_gpu_enter(d));
    STHI_TRY(sthi_expand_check(e, d->vendor->name, &bytes));
    gpu_stream s = sthi_gpu_stream(stream);
    if (e->encoding != STH_TRANSFER_VERBATIM) return launch(d, e, s);
    gpu_result r = d->driver->copy_d2d(e->place, e->codes, e->place_bytes, s);
    return r == GPU_OK ? STH_OK : sthi_gpu_fail(d->vendor, r, d->name, "copying within the device", NULL);
}

void sthi_gpu_expand_close(gpu_device *d) {
    if (d->module) sthi_gpu_ended(d->vendor, d->driver->module_unload(d->module), d->name, "unloading the kernels");
    d->module = NULL;
    sthi_mutex_fini(&d->compiling);
}
