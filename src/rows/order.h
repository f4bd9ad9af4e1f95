/* What is ordered behind what, by events: copies into slots, and the calls that use them. */
#ifndef STHI_ROWS_ORDER_H
#define STHI_ROWS_ORDER_H
#include "device/device.h"

enum { STHI_ROWS_EVENTS = 64 };

/* Events in a ring, by numbers from 1 on. One that leaves the ring has passed, or was waited for. */
typedef struct sthi_rows_ring {
    sth_event *events[STHI_ROWS_EVENTS];
    uint64_t numbers[STHI_ROWS_EVENTS];
    sth_stream streams[STHI_ROWS_EVENTS]; /* behind which they were recorded */
    bool passed[STHI_ROWS_EVENTS];
    uint64_t last;
} sthi_rows_ring;

sth_status sthi_rows_ring_open(sthi_rows_ring *ring, sth_device *device);
void sthi_rows_ring_close(sthi_rows_ring *ring, sth_device *device);
/* The event that the next number takes was recorded before, and nobody has waited for it; NULL: it is free. */
sth_event *sthi_rows_ring_old(const sthi_rows_ring *ring);
/* Records it behind `stream`: *out_number stands for all that is enqueued there. */
sth_status sthi_rows_ring_record(sthi_rows_ring *ring, sth_device *device, sth_stream stream, uint64_t *out_number);
/* The event to wait for, NULL where there is nothing to wait for. */
sth_event *sthi_rows_ring_event(const sthi_rows_ring *ring, uint64_t number);
/* Whether who waits for `later`, recorded after it, has waited for `number`: it has passed, or is of that stream. */
bool sthi_rows_ring_before(const sthi_rows_ring *ring, uint64_t number, uint64_t later);
void sthi_rows_ring_pass(sthi_rows_ring *ring, uint64_t number);
/* Waits for all that have not passed. Blocks. */
sth_status sthi_rows_ring_wait(sthi_rows_ring *ring, sth_device *device);
#endif
