/* A device that captures: the simulated one behind a table that, between recorder_begin and recorder_end,
 * notes what is enqueued in place of doing it, as a driver does, and counts what a driver would refuse. A
 * replay does all of it on streams of its own, each as early as its waits allow. One at a time in a
 * program. */
#ifndef TESTS_STREAM_RECORDER_H
#define TESTS_STREAM_RECORDER_H
#include "device/device.h"

typedef struct recording recording;

sth_status recorder_open(const sth_sim_options *sim, sth_device **out);
void recorder_begin(sth_stream stream);
/* The n-th call inside captures from here on that enqueues fails; 0: none does. True: one has. */
bool recorder_fail(uint32_t n);
/* Kernels on the captured stream that read [address, address + bytes) for so long; returns their number. */
uint32_t recorder_use(sth_devptr address, uint64_t bytes, int64_t compute_ns);
recording *recorder_end(void);
void recording_free(recording *);
uint32_t recording_waits(const recording *); /* of one stream for another */
/* Enqueued on `stream` behind what is there. */
void recording_launch(recording *, sth_device *, sth_stream stream);
/* What the use saw before and behind its work in the last launch that has been waited for. */
const uint8_t *recording_saw(const recording *, uint32_t use, int when);
uint64_t recorder_copies(void); /* calls that copy to the device since it was opened, inside a capture or not */
/* What a driver would have refused since it was asked last; *out_first says what (static). */
uint32_t recorder_refusals(const char **out_first);
#endif
