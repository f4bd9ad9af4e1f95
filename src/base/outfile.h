/* Files that the user named to be written by the way: telemetry, traces. */
#ifndef STHI_BASE_OUTFILE_H
#define STHI_BASE_OUTFILE_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/status.h"

/* Opens for reading and appending; a new file gets mode 0600, one that is there keeps what it holds. what: what is
 * written, for messages ("telemetry"). Refused: a symbolic link, a file with another name, what is not a regular file
 * (UNSUPPORTED). A pipe does not block. Otherwise IO, NOT_FOUND. */
sth_status sthi_outfile_open(const char *path, const char *what, int *out_fd, uint64_t *out_bytes);

/* Whether the file is empty or begins with one of the `count` texts, so that a path given by mistake, a model's for
 * one, is not written to. Texts of up to 31 characters. */
bool sthi_outfile_begins(int fd, uint64_t bytes, const char *const *texts, int count);
#endif
