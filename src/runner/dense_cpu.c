/* The reference: products on the calling thread, for devices whose memory is the host's. Each sum has eight partial
 * sums over the inputs, added up in one order, so that the bits do not depend on the number of rows or on the machine.
 * On a simulated device the stream is made busy for as long as the options say. No locks, no state. */
#include <math.h>

#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "device/dense.h"

enum { LANES = 8 };

typedef struct dense_cpu {
    sthi_dense base;
    double flops_per_s;
} dense_cpu;

static float load(sth_dtype dtype, const void *p, uint64_t i) {
    if (dtype == STH_DTYPE_F32) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return dtype == STH_DTYPE_BF16 ? sthi_from_bf16(h) : sthi_from_f16(h);
}

static void store(sth_dtype dtype, void *p, uint64_t i, float v) {
    if (dtype == STH_DTYPE_F32) ((float *)p)[i] = v;
    else ((uint16_t *)p)[i] = dtype == STH_DTYPE_BF16 ? sthi_to_bf16(v) : sthi_to_f16(v);
}

static float dot(sth_dtype dtype, const void *a, uint64_t a_at, const void *b, uint64_t b_at, uint64_t n) {
    float lane[LANES] = {0};
    uint64_t i = 0;
    if (dtype == STH_DTYPE_F32) {
        const float *x = (const float *)a + a_at, *w = (const float *)b + b_at;
        for (; i + LANES <= n; i += LANES)
            for (int k = 0; k < LANES; k++) lane[k] += x[i + (uint64_t)k] * w[i + (uint64_t)k];
    }
    for (; i < n; i++) lane[i % LANES] += load(dtype, a, a_at + i) * load(dtype, b, b_at + i);
    float sum = 0;
    for (int k = 0; k < LANES; k++) sum += lane[k];
    return sum;
}

/* Everything that the stream holds has happened when it returns; memory is then ours to read and write. */
static sth_status reach(sth_device *d, sth_stream stream) {
    if (!(d->capabilities & STH_CAP_HOST_IS_DEVICE))
        return sthi_fail(
            STH_UNSUPPORTED, NULL, 0, "cpu",
            "the CPU executor computes in device memory, which the host of this device cannot reach; use the "
            "executor of the device, or device \"sim\"");
    return stream ? d->ops->stream_synchronize(d->self, stream) : STH_OK;
}

static sth_status product(sthi_dense *dense, sth_device *d, const sthi_product *p, sth_stream stream) {
    STHI_TRY(reach(d, stream));
    const void *x = (const void *)(uintptr_t)p->x, *w = (const void *)(uintptr_t)p->w;
    void *y = (void *)(uintptr_t)p->y;
    float alpha = (float)p->alpha;
    for (uint64_t i = 0; i < p->m; i++)
        for (uint64_t j = 0; j < p->n; j++) {
            float v = alpha * dot(p->dtype, x, i * p->k, w, j * p->k, p->k);
            if (p->add) v += load(p->dtype, y, i * p->n + j);
            store(p->dtype, y, i * p->n + j, v);
        }
    double rate = ((const dense_cpu *)dense)->flops_per_s;
    double ns = rate > 0 ? 2e9 * (double)p->m * (double)p->n * (double)p->k / rate : 0;
    if (ns <= 0 || !d->ops->sim_compute) return STH_OK;
    return d->ops->sim_compute(d->self, stream, ns < 1e15 ? (int64_t)ns : INT64_C(1000000000000000));
}

static float apply(sth_nonlinearity f, float x) {
    switch (f) {
    case STH_NONLINEARITY_RELU: return x > 0 || isnan(x) ? x : 0;
    case STH_NONLINEARITY_GELU: return 0.5f * x * (1 + erff(x * 0.70710678f));
    case STH_NONLINEARITY_SILU: return x / (1 + expf(-x));
    default: return x;
    }
}

static sth_status finish(sthi_dense *dense, sth_device *d, const sthi_finish *f, sth_stream stream) {
    (void)dense;
    STHI_TRY(reach(d, stream));
    const void *bias = (const void *)(uintptr_t)f->bias, *residual = (const void *)(uintptr_t)f->residual;
    void *y = (void *)(uintptr_t)f->y;
    float scale = (float)f->bias_scale;
    for (uint64_t i = 0; i < f->rows; i++)
        for (uint64_t j = 0; j < f->cols; j++) {
            uint64_t at = i * f->cols + j;
            float v = load(f->dtype, y, at);
            if (bias) v += scale * load(f->dtype, bias, j);
            store(f->dtype, y, at, apply(f->f, v));
            if (residual) store(f->dtype, y, at, load(f->dtype, residual, at) + load(f->dtype, y, at));
        }
    return STH_OK;
}

static void close_dense(sthi_dense *dense) { sthi_free(dense); }

sth_status sthi_dense_cpu_create(double sim_flops_per_s, sthi_dense **out) {
    dense_cpu *d = sthi_zalloc(1, sizeof *d);
    if (!d) return sthi_no_memory("cpu", "an executor");
    *d = (dense_cpu){{product, finish, close_dense}, sim_flops_per_s};
    *out = &d->base;
    return STH_OK;
}
