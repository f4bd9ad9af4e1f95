/* Read-back: is what lies on the device what the source says? Goes through acquire, so it also tests
 * that path; not for hot loops. */
#include "runtime/verify.h"

#define XXH_INLINE_ALL
#include <string.h>
#include <xxhash.h>

#include "base/memory.h"
#include "load/read/from_store.h"
#include "load/read/unpack.h"
#include "runtime/lease.h"
#include "state/state.h"

static sth_status read_back(sth_runtime *rt, const sth_lease *lease, uint8_t *to, uint64_t bytes) {
    sth_stream stream = 0;
    STHI_TRY(STHI_DEV(rt, stream_create, 0, &stream));
    sth_event *ready = rt->sync[lease->slot].ready; /* leased: it stays */
    sth_status rc = STHI_DEV(rt, stream_wait, stream, ready);
    if (rc == STH_OK) rc = STHI_DEV(rt, copy_d2h, to, lease->address, bytes, stream);
    if (rc == STH_OK) rc = STHI_DEV(rt, stream_synchronize, stream);
    STHI_DEV(rt, stream_destroy, stream);
    return rc;
}

/* The unit's bytes from its source, through the page cache whatever way its files are streamed in. */
static sth_status read_source(const sthi_unit *u, uint8_t *to) {
    if (u->segments) return sthi_expand_on_host(u, 0, u->bytes, to);
    memset(to, 0, u->bytes);
    if (!u->checkpoint && !u->store) memcpy(to, u->host, sthi_min_u64(u->host_bytes, u->bytes));
    for (uint32_t i = 0; i < u->range_count; i++) {
        const sth_file_range *r = &u->ranges[i];
        STHI_TRY(sthi_range_read(u, r, r->file_offset, r->bytes, to + r->place_offset));
    }
    return STH_OK;
}

static sth_status verify(sth_runtime *rt, uint32_t unit, bool *out_equal, uint64_t *out_hash) {
    sth_lease lease;
    STHI_TRY(sthi_unit_acquire(rt, unit, 0, &lease));
    uint64_t bytes = rt->units[unit].bytes;
    uint8_t *device = sthi_alloc(bytes), *source = sthi_alloc(bytes);
    sth_status rc = device && source ? STH_OK
                                     : sthi_no_memory(rt->units[unit].name,
                                                      "verifying unit '%s'", rt->units[unit].name);
    if (rc == STH_OK) rc = read_back(rt, &lease, device, bytes);
    if (rc == STH_OK && rt->units[unit].segments)
        memcpy(source, device, bytes); /* what is between segments is nobody's */
    if (rc == STH_OK) rc = read_source(&rt->units[unit], source);
    if (rc == STH_OK) {
        *out_equal = memcmp(device, source, bytes) == 0;
        if (out_hash) *out_hash = XXH3_64bits(device, bytes);
    }
    sthi_free(device);
    sthi_free(source);
    sthi_lease_release(rt, &lease);
    (void)sthi_runtime_poll(rt);
    return rc;
}

sth_status sthi_unit_verify(sth_runtime *rt, uint32_t unit, bool *out_equal, uint64_t *out_hash) {
    sthi_lock(&rt->lock);
    rt->callers++;
    rt->reads.images++;
    sthi_unlock(&rt->lock);
    sth_status rc = verify(rt, unit, out_equal, out_hash);
    sthi_lock(&rt->lock);
    if (!--rt->reads.images) sthi_cond_broadcast(&rt->changed);
    sthi_leave(rt);
    sthi_unlock(&rt->lock);
    return rc;
}
