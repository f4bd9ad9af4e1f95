/* What the steps of one run looked like: a rolling window of the newest 100 records, and optionally a
 * JSONL file of all of them.
 *
 * Life: sthi_telemetry_create -> sthi_telemetry_push (each step) -> sthi_telemetry_destroy.
 * Threads: one at a time; the caller's lock guards it. */
#ifndef STHI_TELEMETRY_TELEMETRY_H
#define STHI_TELEMETRY_TELEMETRY_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/runtime.h"

#define STHI_TELEMETRY_WINDOW 100u

typedef struct sthi_telemetry sthi_telemetry;

/* `path`: the JSONL file to append to, NULL for none; the file is never grown beyond `max_bytes` bytes,
 * what it held before included. See jsonl.h for what is refused and with which status.
 * Blocks: for opening. Allocates: about 20 KiB, and 16 KiB more with a file. */
sth_status sthi_telemetry_create(const char *path, uint64_t max_bytes, sthi_telemetry **out_telemetry);

/* Ends it. `flush`: lines not yet written go to the file; without it they are dropped (a forked child must
 * not write its parent's lines). NULL is fine. */
void sthi_telemetry_destroy(sthi_telemetry *telemetry, bool flush);

/* Adds the record of one step. The window always takes it. A failure is the file's, is returned once, and
 * ends the writing; the run may go on. Blocks: for a write to the file about every half second. */
sth_status sthi_telemetry_push(sthi_telemetry *telemetry, const sth_step_metrics *metrics);

/* Writes what is gathered for the file. Returns as push. */
sth_status sthi_telemetry_flush(sthi_telemetry *telemetry);
/* Records that the file does not and will not have; 0 without one. */
uint64_t sthi_telemetry_lost(const sthi_telemetry *telemetry);

/* The i-th newest record, 0 = newest; NOT_FOUND past the end of the window. */
sth_status sthi_telemetry_get(const sthi_telemetry *telemetry, uint32_t i, sth_step_metrics *out_metrics);
/* Records in the window, 100 at most. */
uint32_t sthi_telemetry_count(const sthi_telemetry *telemetry);
#endif
