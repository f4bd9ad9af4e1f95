/* Rings of events. Whoever records a number has waited for the one whose event it takes (sthi_rows_ring_old), on the
 * stream or thread that would have to wait for it later; so a number that is not in the ring needs no wait. Lock of the
 * rows held. */
#include "rows/order.h"

#include "base/error.h"

static uint32_t place_of(uint64_t number) { return (uint32_t)(number % STHI_ROWS_EVENTS); }

sth_status sthi_rows_ring_open(sthi_rows_ring *ring, sth_device *device) {
    for (uint32_t i = 0; i < STHI_ROWS_EVENTS; i++)
        STHI_TRY(device->ops->event_create(device->self, false, &ring->events[i]));
    return STH_OK;
}

void sthi_rows_ring_close(sthi_rows_ring *ring, sth_device *device) {
    for (uint32_t i = 0; i < STHI_ROWS_EVENTS; i++)
        if (ring->events[i]) device->ops->event_destroy(device->self, ring->events[i]);
    *ring = (sthi_rows_ring){0};
}

sth_event *sthi_rows_ring_event(const sthi_rows_ring *ring, uint64_t number) {
    uint32_t i = place_of(number);
    return number && ring->numbers[i] == number && !ring->passed[i] ? ring->events[i] : NULL;
}

sth_event *sthi_rows_ring_old(const sthi_rows_ring *ring) {
    return sthi_rows_ring_event(ring, ring->numbers[place_of(ring->last + 1)]);
}

sth_status sthi_rows_ring_record(sthi_rows_ring *ring, sth_device *device, sth_stream stream, uint64_t *out_number) {
    uint32_t i = place_of(ring->last + 1);
    STHI_TRY(device->ops->event_record(device->self, ring->events[i], stream));
    ring->numbers[i] = *out_number = ++ring->last;
    ring->streams[i] = stream;
    ring->passed[i] = false;
    return STH_OK;
}

bool sthi_rows_ring_before(const sthi_rows_ring *ring, uint64_t number, uint64_t later) {
    if (!sthi_rows_ring_event(ring, number)) return true;
    return later && ring->streams[place_of(number)] == ring->streams[place_of(later)];
}

void sthi_rows_ring_pass(sthi_rows_ring *ring, uint64_t number) {
    if (ring->numbers[place_of(number)] == number) ring->passed[place_of(number)] = true;
}

sth_status sthi_rows_ring_wait(sthi_rows_ring *ring, sth_device *device) {
    for (uint32_t i = 0; i < STHI_ROWS_EVENTS; i++) {
        if (!ring->numbers[i] || ring->passed[i]) continue;
        STHI_TRY(device->ops->event_synchronize(device->self, ring->events[i]));
        ring->passed[i] = true;
    }
    return STH_OK;
}
