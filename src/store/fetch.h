/* Reads pieces of files into memory, several requests at once where the file's way allows it. */
#ifndef STHI_STORE_FETCH_H
#define STHI_STORE_FETCH_H
#include "store/access.h"

/* Bytes of a file and where they go. Direct reads move whole blocks: where the bytes before or behind `to`, up to the
 * next multiple of the file's alignment, are free, they may be overwritten, and a copy of the edge is saved. */
typedef struct sthi_piece {
    sthi_access *access;
    uint64_t offset, bytes;
    uint8_t *to;
    bool free_before, free_behind;
} sthi_piece;

/* A thread's requests: a ring where the kernel gives one, and room for what cannot be read where it goes. */
typedef struct sthi_fetcher sthi_fetcher;
sthi_fetcher *sthi_fetcher_create(void); /* NULL when memory is out */
void sthi_fetcher_destroy(sthi_fetcher *fetcher); /* NULL is fine */

/* Fills all pieces. Every byte comes from the files as they were when they were opened. On failure *out_piece and
 * *out_offset say which piece and which byte of its file; nothing is under way when it returns. One thread. */
sth_status sthi_fetch(sthi_fetcher *fetcher, const sthi_piece *pieces, uint32_t count, uint32_t *out_piece,
                      uint64_t *out_offset);
#endif
