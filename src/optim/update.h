/* The update of one piece of a parameter, of any dtypes. Pure: memory in, memory out, no locks. */
#ifndef STHI_OPTIM_UPDATE_H
#define STHI_OPTIM_UPDATE_H
#include "optim/kernels.h"
#include "stagehand/optim.h"

#define STHI_OPTIM_CHUNK ((uint64_t)1 << 16) /* elements of a piece: what one thread takes at a time */

/* What a step needs that is the same for all elements. */
typedef struct sthi_adamw_step {
    sthi_adamw_f32 f32;
    double grad_scale, decay, lerp, beta2, one_minus_beta2, correction, eps,
        minus_step_size; /* for float64 */
    bool lerp_from_grad;
    bool at_random; /* stochastic rounding */
    uint64_t key;   /* of its random numbers */
} sthi_adamw_step;
void sthi_adamw_step_init(sthi_adamw_step *out, const sth_adamw_update *update);

/* Elements first .. first + n of a parameter; the pointers are at `first` already. master is float32 or NULL.
 */
typedef struct sthi_adamw_piece {
    void *param, *exp_avg, *exp_avg_sq;
    const void *grad;
    float *master;
    sth_dtype param_dtype, grad_dtype, moment_dtype;
    uint64_t first;
    size_t n;
} sthi_adamw_piece;
void sthi_adamw_run(const sthi_kernels *kernels, const sthi_adamw_step *step, const sthi_adamw_piece *piece);

/* n elements of any of the four float dtypes to float32, exactly but for float64. */
void sthi_optim_widen(const sthi_kernels *kernels, float *out, const void *in, sth_dtype dtype, size_t n);
/* The sum of squares of n elements, in a fixed order. */
double sthi_optim_squares(const sthi_kernels *kernels, const void *x, sth_dtype dtype, size_t n);
void sthi_optim_scale(const sthi_kernels *kernels, void *x, sth_dtype dtype, size_t n, double factor);

size_t sthi_optim_size(sth_dtype dtype); /* bytes of an element; 0 for dtypes that are not supported */
#endif
