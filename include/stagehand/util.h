/* stagehand/util.h - sizes and names as people write them, the same in the tool, the bindings
 * and the library. */
#ifndef STAGEHAND_UTIL_H
#define STAGEHAND_UTIL_H
#include <stddef.h>
#include <stdint.h>

#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes: every tensor starts at a multiple of this, in arenas and in places. */
#define STH_ALIGN 512u

/* Reads "512MB", "8GiB", "1.5G", "4096". K M G T and KB MB GB TB are powers of 1000, KiB MiB GiB
 * TiB powers of 1024, a bare number is bytes. INVALID_ARGUMENT for anything else: negative
 * numbers, fractions of a byte, text behind the unit. Threads: any. Blocks: no. Allocates: no. */
STH_API sth_status sth_parse_size(const char *text, uint64_t *out_bytes);

/* Writes "3.00 GiB" or "512 B" into buffer (24 bytes hold any size; what does not fit is cut)
 * and returns it; NULL for NULL. Threads: any. Blocks: no. Allocates: no. */
STH_API char *sth_format_size(uint64_t bytes, char *buffer, size_t capacity);

/* Compares text as strcmp does, but numbers in it by their value: "h.9" before "h.10", and a
 * name before those that go on from it with a dot. NULL is "". Threads: any. Blocks: no.
 * Allocates: no. */
STH_API int sth_compare_natural(const char *a, const char *b);

#ifdef __cplusplus
}
#endif
#endif
