/* sth_adamw: threads, the state's file, and the updates that go through them. */
#ifndef STHI_OPTIM_ADAMW_H
#define STHI_OPTIM_ADAMW_H
#include "stagehand/optim.h"

sth_status sthi_adamw_create(const sth_adamw_options *options, sth_adamw **out);
void sthi_adamw_destroy(sth_adamw *adamw);
uint32_t sthi_adamw_threads(const sth_adamw *adamw);
const char *sthi_adamw_kernels(const sth_adamw *adamw);
sth_status sthi_adamw_state_create(sth_adamw *adamw, uint64_t count, sth_dtype moment_dtype, bool master,
                                   sth_adamw_state *out);
sth_status sthi_adamw_state_read(sth_adamw *adamw, sth_adamw_state state, sth_adamw_part part, void *memory);
sth_status sthi_adamw_state_write(sth_adamw *adamw, sth_adamw_state state, sth_adamw_part part,
                                  const void *memory);
uint64_t sthi_adamw_file_bytes(sth_adamw *adamw);
sth_status sthi_adamw_submit(sth_adamw *adamw, const sth_adamw_update *update, uint64_t *out_ticket);
sth_status sthi_adamw_wait(sth_adamw *adamw, uint64_t ticket);
sth_status sthi_adamw_sum_squares(sth_adamw *adamw, const sth_grad *grads, size_t count, double *out_sum);
sth_status sthi_adamw_scale(sth_adamw *adamw, const sth_grad *grads, size_t count, double factor);
#endif
