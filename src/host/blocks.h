/* Pinned host blocks of any size from regions that are kept; stagehand/download.h is the manual. */
#ifndef STHI_HOST_BLOCKS_H
#define STHI_HOST_BLOCKS_H
#include "stagehand/download.h"

typedef struct sthi_blocks sthi_blocks;

sth_status sthi_blocks_create(sth_device *device, uint64_t region_bytes, uint64_t pinned_limit,
                              sthi_blocks **out);
/* The owner's end: memory that is free goes now, the rest with its blocks. NULL is fine. */
void sthi_blocks_close(sthi_blocks *b);
void sthi_blocks_set_pinned_limit(sthi_blocks *b, uint64_t bytes); /* of regions to come; 0: none */
sth_status sthi_blocks_reserve(sthi_blocks *b, uint64_t bytes);
sth_status sthi_blocks_take(sthi_blocks *b, uint64_t bytes, sth_block **out);
/* Fills in what stagehand/download.h says of blocks and regions. */
void sthi_blocks_stats(sthi_blocks *b, sth_download_stats *out);

void *sthi_block_address(const sth_block *block);
uint64_t sthi_block_bytes(const sth_block *block);
bool sthi_block_is_pinned(const sth_block *block);
void sthi_block_retain(sth_block *block);
void sthi_block_release(sth_block *block);
#endif
