/* stagehand/optim.h - AdamW over parameters in host memory, by threads of its own; state in RAM or in a file.
 *
 * Life: sth_adamw_create -> for each step: sth_adamw_submit (once for each parameter) -> sth_adamw_wait
 *       -> ... -> sth_adamw_destroy.
 *
 * An update reads and writes each parameter's memory once. It computes torch.optim.AdamW (decoupled
 * weight decay, no amsgrad) in float32, or in float64 for float64 parameters; other dtypes are
 * widened before and rounded after. Results do not depend on the number of threads, nor on the
 * processor's vector width (which bits a NaN has is not promised).
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_OPTIM_H
#define STAGEHAND_OPTIM_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_adamw sth_adamw;

typedef struct sth_adamw_options {
    size_t size;      /* sizeof(sth_adamw_options), set by init */
    uint32_t threads; /* 1 to 256; 0: one for each core that the process may use, at most 16 */
    /* NULL: the caller keeps the state. A folder: the state lies in a new file there, without a
     * name, gone with the process. Another path: a new file of that name, whose name is taken
     * away at once; what is there already is refused. Mode 0600. */
    const char *state_path;
} sth_adamw_options;
STH_API void sth_adamw_options_init(sth_adamw_options *out_options);

/* Starts the threads. Returns INVALID_ARGUMENT, NOT_FOUND, IO (the file), OUT_OF_HOST_MEMORY.
 * Threads: any. Blocks: for opening the file. Allocates: records; with a file 1.5 MiB for each
 * thread. */
STH_API sth_status sth_adamw_create(const sth_adamw_options *options, sth_adamw **out_adamw);
/* Ends all updates that were submitted, then the threads. NULL is fine. In a child process made
 * by fork the threads do not exist: nothing is waited for and the memory stays. Threads: one,
 * the last user. Blocks: until the updates are done. */
STH_API void sth_adamw_destroy(sth_adamw *adamw);

STH_API uint32_t sth_adamw_threads(const sth_adamw *adamw);
STH_API const char *sth_adamw_kernels(const sth_adamw *adamw); /* "avx512", "avx2" or "scalar" */

/* ---- state in a file ---- */

/* The place of a parameter's state in the file; 0 is none. Lives as long as the sth_adamw. */
typedef uint64_t sth_adamw_state;

typedef enum sth_adamw_part { STH_ADAMW_EXP_AVG, STH_ADAMW_EXP_AVG_SQ, STH_ADAMW_MASTER } sth_adamw_part;

/* Takes room for the state of `count` elements: moments of `moment_dtype` and, where `master`,
 * float32 weights. Moments begin as 0 and the master as the parameter's values at its first
 * update. The room is taken from the disk now, so that updates do not run out of it. Returns
 * INVALID_STATE (no state_path), INVALID_ARGUMENT, IO (the disk is full, a limit on file sizes).
 * Blocks: for the file system. Allocates: a record. */
STH_API sth_status sth_adamw_state_create(sth_adamw *adamw, uint64_t count, sth_dtype moment_dtype,
                                          bool master, sth_adamw_state *out_state);
/* Reads or writes all elements of one part; `memory` is `count` elements of its dtype. No update
 * of this parameter may be under way. A state that is written is no longer a beginning: write
 * all of its parts. Returns INVALID_ARGUMENT, IO. Blocks: for the disk. */
STH_API sth_status sth_adamw_state_read(sth_adamw *adamw, sth_adamw_state state,
                                        sth_adamw_part part, void *memory);
STH_API sth_status sth_adamw_state_write(sth_adamw *adamw, sth_adamw_state state,
                                         sth_adamw_part part, const void *memory);
STH_API uint64_t sth_adamw_file_bytes(sth_adamw *adamw); /* 0 without a file */

/* ---- updates ---- */

/* One update of one parameter: `count` elements that lie in a row in each array. Dtypes are F32,
 * BF16, F16 or F64. Memory stays the caller's and must live, and be left alone, until the update
 * has been waited for. */
typedef struct sth_adamw_update {
    size_t size; /* sizeof(sth_adamw_update), set by init */
    uint64_t count;
    void *param;
    const void *grad;
    sth_dtype param_dtype, grad_dtype;
    /* In RAM: moments of moment_dtype, F32 or the parameter's dtype (F64 for F64), and a float32
     * master or NULL. A master needs a BF16 or F16 parameter. An element that is not its master,
     * rounded, was written by somebody else: it becomes the master. In a file: NULL here. */
    void *exp_avg, *exp_avg_sq;
    float *master;
    sth_dtype moment_dtype;
    sth_adamw_state state;
    uint64_t step;                              /* of this update; the first is 1 */
    double lr, beta1, beta2, eps, weight_decay; /* 1e-4, 0.9, 0.999, 1e-8, 0.01 */
    /* gradients are multiplied by it as they are read; 1 */
    double grad_scale;
    bool maximize;
    /* BF16 parameters only: round up or down at random, right on average. The random numbers are
     * a function of seed, stream (of the parameter), step and index. */
    bool stochastic_rounding;
    uint64_t seed, stream;
} sth_adamw_update;
STH_API void sth_adamw_update_init(sth_adamw_update *out_update);

/* Hands an update to the threads; *out_ticket (may be NULL) is for wait. Updates begin in the
 * order in which they were submitted. Two updates of one parameter must not be under way at
 * once. Returns INVALID_ARGUMENT, INVALID_STATE (in a child process), OUT_OF_HOST_MEMORY: then
 * nothing was done. Allocates: a record. */
STH_API sth_status sth_adamw_submit(sth_adamw *adamw, const sth_adamw_update *update,
                                    uint64_t *out_ticket);
/* Waits for one update, or with 0 for all that were submitted, and returns how it ended; for
 * several the first failure, which is then forgotten. After IO (state in a file) the parameter
 * and its state are updated in part: load both again. Returns IO, INVALID_STATE (in a child
 * process). Blocks: until done. */
STH_API sth_status sth_adamw_wait(sth_adamw *adamw, uint64_t ticket);

/* ---- gradients ---- */

typedef struct sth_grad {
    void *data;
    uint64_t count; /* elements */
    sth_dtype dtype;
} sth_grad;

/* The sum of the squares of all elements, in float64, added in an order that does not depend on
 * the threads; not finite where an element is NaN or Inf. The 2-norm is its square root. Behind
 * the updates under way. Returns INVALID_ARGUMENT, INVALID_STATE (in a child process),
 * OUT_OF_HOST_MEMORY. Blocks: until done. Allocates: 8 bytes for 65,536 elements, freed at the
 * end. */
STH_API sth_status sth_adamw_sum_squares(sth_adamw *adamw, const sth_grad *grads, size_t count,
                                         double *out_sum);
/* Multiplies all elements by `factor`, in float32 (float64 for float64). As above. */
STH_API sth_status sth_adamw_scale(sth_adamw *adamw, const sth_grad *grads, size_t count,
                                   double factor);

#ifdef __cplusplus
}
#endif
#endif
