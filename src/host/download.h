/* Copies from the device into host blocks; stagehand/download.h is the manual. */
#ifndef STHI_HOST_DOWNLOAD_H
#define STHI_HOST_DOWNLOAD_H
#include "stagehand/conductor.h"
#include "stagehand/download.h"

void sthi_download_options_init(sth_download_options *options);
sth_status sthi_download_create(sth_device *device, const sth_download_options *options, sth_download **out);
void sthi_download_destroy(sth_download *d);
sth_status sthi_download_set_conductor(sth_download *d, sth_conductor *c);
sth_status sthi_download_reserve(sth_download *d, uint64_t bytes);
sth_status sthi_download_take(sth_download *d, uint64_t bytes, sth_block **out);
sth_status sthi_download_copy(sth_download *d, sth_block *block, uint64_t offset, sth_devptr source,
                              uint64_t bytes, sth_stream stream, sth_ticket *out);
sth_status sthi_download_wait(sth_download *d, sth_ticket ticket);
sth_status sthi_download_done(sth_download *d, sth_ticket ticket, bool *out);
void sthi_download_forget(sth_download *d, sth_ticket ticket);
void sthi_download_stats(sth_download *d, sth_download_stats *out);
#endif
