/* stagehand/timeline.h - what the process does when, as a Chrome trace for Perfetto and
 * chrome://tracing.
 *
 *     sth_timeline_begin -> steps, copies, reads, updates as usual -> sth_timeline_end
 *
 * One recording at a time, of all runtimes, downloads, activation stores and optimizers of the
 * process. Events go into a ring in host memory; the oldest give way. Times are those of
 * torch.profiler: its traces lie beside this one.
 *
 * Unless a function says otherwise: Threads: any. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_TIMELINE_H
#define STAGEHAND_TIMELINE_H
#include <stddef.h>
#include <stdint.h>

#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_timeline_options {
    size_t size;      /* sizeof(sth_timeline_options), set by init */
    const char *path; /* of the file; copied. One that ends in ".gz" is compressed. Required */
    uint32_t events;  /* that the ring holds, 64 bytes each; 1024 to 2^24. Default 2^18 */
} sth_timeline_options;
STH_API void sth_timeline_options_init(sth_timeline_options *options);

/* Opens the file and records from now on. A file that holds something else than a trace is refused
 * (UNSUPPORTED), so is a symbolic link. Returns INVALID_STATE where a recording is under way,
 * INVALID_ARGUMENT, IO, NOT_FOUND, OUT_OF_HOST_MEMORY. Threads: any. Blocks: for the file.
 * Allocates: the ring. */
STH_API sth_status sth_timeline_begin(const sth_timeline_options *options);

/* Ends the recording and writes the file. Steps of a runtime appear when the device has passed
 * them: call sth_runtime_flush_telemetry of each runtime before. *out_lost (may be NULL): events
 * that gave way to newer ones. Returns INVALID_STATE without a recording, IO; the recording has
 * ended then as well. Threads: any. Blocks: for copies that are being recorded, and the file.
 * Allocates: host memory. */
STH_API sth_status sth_timeline_end(uint64_t *out_lost);

#ifdef __cplusplus
}
#endif
#endif
