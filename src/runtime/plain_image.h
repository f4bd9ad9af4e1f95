/* Plain images beside packed ones, as runtime.h has them. Lock not held. */
#ifndef STHI_RUNTIME_PLAIN_IMAGE_H
#define STHI_RUNTIME_PLAIN_IMAGE_H
#include "state/state.h"

sth_status sthi_unit_give_master(sth_runtime *rt, uint32_t unit, const void *master);
sth_status sthi_unit_drop_master(sth_runtime *rt, uint32_t unit);
sth_status sthi_unit_keep_master(sth_runtime *rt, uint32_t unit, bool *out_kept);
sth_status sthi_runtime_dropped_masters(sth_runtime *rt, bool wait, uint32_t *units, uint32_t capacity,
                                        uint32_t *out_count);
void sthi_masters_close(sth_runtime *rt); /* the runtime has been shut */
#endif
