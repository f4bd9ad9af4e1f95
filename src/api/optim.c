/* Exported functions of stagehand/optim.h: checks pointers, then calls src/optim/adamw.c. */
#include "stagehand/optim.h"

#include "base/error.h"
#include "optim/adamw.h"
#include "telemetry/ranges.h"

static sth_status null_argument(const char *function, const char *what) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "%s needs %s", function, what);
}

void sth_adamw_options_init(sth_adamw_options *out_options) {
    if (out_options) *out_options = (sth_adamw_options){.size = sizeof *out_options};
}

sth_status sth_adamw_create(const sth_adamw_options *options, sth_adamw **out_adamw) {
    if (!options || !out_adamw)
        return null_argument("sth_adamw_create", "options and an address for the result");
    sthi_ranges_attach();
    return sthi_adamw_create(options, out_adamw);
}
void sth_adamw_destroy(sth_adamw *adamw) { sthi_adamw_destroy(adamw); }
uint32_t sth_adamw_threads(const sth_adamw *adamw) { return adamw ? sthi_adamw_threads(adamw) : 0; }
const char *sth_adamw_kernels(const sth_adamw *adamw) { return adamw ? sthi_adamw_kernels(adamw) : ""; }

sth_status sth_adamw_state_create(sth_adamw *adamw, uint64_t count, sth_dtype moment_dtype, bool master,
                                  sth_adamw_state *out_state) {
    if (!adamw || !out_state)
        return null_argument("sth_adamw_state_create", "an optimizer and an address for the result");
    return sthi_adamw_state_create(adamw, count, moment_dtype, master, out_state);
}
sth_status sth_adamw_state_read(sth_adamw *adamw, sth_adamw_state state, sth_adamw_part part, void *memory) {
    if (!adamw || !memory) return null_argument("sth_adamw_state_read", "an optimizer and memory");
    return sthi_adamw_state_read(adamw, state, part, memory);
}
sth_status sth_adamw_state_write(sth_adamw *adamw, sth_adamw_state state, sth_adamw_part part,
                                 const void *memory) {
    if (!adamw || !memory) return null_argument("sth_adamw_state_write", "an optimizer and memory");
    return sthi_adamw_state_write(adamw, state, part, memory);
}
uint64_t sth_adamw_file_bytes(sth_adamw *adamw) { return adamw ? sthi_adamw_file_bytes(adamw) : 0; }

void sth_adamw_update_init(sth_adamw_update *out_update) {
    if (!out_update) return;
    *out_update = (sth_adamw_update){
        .size = sizeof *out_update,
        .param_dtype = STH_DTYPE_F32,
        .grad_dtype = STH_DTYPE_F32,
        .moment_dtype = STH_DTYPE_F32,
        .lr = 1e-4,
        .beta1 = 0.9,
        .beta2 = 0.999,
        .eps = 1e-8,
        .weight_decay = 0.01,
        .grad_scale = 1,
    };
}
sth_status sth_adamw_submit(sth_adamw *adamw, const sth_adamw_update *update, uint64_t *out_ticket) {
    if (!adamw || !update) return null_argument("sth_adamw_submit", "an optimizer and an update");
    return sthi_adamw_submit(adamw, update, out_ticket);
}
sth_status sth_adamw_wait(sth_adamw *adamw, uint64_t ticket) {
    return adamw ? sthi_adamw_wait(adamw, ticket) : null_argument("sth_adamw_wait", "an optimizer");
}

sth_status sth_adamw_sum_squares(sth_adamw *adamw, const sth_grad *grads, size_t count, double *out_sum) {
    if (!adamw || (count && !grads) || !out_sum)
        return null_argument("sth_adamw_sum_squares", "an optimizer, gradients and an address for the result");
    return sthi_adamw_sum_squares(adamw, grads, count, out_sum);
}
sth_status sth_adamw_scale(sth_adamw *adamw, const sth_grad *grads, size_t count, double factor) {
    if (!adamw || (count && !grads)) return null_argument("sth_adamw_scale", "an optimizer and gradients");
    return sthi_adamw_scale(adamw, grads, count, factor);
}
