/* One piece of a parameter: blocks that stay in the first cache are widened to float32, updated by the
 * kernels and rounded back, so that memory is read and written once. float64 has a plain loop of its own. */
#include "optim/update.h"

#include <math.h>

#include "base/half.h"
#include "base/random.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

/* Elements; four float32 buffers of it are 16 KiB, half of a first cache. A multiple of STHI_LANES. */
#define BLOCK 1024

size_t sthi_optim_size(sth_dtype dtype) {
    switch (dtype) {
    case STH_DTYPE_F64: return 8;
    case STH_DTYPE_F32: return 4;
    case STH_DTYPE_BF16:
    case STH_DTYPE_F16: return 2;
    default: return 0;
    }
}

void sthi_adamw_step_init(sthi_adamw_step *out, const sth_adamw_update *u) {
    double correction1 = 1 - pow(u->beta1, (double)u->step), correction2 = 1 - pow(u->beta2, (double)u->step);
    double weight = 1 - u->beta1;
    sthi_adamw_step s = {
        .grad_scale = u->maximize ? -u->grad_scale : u->grad_scale,
        .decay = 1 - u->lr * u->weight_decay,
        .lerp_from_grad = weight >= 0.5, /* lerp starts from the nearer end */
        .beta2 = u->beta2,
        .one_minus_beta2 = 1 - u->beta2,
        .correction = sqrt(correction2),
        .eps = u->eps,
        .minus_step_size = -(u->lr / correction1),
        .at_random = u->stochastic_rounding && u->param_dtype == STH_DTYPE_BF16,
        .key = sthi_random64(sthi_random64(sthi_mix64(u->seed), u->stream), u->step),
    };
    s.lerp = s.lerp_from_grad ? weight - 1 : weight;
    s.f32 = (sthi_adamw_f32){
        .grad_scale = (float)s.grad_scale,
        .decay = (float)s.decay,
        .lerp = s.lerp_from_grad ? (float)weight - 1 : (float)weight,
        .lerp_from_grad = s.lerp_from_grad,
        .beta2 = (float)s.beta2,
        .one_minus_beta2 = (float)s.one_minus_beta2,
        .correction = (float)s.correction,
        .eps = (float)s.eps,
        .minus_step_size = (float)s.minus_step_size,
    };
    *out = s;
}

void sthi_optim_widen(const sthi_kernels *kernels, float *out, const void *in, sth_dtype dtype, size_t n) {
    switch (dtype) {
    case STH_DTYPE_BF16: kernels->widen_bf16(out, in, n); break;
    case STH_DTYPE_F16: kernels->widen_f16(out, in, n); break;
    case STH_DTYPE_F64:
        for (size_t i = 0; i < n; i++) out[i] = (float)((const double *)in)[i];
        break;
    default: memcpy(out, in, n * sizeof *out);
    }
}

static void narrow(const sthi_kernels *kernels, void *out, const float *in, sth_dtype dtype, size_t n) {
    if (dtype == STH_DTYPE_BF16)
        kernels->narrow_bf16(out, in, n);
    else
        kernels->narrow_f16(out, in, n);
}

static void *at(void *base, size_t element, sth_dtype dtype) {
    return (char *)base + element * sthi_optim_size(dtype);
}
static const void *at_const(const void *base, size_t element, sth_dtype dtype) {
    return (const char *)base + element * sthi_optim_size(dtype);
}

/* The values as float32: in place where they are, in `buffer` otherwise. */
static float *as_f32(const sthi_kernels *kernels, void *values, sth_dtype dtype, float *buffer, size_t n) {
    if (dtype == STH_DTYPE_F32) return values;
    sthi_optim_widen(kernels, buffer, values, dtype, n);
    return buffer;
}

/* Whether random rounding may give the weight: it is one of the two that the master is between, or the master. */
static bool is_beside(float master, uint16_t weight) {
    return sthi_bits_of(master) - ((uint32_t)weight << 16) + 0xffffu <= 0x1fffeu;
}

static bool all_beside(const float *master, const uint16_t *weight, size_t n) {
    unsigned apart = 0; /* no branch for each element */
    for (size_t i = 0; i < n; i++) apart |= !is_beside(master[i], weight[i]);
    return !apart;
}

/* A weight is its master, rounded, whenever a step begins. One that is not was written since, in whatever way, and
 * is its own master from here on. Compared as bits, so that NaN equals itself. */
static void take_written(const sthi_kernels *kernels, bool at_random, float *master, const uint16_t *weight,
                         sth_dtype dtype, size_t n) {
    uint16_t rounded[BLOCK];
    if (at_random && all_beside(master, weight, n)) return;
    if (!at_random) narrow(kernels, rounded, master, dtype, n);
    if (!at_random && !memcmp(rounded, weight, n * sizeof *weight)) return;
    for (size_t i = 0; i < n; i++) {
        bool same = at_random ? is_beside(master[i], weight[i]) : rounded[i] == weight[i];
        if (!same) sthi_optim_widen(kernels, &master[i], &weight[i], dtype, 1);
    }
}

static bool all_bf16(const sthi_adamw_piece *piece) {
    return !piece->master && piece->param_dtype == STH_DTYPE_BF16 && piece->moment_dtype == STH_DTYPE_BF16 &&
           piece->grad_dtype == STH_DTYPE_BF16;
}

