/* Rates of the link. One function times copies for all who measure: a runtime at seal, with memory and streams that it
 * has; and those that ask for a rate alone, with memory of the measurement's own. */
#ifndef STHI_DEVICE_MEASURE_H
#define STHI_DEVICE_MEASURE_H
#include "stagehand/backend.h"

typedef struct sthi_trial_copies {
    sth_device *device;
    sth_devptr place;
    uint8_t *host; /* read only where the copies go up */
    uint64_t bytes, piece; /* a copy takes `piece` at most; above 0 */
    bool down;
} sthi_trial_copies;

/* Time from the first copy's start to the last one's end, between two events with timing. Blocks: for the copies. */
sth_status sthi_time_copies(const sthi_trial_copies *copies, sth_stream stream, sth_event *before, sth_event *after,
                            int64_t *out_ns);

/* As sth_device_measure_h2d and sth_device_measure_link. */
sth_status sthi_device_measure_h2d(sth_device *d, uint64_t bytes, int repeats, bool pinned, double *out);
sth_status sthi_device_measure_link(sth_device *d, uint64_t bytes, int repeats, sth_link_rates *out);
#endif
