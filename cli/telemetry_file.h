/* Reading back a telemetry file. Both return an exit code, and say on stderr what is wrong. */
#ifndef CLI_TELEMETRY_FILE_H
#define CLI_TELEMETRY_FILE_H
#include <stdint.h>

#include "stagehand/runtime.h"

/* Mean compute_time_ms of the records. */
int telemetry_mean_compute(const char *path, double *out_ms);
/* The newest records, 10,000 at most, oldest first: one or more. A field that a line lacks is 0. The caller frees
 * them. */
int telemetry_read_steps(const char *path, sth_step_metrics **out_steps, uint32_t *out_count);
#endif
