/* The JSONL file of a run: one line per step, whole lines only, of bounded size. */
#ifndef STHI_TELEMETRY_JSONL_H
#define STHI_TELEMETRY_JSONL_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/runtime.h"

typedef struct sthi_jsonl sthi_jsonl;

/* Written as the last line of a file that is full. */
#define STHI_JSONL_TRUNCATED "{\"truncated\":true}\n"

/* Opens for appending; a new file gets mode 0600. Refused: a symbolic link, a file with another name, or
 * what is not a regular file (UNSUPPORTED), a file that another writer has open (INVALID_STATE), a bound that leaves no
 * room for even the line above (INVALID_ARGUMENT). Otherwise IO, NOT_FOUND, OUT_OF_HOST_MEMORY. */
sth_status sthi_jsonl_open(const char *path, uint64_t max_bytes, sthi_jsonl **out_file);
void sthi_jsonl_close(sthi_jsonl *file, bool flush); /* NULL is fine; see sthi_telemetry_destroy */

/* Adds a line with the keys of STH_STEP_METRICS_LIST in that order. Lines are gathered and written every
 * half second or 16 KiB. The first failure is returned, here or at the next call; then nothing is written
 * any more and all is OK again. A file that was full when opened is such a failure too. */
sth_status sthi_jsonl_append(sthi_jsonl *file, const sth_step_metrics *metrics);

/* Writes what is gathered. Returns as append. */
sth_status sthi_jsonl_flush(sthi_jsonl *file);

/* Records that were to be added and that the file does not and will not have: those gathered when a write failed, and
 * all behind it or behind the mark of a full file. */
uint64_t sthi_jsonl_lost(const sthi_jsonl *file);

/* Opens the file for this one write, so that nothing of it is left to a forked child: all of `text`, whole lines of
 * JSON that begin as telemetry does, or nothing. Several may do so at once: each waits, a second at most, until the one
 * before has ended. Where they do not fit, the line above is the last, if even it does.
 * Returns what open does, and IO. */
sth_status sthi_jsonl_append_text(const char *path, uint64_t max_bytes, const char *text, size_t length,
                                  bool *out_full);
#endif
