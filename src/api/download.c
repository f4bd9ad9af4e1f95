/* Exported functions of stagehand/download.h: check the arguments, then hand over to src/host. */
#include "host/download.h"

#include "api/arguments.h"
#include "host/blocks.h"

void sth_download_options_init(sth_download_options *options) {
    if (options) sthi_download_options_init(options);
}

sth_status sth_download_create(sth_device *device, const sth_download_options *options,
                               sth_download **out_download) {
    sth_download_options complete;
    if (!device || !out_download) return null_argument("device or out_download");
    sthi_download_options_init(&complete);
    if (options) {
        if (options->size != sizeof *options)
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                             "options were not set up by sth_download_options_init of this version");
        complete = *options;
    }
    if (!complete.region_bytes || !complete.chunk_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "region_bytes and chunk_bytes are above 0");
    return sthi_download_create(device, &complete, out_download);
}

void sth_download_destroy(sth_download *download) { sthi_download_destroy(download); }

sth_status sth_download_reserve(sth_download *download, uint64_t bytes) {
    return download ? sthi_download_reserve(download, bytes) : null_argument("download");
}

sth_status sth_download_take(sth_download *download, uint64_t bytes, sth_block **out_block) {
    if (!download || !out_block) return null_argument("download or out_block");
    return sthi_download_take(download, bytes, out_block);
}

void *sth_block_address(const sth_block *block) { return block ? sthi_block_address(block) : NULL; }
uint64_t sth_block_bytes(const sth_block *block) { return block ? sthi_block_bytes(block) : 0; }
bool sth_block_is_pinned(const sth_block *block) { return block && sthi_block_is_pinned(block); }
void sth_block_retain(sth_block *block) {
    if (block) sthi_block_retain(block);
}
void sth_block_release(sth_block *block) { sthi_block_release(block); }

sth_status sth_download_copy(sth_download *download, sth_block *block, uint64_t offset, sth_devptr source,
                             uint64_t bytes, sth_stream stream, sth_ticket *out_ticket) {
    if (!download || !block || !source || !out_ticket)
        return null_argument("download, block, source or out_ticket");
    return sthi_download_copy(download, block, offset, source, bytes, stream, out_ticket);
}

sth_status sth_download_wait(sth_download *download, sth_ticket ticket) {
    return download ? sthi_download_wait(download, ticket) : null_argument("download");
}

sth_status sth_download_done(sth_download *download, sth_ticket ticket, bool *out_done) {
    if (!download || !out_done) return null_argument("download or out_done");
    return sthi_download_done(download, ticket, out_done);
}

void sth_download_forget(sth_download *download, sth_ticket ticket) {
    if (download) sthi_download_forget(download, ticket);
}

sth_status sth_download_stats_get(sth_download *download, sth_download_stats *out_stats) {
    if (!download || !out_stats) return null_argument("download or out_stats");
    sthi_download_stats(download, out_stats);
    return STH_OK;
}
