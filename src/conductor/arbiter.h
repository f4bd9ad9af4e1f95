/* Lanes: what a runtime asks before it enqueues copies. A runtime without a conductor has none, and tests a null
 * pointer. Everything here is advice: where the device refuses an event the copy goes all the same. */
#ifndef STHI_CONDUCTOR_ARBITER_H
#define STHI_CONDUCTOR_ARBITER_H
#include "device/device.h"
#include "stagehand/conductor.h"

typedef struct sthi_lane sthi_lane;

#define STHI_NO_FLIGHT UINT64_MAX
#define STHI_DUE_LAST INT64_MAX /* nobody waits for it */

/* What becomes of a copy. */
typedef struct sthi_way {
    uint64_t piece;  /* enqueue it in pieces of at most so many bytes */
    uint64_t flight; /* for sthi_lane_end */
    bool waits;      /* the stream was made to wait for another's copy */
} sthi_way;

/* A lane for one stream of `runtime` (an address that tells runtimes apart). Keeps the conductor alive. */
sth_status sthi_lane_open(sth_conductor *c, sth_device *device, sth_stream stream, sth_direction direction,
                          const void *runtime, sthi_lane **out);
/* Before the stream ends; NULL is fine. Blocks: no. */
void sthi_lane_close(sthi_lane *lane);
/* Another user of the lane, who ends with sthi_lane_close. */
void sthi_lane_retain(sthi_lane *lane);

/* Before copies of `bytes`, due at due_ns of the device's clock, are enqueued; whole: the largest piece that the
 * runtime itself uses. sthi_lane_end follows, also where a copy failed. */
sthi_way sthi_lane_begin(sthi_lane *lane, uint64_t bytes, int64_t due_ns, uint64_t whole);
void sthi_lane_end(sthi_lane *lane, uint64_t flight);
/* Whether a copy that may wait should begin now; NULL lanes may. */
bool sthi_lane_may(sthi_lane *lane, uint64_t bytes);
#endif
