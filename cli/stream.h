/* Really streaming a checkpoint: what is asked, what is done, what came out. */
#ifndef CLI_STREAM_H
#define CLI_STREAM_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/runtime.h"
#include "units.h"

typedef struct stream_request {
    const char *path, *blocks, *device, *telemetry, *trace; /* NULL where not given */
    uint64_t budget, steps, ram_budget;
    double link_gb_s, compute_ms; /* negative where not given */
    bool verify;
} stream_request;

/* Medians over the steps that count: the first two are for learning the order, if there are more. */
typedef struct stream_measured {
    uint32_t steps;
    double step_ms, copy_ms, compute_ms, stall_ms, h2d_bytes, link_gb_s, host_waits;
    double hit_rate; /* over all of these steps */
} stream_measured;

typedef struct stream_run {
    const stream_request *request;
    sth_checkpoint *checkpoint;
    units units;
    sth_device *device;
    sth_device_info info;
    bool simulated;
    sth_runtime *runtime;
    double open_ms, steps_ms; /* wall time until sealed, and of all steps */
    uint32_t verified, differing;
    sth_prediction prediction;
    sth_runtime_stats stats;
    stream_measured measured;
} stream_run;

/* All return an exit code and say on stderr what is wrong; stream_close is right after any of them. */
int stream_open(const stream_request *request, stream_run *out);
int stream_steps(stream_run *run);
int stream_verify(stream_run *run);
int stream_measure(stream_run *run);
void stream_close(stream_run *run);

/* stream_report.c */
void stream_print(const stream_run *run);
void stream_print_json(const stream_run *run);
#endif
