/* Exported functions of stagehand/timeline.h: check the arguments, then hand over to src/telemetry. */
#include "api/arguments.h"
#include "telemetry/devtime.h"
#include "telemetry/timeline.h"

void sth_timeline_options_init(sth_timeline_options *options) {
    if (options) sthi_timeline_options_init(options);
}

sth_status sth_timeline_begin(const sth_timeline_options *options) {
    if (!options || options->size != sizeof *options)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "options were not set up by sth_timeline_options_init of this version");
    if (!options->path) return null_argument("path");
    return sthi_timeline_begin(options);
}

sth_status sth_timeline_end(uint64_t *out_lost) {
    sthi_devspans_end(); /* while they can still become slices */
    return sthi_timeline_end(out_lost);
}
