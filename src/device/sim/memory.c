/* Memory of the simulated device: host pages that stand for device memory, counted exactly against the
 * capacity, and a table of host memory that is registered.
 *
 * Invariants: both tables are sorted and disjoint; memory_used and pinned are the sums of their bytes.
 * Lock: the device's. Does not copy anything; freed memory is poisoned here because free waits first. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"
#include "device/sim/sim.h"

static sth_status bad_address(uint64_t p, const char *what) {
    char object[32];
    snprintf(object, sizeof object, "0x%" PRIx64, p);
    return sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, object, "%s: %s", object, what);
}

/* Index of the first range whose base is above p; the one before it may hold p. */
static size_t ranges_above(const sim_ranges *set, uintptr_t p) {
    size_t lo = 0, hi = set->count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (set->items[mid].base <= p) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

static const sim_range *ranges_holding(const sim_ranges *set, uintptr_t p) {
    size_t i = ranges_above(set, p);
    if (i == 0) return NULL;
    const sim_range *r = &set->items[i - 1];
    return p - r->base < r->span ? r : NULL;
}

static bool ranges_overlap(const sim_ranges *set, uintptr_t p, uint64_t bytes) {
    size_t i = ranges_above(set, p);
    if (i > 0 && p - set->items[i - 1].base < set->items[i - 1].span) return true;
    return i < set->count && set->items[i].base - p < bytes;
}

static bool ranges_reserve(sim_ranges *set) {
    if (set->count < set->capacity) return true;
    size_t capacity = set->capacity ? 2 * set->capacity : 16;
    sim_range *items = sthi_realloc(set->items, capacity, sizeof *items);
    if (!items) return false;
    set->items = items;
    set->capacity = capacity;
    return true;
}

/* Room was reserved and the range overlaps none. */
static void ranges_insert(sim_ranges *set, sim_range r) {
    size_t i = ranges_above(set, r.base);
    memmove(&set->items[i + 1], &set->items[i], (set->count - i) * sizeof r);
    set->items[i] = r;
    set->count++;
}

static bool ranges_remove(sim_ranges *set, uintptr_t base, uint64_t bytes, bool ring, sim_range *out) {
    size_t i = ranges_above(set, base);
    if (i == 0) return false;
    *out = set->items[--i];
    if (out->base != base || out->bytes != bytes || out->ring != ring) return false;
    set->count--;
    memmove(&set->items[i], &set->items[i + 1], (set->count - i) * sizeof *out);
    return true;
}

static void range_unmap(const sim_range *r) {
    if (r->ring) sthi_mirror_unmap((void *)r->base, r->bytes);
    else sthi_pages_unmap((void *)r->base, r->bytes);
}

static void morgue_drop_oldest(sim_morgue *m) {
    sim_range *r = &m->slots[m->first];
    m->bytes -= r->bytes;
    range_unmap(r);
    m->first = (m->first + 1) % SIM_MORGUE_SLOTS;
    m->count--;
}

static void bury(sim_device *d, const sim_range *r) {
    sim_morgue *m = &d->morgue;
    if (!d->options.poison || r->bytes > SIM_MORGUE_BYTES) {
        range_unmap(r);
        return;
    }
    memset((void *)r->base, 0xFF, r->bytes);
    while (m->count == SIM_MORGUE_SLOTS || m->bytes + r->bytes > SIM_MORGUE_BYTES) morgue_drop_oldest(m);
    m->slots[(m->first + m->count) % SIM_MORGUE_SLOTS] = *r;
    m->count++;
    m->bytes += r->bytes;
}

static sth_status no_room(const sim_device *d, uint64_t bytes) {
    return sthi_fail(STH_OUT_OF_DEVICE_MEMORY, "sim", 0, "device memory",
                     "%" PRIu64 " bytes of device memory were asked for and %" PRIu64 " of %" PRIu64
                     " are free; lower the budget or raise memory_bytes of the simulated device",
                     bytes, d->options.memory_bytes - d->memory_used, d->options.memory_bytes);
}

static sth_status alloc_locked(sim_device *d, uint64_t bytes, bool ring, sth_devptr *out) {
    if (sthi_fault_hit(STHI_FAULT_DEVICE_ALLOC) || bytes > d->options.memory_bytes - d->memory_used)
        return no_room(d, bytes);
    void *p = NULL;
    if (ranges_reserve(&d->memory)) p = ring ? sthi_mirror_map(bytes) : sthi_pages_map(bytes, 0);
    if (!p)
        return sthi_no_memory_in("sim", "device memory", "%" PRIu64 " bytes that stand for device memory", bytes);
    if (d->options.poison) memset(p, 0xFF, bytes); /* fresh device memory is not zero */
    ranges_insert(&d->memory, (sim_range){(uintptr_t)p, bytes, ring ? 2 * bytes : bytes, ring});
    d->memory_used += bytes;
    *out = (uintptr_t)p;
    return STH_OK;
}

static sth_status alloc_any(sth_backend_device *device, uint64_t bytes, bool ring, sth_devptr *out) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_check_fork(d));
    uint64_t unit = ring ? sthi_page_size() : 1;
    if (bytes == 0 || bytes % unit)
        return sthi_fail(STH_INVALID_ARGUMENT, "sim", 0, ring ? "ring" : "device memory",
                         "%" PRIu64 " bytes were asked for; give a positive multiple of %" PRIu64, bytes,
                         unit);
    sthi_lock(&d->lock);
    sth_status status = alloc_locked(d, bytes, ring, out);
    sthi_unlock(&d->lock);
    return status;
}

