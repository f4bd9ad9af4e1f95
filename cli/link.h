/* Choosing a device, and how fast bytes reach it. */
#ifndef CLI_LINK_H
#define CLI_LINK_H
#include <stdbool.h>

#include "stagehand/device.h"

/* What the simulated device's link is taken to carry where the user does not say.
 * 16 GB/s is a PCIe 4 x8 or PCIe 3 x16 slot. */
#define LINK_ASSUMED_BYTES_PER_S 16e9

/* "cuda" where there is such a device, else "hip" where there is one, else "sim". */
const char *link_default_device(void);
bool link_is_simulated(const char *device);

/* Pinned rate with copies of `bytes`; pageable where memory cannot be pinned (*out_pinned tells). */
sth_status link_measure(sth_device *device, uint64_t bytes, double *out_bytes_per_s, bool *out_pinned);
#endif
