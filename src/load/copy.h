/* Copies from host memory to the device. Lock held. */
#ifndef STHI_LOAD_COPY_H
#define STHI_LOAD_COPY_H
#include "state/state.h"

uint64_t sthi_run_bytes(const sth_runtime *rt); /* the most of a pinned image that one copy takes */
/* Enqueues a copy to the device, through the conductor where there is one. */
sth_status sthi_copy_bytes(sth_runtime *rt, uint32_t unit, sth_devptr to, const uint8_t *from, uint64_t bytes,
                           sth_stream stream);
sth_stream sthi_copies_on(const sth_runtime *rt, int32_t slot); /* the stream on which its source is read */
/* A copy of the unit's image is enqueued on the stream. */
void sthi_master_read(sth_runtime *rt, uint32_t unit, sth_stream stream);
#endif
