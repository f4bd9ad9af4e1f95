/* Messages, exit codes and small things of the tool. */
#include "report.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stagehand/util.h"

/* What turns the direction of text: 200e, 200f, 202a to 202e, 2066 to 2069, which UTF-8 spells e2 80 .. and e2 81 .. */
static bool turns_text(const unsigned char *p) {
    if (p[0] != 0xe2) return false;
    if (p[1] == 0x80) return p[2] == 0x8e || p[2] == 0x8f || (p[2] >= 0xaa && p[2] <= 0xae);
    return p[1] == 0x81 && p[2] >= 0xa6 && p[2] <= 0xa9;
}

/* Names come from files and are not trusted: what could steer a terminal, or make a name look like another (control
 * characters, the C1 ones that UTF-8 spells c2 80 to c2 9f, turns of direction), is written as \xNN or \uNNNN. */
void cli_put(FILE *to, const char *text) {
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p < 0x20 || *p == 0x7f) {
            fprintf(to, "\\x%02x", *p);
        } else if (*p == 0xc2 && p[1] >= 0x80 && p[1] <= 0x9f) {
            fprintf(to, "\\x%02x", *++p);
        } else if (turns_text(p)) {
            fprintf(to, "\\u%04x", 0x2000 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu));
            p += 2;
        } else {
            putc(*p, to);
        }
    }
}

static void complain(const char *format, va_list args) {
    char text[2048];
    vsnprintf(text, sizeof text, format, args);
    fputs("stagehand: ", stderr);
    cli_put(stderr, text);
    putc('\n', stderr);
}

int cli_fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    complain(format, args);
    va_end(args);
    return code;
}

int cli_usage(const char *format, ...) {
    va_list args;
    va_start(args, format);
    complain(format, args);
    va_end(args);
    return CLI_USAGE;
}

static int code_of(sth_status status) {
    switch (status) {
    case STH_NOT_FOUND:
    case STH_UNSUPPORTED:
    case STH_IO:
    case STH_CORRUPT_DATA:
    case STH_CHANGED_DATA:
    case STH_DTYPE_MISMATCH:
    case STH_SHAPE_MISMATCH:
        return CLI_DATA;
    case STH_INVALID_ARGUMENT:
        return CLI_USAGE;
    default:
        return CLI_DEVICE;
    }
}

int cli_fail_status(sth_status status) {
    const sth_error *e = sth_last_error();
    const char *message = e->status == status && *e->message ? e->message : sth_status_text(status);
    return cli_fail(code_of(status), "%s (%s)", message, sth_status_name(status));
}

void *cli_alloc(uint64_t count, size_t each) {
    void *p = NULL;
    if (!count) count = 1;
    if (!each || count <= SIZE_MAX / each) p = calloc((size_t)count, each);
    if (!p) exit(cli_fail(CLI_DEVICE, "no host memory"));
    return p;
}

char *cli_copy(const char *text, size_t length) {
    char *copy = cli_alloc(length + 1, 1);
    memcpy(copy, text, length);
    return copy;
}

size_text cli_size(uint64_t bytes) {
    size_text out;
    sth_format_size(bytes, out.text, sizeof out.text);
    return out;
}

const char *cli_bound(sth_bound bound) {
    if (bound == STH_BOUND_DISK) return "the disk";
    if (bound == STH_BOUND_COMPUTE) return "compute";
    return bound == STH_BOUND_LINK ? "the link" : "the ring";
}
