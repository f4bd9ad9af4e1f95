/* Expansion of packed bytes on a GPU: which kernel, and its launch. */
#include <math.h>

#include "base/arith.h"
#include "base/error.h"
#include "device/expand.h"
#include "device/four_bits.h"
#include "device/gpu/gpu.h"
#include "device/lossless.h"
#include "stagehand/transfer.h"

#define STHI_LAUNCH(...) __VA_ARGS__
#include "device/gpu/launch.h"

enum { THREADS = 256, MOST_BLOCKS = 4096 }; /* a thread goes on with the next step that nobody has */
enum { LANES = 32 };                                /* threads of a tile of LOSSLESS: kernels.h */
enum { TILE = 4096, LEAST_WIDE = 256 };     /* elements of a tile, and columns of one where H is no larger: kernels.h */

sth_status sthi_gpu_expand_ready(sth_backend_device *device) {
    STHI_GPU_CALL(d, device);
    STHI_TRY(sthi_gpu_enter(d));
    sthi_lock(&d->compiling);
    sth_status rc = d->compiled ? STH_OK : sthi_gpu_compile(d);
    d->compiled = rc == STH_OK;
    sthi_unlock(&d->compiling);
    return rc;
}

static sthi_launch describe(const sth_expand *e) {
    return (sthi_launch){.codes = e->codes, .scales = e->scales, .zeros = e->zeros, .place = e->place,
                         .stride = e->stride, .rows = e->rows, .dtype = (unsigned)sthi_gpu_dtype_index(e->dtype),
                         .cols = (unsigned)e->cols};
}

/* Threads go by steps of a row. */
static uint64_t by_rows(const sth_expand *e, sthi_launch *l) {
    uint64_t steps;
    l->by_eight = e->cols % 8 == 0 && e->stride % 8 == 0;
    l->across = l->by_eight ? l->cols / 8 : l->cols;
    return sthi_mul_u64(e->rows, l->across, &steps) ? steps : UINT64_MAX;
}

/* Blocks go by tiles. */
static uint64_t by_tiles(const sth_expand *e, sthi_launch *l) {
    uint64_t wide = e->hadamard > LEAST_WIDE ? e->hadamard : LEAST_WIDE, rows = wide < TILE ? TILE / wide : 1, tiles;
    l->up = e->up, l->down = e->down, l->smooth = e->smooth, l->pitch = e->pitch;
    l->rank = e->rank, l->group = e->group, l->factor = e->factor;
    l->nvfp4 = e->encoding == STH_TRANSFER_FILE_NVFP4;
    while (e->hadamard >> (l->stages + 1)) l->stages++;
    l->root = e->hadamard ? sqrt(e->hadamard) : 1;
    l->exact = l->stages % 2 == 0;
    l->across = (unsigned)(e->cols / wide + (e->cols % wide != 0));
    if (e->rows > INT32_MAX) return UINT64_MAX;
    return sthi_mul_u64(e->rows / rows + (e->rows % rows != 0), l->across, &tiles) ? tiles : UINT64_MAX;
}

/* 32 threads make a tile of 1024 elements. */
static uint64_t by_lanes(const sth_expand *e, sthi_launch *l) {
    l->escapes = l->stride - sthi_lossless_fixed(sthi_lossless_form_of(e->dtype), e->cols);
    return sthi_lossless_tiles(e->cols);
}

/* The kernel of each encoding but VERBATIM, which a copy expands. */
static const uint8_t kernel_of[] = {
    [STH_TRANSFER_INT8] = GPU_KERNEL_INT8, [STH_TRANSFER_FP8] = GPU_KERNEL_FP8, [STH_TRANSFER_INT4] = GPU_KERNEL_INT4,
    [STH_TRANSFER_FILE_INT4] = GPU_KERNEL_FOUR_BITS, [STH_TRANSFER_FILE_NVFP4] = GPU_KERNEL_FOUR_BITS,
    [STH_TRANSFER_LOSSLESS] = GPU_KERNEL_LOSSLESS,
};
STHI_KNOWS_ENCODINGS(7);
_Static_assert(sizeof kernel_of == STH_TRANSFER_COUNT, "each encoding has its kernel");

static uint64_t steps_of(const sth_expand *e, sthi_launch *l, uint64_t *out_together) {
    if (e->encoding == STH_TRANSFER_LOSSLESS) {
        *out_together = THREADS / LANES;
        return by_lanes(e, l);
    }
    bool tiles = sthi_is_four_bits(e->encoding);
    *out_together = tiles ? 1 : THREADS;
    return tiles ? by_tiles(e, l) : by_rows(e, l);
}

static sth_status launch(gpu_device *d, const sth_expand *e, gpu_stream stream) {
    sthi_launch l = describe(e);
    uint64_t together; /* steps or tiles of a block */
    uint64_t count = steps_of(e, &l, &together);
    if (count > INT32_MAX)
        return sthi_fail(STH_UNSUPPORTED, d->vendor->name, 0, "expand",
                         "a segment of %llu x %llu elements is too large for one launch",
                         (unsigned long long)e->rows, (unsigned long long)e->cols);
    l.count = (unsigned)count;
    unsigned blocks = (unsigned)sthi_min_u64((count + together - 1) / together, MOST_BLOCKS);
    void *arguments[] = {&l};
    gpu_function kernel = d->kernels[kernel_of[e->encoding]];
    gpu_result r = d->driver->launch(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, NULL);
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
