/* Host memory that this process pins, and how much of it may be: pages that are pinned cannot be swapped, and a machine
 * whose memory is nearly all pinned stops. Threads: any. */
#ifndef STHI_DEVICE_PINNING_H
#define STHI_DEVICE_PINNING_H
#include <stdbool.h>

#include "stagehand/backend.h"

struct sth_device;

/* Bytes that pinning leaves to everything else on the machine: a fifth of the memory that is available or pinned by
 * this process, and at least 4 GB. */
uint64_t sthi_pin_reserve(uint64_t available, uint64_t pinned);

/* Whether `bytes` of memory, which hold values already, may be pinned. The first 256 MiB of a process always may be:
 * staging and small models need no more. False with the account of why (OUT_OF_PINNED_MEMORY). Blocks: reads files of
 * the system. */
bool sthi_may_pin(uint64_t bytes);

/* As the back end's host_register and host_unregister, and counted. Blocks: as those. */
sth_status sthi_pin(struct sth_device *device, void *host, uint64_t bytes, sth_devptr *out_alias);
void sthi_unpin(struct sth_device *device, void *host, uint64_t bytes);
#endif
