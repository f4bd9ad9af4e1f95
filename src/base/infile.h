/* Files that the user named to be read as streams or to be loaded: traces, back ends. */
#ifndef STHI_BASE_INFILE_H
#define STHI_BASE_INFILE_H
#include <stdio.h>

#include "stagehand/status.h"

/* Opens for reading. what: what it should be, for messages ("a trace"). Refused: folders, pipes, sockets and devices
 * (UNSUPPORTED), without waiting for any. Otherwise NOT_FOUND, IO. */
sth_status sthi_infile_open(const char *path, const char *what, FILE **out_file);

/* Looks only, for a file that something else opens by its path, and that says by itself what is missing. */
sth_status sthi_infile_check(const char *path, const char *what);
#endif
