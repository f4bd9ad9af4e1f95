/* Memory of weights that the processes of a node have in common: one file in memory for each
 * arena, and parts of others' files. common.c says how. Threads: one at a time, but for `drop`. */
#ifndef STHI_HOST_COMMON_H
#define STHI_HOST_COMMON_H
#include "stagehand/arena.h"

typedef struct sthi_common sthi_common;

/* What a reservation of so many bytes holds: XXH3 of all bytes and of where they lie. Blocks:
 * reads them by several threads, which it starts and ends. */
sth_status sthi_common_print(const sth_arena_part *parts, uint32_t count, uint64_t bytes, uint64_t out_print[2]);

/* `bytes`: of whole pages. most: pieces. NULL: this system has no such memory, or it is used up. */
sthi_common *sthi_common_create(uint64_t bytes, uint32_t most);
void sthi_common_destroy(sthi_common *c);
uint8_t *sthi_common_image(const sthi_common *c); /* what devices read; written before it is published only */
uint8_t *sthi_common_view(const sthi_common *c);  /* the same, where this process may write: others do not see it */
uint32_t sthi_common_left(const sthi_common *c);  /* pieces that still fit */

/* Takes this user's turn and looks at what other arenas hold. Blocks: while another process has
 * the turn, but two minutes at most; behind them this arena keeps to itself. */
void sthi_common_begin(sthi_common *c);
void sthi_common_end(sthi_common *c);
/* Takes the next piece, `bytes` from offset `at` on (whole pages): *out_found says whether
 * another arena holds these bytes, which lie there then. If not they are to be written into the
 * image and published. */
sth_status sthi_common_find(sthi_common *c, const uint64_t print[2], uint64_t at, uint64_t bytes, bool *out_found);
void sthi_common_publish(sthi_common *c, const uint64_t print[2]); /* the piece that was taken last */
/* Pieces in [begin, end) are used no more: what is there must not be read again. */
void sthi_common_drop(sthi_common *c, uint64_t begin, uint64_t end);
#endif
