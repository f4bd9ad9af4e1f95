/* The device's time on the timeline: where an event lies, and spans of work on a stream. For recordings alone. */
#ifndef STHI_TELEMETRY_DEVTIME_H
#define STHI_TELEMETRY_DEVTIME_H
#include "device/device.h"
#include "telemetry/timeline.h"

/* The time of an event that was made with timing and has passed. False: it is not known. Blocks, for a device's first
 * event in a recording: for a stream that nothing else uses. */
bool sthi_devtime_of(sth_device *device, sth_event *event, int64_t *out_ns);

/* Work that is enqueued on the stream from here on, until its end is marked there; it becomes a slice when the device
 * has passed it. NULL while nothing is recorded, or where it cannot be timed. Texts are copied. */
typedef struct sthi_devspan sthi_devspan;
sthi_devspan *sthi_devspan_begin(sth_device *device, sth_stream stream, sthi_track track, const char *source,
                                 const char *name, uint64_t bytes);
void sthi_devspan_end(sthi_devspan *span, sth_stream stream); /* NULL is fine */

/* Before a recording ends: waits for all spans, and gives back what was made of devices. */
void sthi_devspans_end(void);
#endif
