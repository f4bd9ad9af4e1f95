/* Fuzz target for traces of devices (src/device/decorate/replay.c). Input: the trace, as a file. Its calls are made
 * on a simulated device of 1 MiB in virtual time.
 *
 * Property: a trace is replayed or refused, and what is refused as corrupt names the file and a line; the clock moves
 * by no more than the work that a trace may ask for; the parser's memory is bounded by the longest line; nothing
 * stays allocated. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/device.h"
#include "fuzz/files.h"
#include "stagehand/stagehand.h"

/* Work, 10 s; and copies of at most a MiB at 1 GB/s, one a line. */
enum { MOST_S = 10 + 10, JSON_BYTES = 1 << 20 };

static sth_device *small_device(void) {
    sth_sim_options options;
    sth_device *d = NULL;
    sth_sim_options_init(&options);
    options.memory_bytes = 1 << 20;
    options.link_bytes_per_s = 1000000000;
    options.pin_limit_bytes = 1 << 24;
    options.virtual_time = true;
    CHECK(sth_device_open("sim", &options, &d) == STH_OK);
    return d;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_path("trace.jsonl");
    long live = sthi_alloc_live();
    fuzz_write(path, data, size);
    size_t json = fuzz_json_bytes;
    fuzz_reset_peak();
    sth_device *d = small_device();
    sth_replay_report report = {.size = sizeof report};
    int64_t begin = d->ops->now_ns(d->self);
    sth_status rc = sth_trace_replay(path, d, &report);
    if (rc == STH_CORRUPT_DATA)
        CHECK(strstr(sth_last_error()->message, path) && strstr(sth_last_error()->message, "line "));
    else CHECK(rc == STH_OK || rc == STH_OUT_OF_HOST_MEMORY || rc == STH_OUT_OF_DEVICE_MEMORY);
    CHECK(report.calls + report.skipped <= size);
    CHECK(d->ops->now_ns(d->self) - begin <= MOST_S * INT64_C(1000000000));
    sth_device_close(d);
    CHECK(fuzz_json_bytes == json && fuzz_json_peak - json <= JSON_BYTES);
    CHECK(sthi_alloc_live() == live);
    return 0;
}