static void run_block(const sthi_kernels *kernels, const sthi_adamw_step *step, const sthi_adamw_piece *piece,
                      size_t from, size_t n) {
    float grad_f32[BLOCK], weight_f32[BLOCK], mean_f32[BLOCK], variance_f32[BLOCK];
    const void *grad = at_const(piece->grad, from, piece->grad_dtype);
    void *param = at(piece->param, from, piece->param_dtype);
    void *mean = at(piece->exp_avg, from, piece->moment_dtype);
    void *variance = at(piece->exp_avg_sq, from, piece->moment_dtype);

    uint16_t random[BLOCK];
    if (step->at_random) /* blocks and pieces begin at multiples of 4 */
        sthi_random16_fill(random, step->key, piece->first + from, (n + 3) / 4 * 4);
    if (all_bf16(piece)) {
        kernels->adamw_bf16(param, mean, variance, grad, step->at_random ? random : NULL, n, &step->f32);
        return;
    }
    const float *g = grad;
    if (piece->grad_dtype != STH_DTYPE_F32) {
        sthi_optim_widen(kernels, grad_f32, grad, piece->grad_dtype, n);
        g = grad_f32;
    }
    float *p =
        piece->master ? piece->master + from : as_f32(kernels, param, piece->param_dtype, weight_f32, n);
    float *m = as_f32(kernels, mean, piece->moment_dtype, mean_f32, n);
    float *v = as_f32(kernels, variance, piece->moment_dtype, variance_f32, n);
    if (piece->master) take_written(kernels, step->at_random, p, param, piece->param_dtype, n);
    kernels->adamw(p, m, v, g, n, &step->f32);
    if (m == mean_f32) narrow(kernels, mean, m, piece->moment_dtype, n);
    if (v == variance_f32) narrow(kernels, variance, v, piece->moment_dtype, n);
    if (p == param) return;
    if (step->at_random)
        kernels->narrow_bf16_at_random(param, p, random, n);
    else
        narrow(kernels, param, p, piece->param_dtype, n);
}

static double grad_f64(const sthi_adamw_piece *piece, size_t i) {
    switch (piece->grad_dtype) {
    case STH_DTYPE_BF16: return sthi_from_bf16(((const uint16_t *)piece->grad)[i]);
    case STH_DTYPE_F16: return sthi_from_f16(((const uint16_t *)piece->grad)[i]);
    case STH_DTYPE_F32: return ((const float *)piece->grad)[i];
    default: return ((const double *)piece->grad)[i];
    }
}

static void run_f64(const sthi_adamw_step *k, const sthi_adamw_piece *piece) {
    double *p = piece->param, *m = piece->exp_avg, *v = piece->exp_avg_sq;
    for (size_t i = 0; i < piece->n; i++) {
        double grad = grad_f64(piece, i) * k->grad_scale, weight = p[i] * k->decay;
        double mean = fma(k->lerp, grad - m[i], k->lerp_from_grad ? grad : m[i]);
        double variance = fma(k->one_minus_beta2 * grad, grad, v[i] * k->beta2);
        double denominator = sqrt(variance) / k->correction + k->eps;
        double step = k->minus_step_size * mean / denominator;
        m[i] = mean;
        v[i] = variance;
        p[i] = weight + step;
    }
}

void sthi_adamw_run(const sthi_kernels *kernels, const sthi_adamw_step *step, const sthi_adamw_piece *piece) {
    if (piece->param_dtype == STH_DTYPE_F64) {
        run_f64(step, piece);
        return;
    }
    for (size_t from = 0; from < piece->n; from += BLOCK)
        run_block(kernels, step, piece, from, piece->n - from < BLOCK ? piece->n - from : BLOCK);
}

static double fold(double lanes[STHI_LANES]) {
    for (int width = STHI_LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) lanes[l] += lanes[l + width];
    return lanes[0];
}

double sthi_optim_squares(const sthi_kernels *kernels, const void *x, sth_dtype dtype, size_t n) {
    double lanes[STHI_LANES] = {0};
    float block[BLOCK];
    if (dtype == STH_DTYPE_F32)
        kernels->squares(lanes, x, n);
    else if (dtype == STH_DTYPE_F64) {
        const double *wide = x;
        for (size_t i = 0; i < n; i++) {
            double square = wide[i] * wide[i];
            lanes[i % STHI_LANES] += square;
        }
    } else
        for (size_t from = 0; from < n; from += BLOCK) {
            size_t part = n - from < BLOCK ? n - from : BLOCK;
            sthi_optim_widen(kernels, block, at_const(x, from, dtype), dtype, part);
            kernels->squares(lanes, block, part);
        }
    return fold(lanes);
}

void sthi_optim_scale(const sthi_kernels *kernels, void *x, sth_dtype dtype, size_t n, double factor) {
    float block[BLOCK];
    if (dtype == STH_DTYPE_F32)
        kernels->scale(x, n, (float)factor);
    else if (dtype == STH_DTYPE_F64)
        for (size_t i = 0; i < n; i++) ((double *)x)[i] *= factor;
    else
        for (size_t from = 0; from < n; from += BLOCK) {
            size_t part = n - from < BLOCK ? n - from : BLOCK;
            sthi_optim_widen(kernels, block, at(x, from, dtype), dtype, part);
            kernels->scale(block, part, (float)factor);
            narrow(kernels, at(x, from, dtype), block, dtype, part);
        }
}