sth_status sthi_sim_alloc(sth_backend_device *device, uint64_t bytes, sth_devptr *out) {
    return alloc_any(device, bytes, false, out);
}

sth_status sthi_sim_ring_alloc(sth_backend_device *device, uint64_t bytes, sth_devptr *out) {
    return alloc_any(device, bytes, true, out);
}

uint64_t sthi_sim_ring_granularity(sth_backend_device *device) {
    (void)device;
    return sthi_page_size();
}

static void free_any(sth_backend_device *device, sth_devptr p, uint64_t bytes, bool ring) {
    sim_device *d = sthi_sim_of(device);
    if (p == 0 || sthi_sim_check_fork(d)) return;
    sim_range r;
    sthi_lock(&d->lock);
    (void)sthi_sim_drain(d, NULL); /* what cannot run is dropped at close; the memory goes all the same */
    bool found = ranges_remove(&d->memory, p, bytes, ring, &r);
    if (found) {
        d->memory_used -= bytes;
        bury(d, &r);
    }
    sthi_unlock(&d->lock);
    if (!found) (void)bad_address(p, "no live allocation of this size starts here; was it freed twice?");
}

void sthi_sim_free(sth_backend_device *device, sth_devptr p, uint64_t bytes) { free_any(device, p, bytes, false); }

void sthi_sim_ring_free(sth_backend_device *device, sth_devptr p, uint64_t bytes) {
    free_any(device, p, bytes, true);
}

sth_status sthi_sim_check_live(const sim_device *d, sth_devptr p, uint64_t bytes) {
    const sim_range *r = ranges_holding(&d->memory, p);
    if (!r) return bad_address(p, "not inside a live allocation of this device");
    if (bytes > r->bytes || !sthi_range_inside(p - r->base, bytes, r->span))
        return bad_address(p, "the range runs past the end of its allocation");
    return STH_OK;
}

static sth_status over_pin_limit(const sim_device *d, uint64_t bytes) {
    return sthi_fail(STH_OUT_OF_PINNED_MEMORY, "sim", 0, "pinned host memory",
                     "%" PRIu64 " bytes of host memory could not be pinned: %" PRIu64
                     " are pinned and the limit is %" PRIu64 "; raise pin_limit_bytes or pin less",
                     bytes, d->pinned, d->options.pin_limit_bytes);
}

static sth_status register_locked(sim_device *d, uintptr_t p, uint64_t bytes) {
    if (ranges_overlap(&d->pins, p, bytes))
        return bad_address(p, "some of this memory is registered already");
    uint64_t limit = d->options.pin_limit_bytes;
    if (limit && (d->pinned > limit || bytes > limit - d->pinned)) return over_pin_limit(d, bytes);
    if (!ranges_reserve(&d->pins))
        return sthi_no_memory_in("sim", "pins", "the note of a registration");
    ranges_insert(&d->pins, (sim_range){p, bytes, bytes, false});
    d->pinned += bytes;
    return STH_OK;
}

sth_status sthi_sim_host_register(sth_backend_device *device, void *p, uint64_t bytes, sth_devptr *out_alias) {
    sim_device *d = sthi_sim_of(device);
    STHI_TRY(sthi_sim_check_fork(d));
    uint64_t end;
    if (!p || bytes == 0 || !sthi_add_u64((uintptr_t)p, bytes, &end))
        return bad_address((uintptr_t)p, "not a range of host memory");
    sthi_lock(&d->lock);
    sth_status status =
        sthi_fault_hit(STHI_FAULT_PIN) ? over_pin_limit(d, bytes) : register_locked(d, (uintptr_t)p, bytes);
    sthi_unlock(&d->lock);
    if (status == STH_OK) *out_alias = (uintptr_t)p;
    return status;
}

void sthi_sim_host_unregister(sth_backend_device *device, void *p, uint64_t bytes) {
    sim_device *d = sthi_sim_of(device);
    if (!p || sthi_sim_check_fork(d)) return;
    sim_range r;
    sthi_lock(&d->lock);
    bool found = ranges_remove(&d->pins, (uintptr_t)p, bytes, false, &r);
    if (found) d->pinned -= bytes;
    sthi_unlock(&d->lock);
    if (!found) (void)bad_address((uintptr_t)p, "no registration of this size starts here");
}

void sthi_sim_memory_fini(sim_device *d) {
    for (size_t i = 0; i < d->memory.count; i++) range_unmap(&d->memory.items[i]);
    while (d->morgue.count) morgue_drop_oldest(&d->morgue);
    sthi_free(d->memory.items);
    sthi_free(d->pins.items);
}
