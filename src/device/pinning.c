/* Pinned host memory. One counter for the process, whatever the device; the rule is a pure function of it and of the
 * memory that is available. The check and the pinning are not one step: threads that pin at once may pass the mark by
 * what they pin then. */
#include "device/pinning.h"

#include <inttypes.h>
#include <stdatomic.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/device.h"

#define LEAST_RESERVE UINT64_C(4000000000)
enum { RESERVE_SHARE = 5, ALWAYS = 256 << 20 };

static atomic_uint_fast64_t pinned_bytes; /* of this process */

uint64_t sthi_pin_reserve(uint64_t available, uint64_t pinned) {
    uint64_t all;
    if (!sthi_add_u64(available, pinned, &all)) all = UINT64_MAX;
    return sthi_max_u64(LEAST_RESERVE, all / RESERVE_SHARE);
}

bool sthi_may_pin(uint64_t bytes) {
    uint64_t pinned = atomic_load(&pinned_bytes);
    if (pinned <= ALWAYS && bytes <= ALWAYS - pinned) return true;
    uint64_t available = sthi_memory_available(), reserve = sthi_pin_reserve(available, pinned + bytes);
    if (available >= reserve) return true;
    sthi_fail(STH_OUT_OF_PINNED_MEMORY, NULL, 0, "host memory",
              "%" PRIu64 " bytes of host memory are available, and pinning leaves %" PRIu64
              " to the rest of the machine (%" PRIu64 " are pinned); pin less, or free host memory",
              available, reserve, pinned);
    return false;
}

sth_status sthi_pin(sth_device *device, void *host, uint64_t bytes, sth_devptr *out_alias) {
    STHI_TRY(device->ops->host_register(device->self, host, bytes, out_alias));
    atomic_fetch_add(&pinned_bytes, bytes);
    return STH_OK;
}

void sthi_unpin(sth_device *device, void *host, uint64_t bytes) {
    device->ops->host_unregister(device->self, host, bytes);
    atomic_fetch_sub(&pinned_bytes, bytes);
}
