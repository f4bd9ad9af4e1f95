/* What the tool's commands share: exit codes, messages on stderr, memory, and numbers for people. */
#ifndef CLI_REPORT_H
#define CLI_REPORT_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "stagehand/plan.h"
#include "stagehand/status.h"

enum {
    CLI_OK = 0,
    CLI_FAILED = 1, /* what was to be checked is not so */
    CLI_USAGE = 2,
    CLI_DATA = 3,   /* a file is missing, unreadable or wrong */
    CLI_DEVICE = 4  /* a device or a resource is missing or used up */
};

/* Prints "stagehand: ..." on stderr and returns the exit code. */
int cli_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int cli_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same for the last error of the library: `status` is what the call returned. */
int cli_fail_status(sth_status status);

/* Writes text from outside so that it cannot steer a terminal. */
void cli_put(FILE *to, const char *text);

/* Zeroed. Out of memory ends the tool with CLI_DEVICE. */
void *cli_alloc(uint64_t count, size_t each);
char *cli_copy(const char *text, size_t length);

/* "3.00 GiB" in a buffer of the caller's. */
typedef struct size_text { char text[24]; } size_text;
size_text cli_size(uint64_t bytes);

/* What bounds a step, in words: "compute", "the link", "the disk", "the ring". */
const char *cli_bound(sth_bound bound);
#endif
