/* Host arena. One anonymous mapping, handed out from the front. It is cut into windows; a window is
 * registered with the device when the next one begins, by background threads, while the caller goes on
 * filling. Writers are short-lived helper threads, so that first touch runs on several cores.
 *
 * Invariants: windows start on pages and never share one (a page can be registered once); a reservation
 * lies in one window. The pages of windows that are registered or will be come to at most what the arena was
 * made with; reservations that do not fit into that lie in pageable windows. Where the device refused a window and
 * would refuse SLAB_ROOM as well, the last window that it took is given back when the arena is finished: the slabs
 * that pageable windows are copied through must be pinned (WSL2 pins 0.5 to 1 GiB, whatever a model takes).
 * An arena in common has its pages in a file (common.h): `base` is the image there, and the addresses that callers get
 * are those of a view of it, at the same offsets. A reservation has whole pages, and is filled before another one
 * begins: a window is registered with the pages that it ends up with.
 * Two kinds of references: owners hold all of it, ranges hold the window that they lie in. Behind the last owner
 * a window's memory goes with its last range, so that a model which moves on to another arena takes the host memory
 * of one copy. Address space goes with the last reference of both kinds.
 * Lock: arena->lock guards windows, their states, and owners. The caller fills, so the bytes
 * themselves need no lock. Does not grow and does not free single reservations. */
#include "host/arena.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/device.h"
#include "device/pinning.h"
#include "host/common.h"

enum { WINDOW_BYTES = 256 << 20, WRITE_SLICE = 4 << 20, MAX_WRITERS = 8, MAX_REGISTRARS = 4 };
enum { SLAB_ROOM = 128 << 20 };
enum { MAX_SWITCHES = 64 }; /* from pageable windows back to pinned ones, where a small reservation still fits */

#define CAPACITY_MOST (UINT64_C(1) << 57) /* no processor addresses more; windows stay countable */

typedef enum window_state {
    WINDOW_OPEN,
    WINDOW_QUEUED,
    WINDOW_BUSY,
    WINDOW_PINNED,
    WINDOW_PAGEABLE,
    WINDOW_GONE /* without memory: no owner and no range is left */
} window_state;

typedef struct window {
    uint64_t begin, end; /* offsets; end moves while open */
    window_state state;
    bool pageable; /* it will not be registered */
    sth_devptr alias;
    uint64_t ranges; /* that are held in it */
} window;

struct sth_arena {
    sth_device *device;
    sthi_common *common; /* NULL: the pages are this process's own */
    uint8_t *base, *view; /* view: the same as base, but in common */
    uint64_t mapped, used, reserved, pinned, found;
    uint64_t pin_left; /* of closed windows; the open one takes its pages when it closes */
    uint32_t switches;
    atomic_uint_fast64_t refs; /* owners and ranges */
    uint64_t owners;
    unsigned fork_depth; /* of the process that made it: in a child no lock may be taken */
    sthi_mutex lock;
    sthi_cond changed;
    window *windows;
    uint32_t window_count, window_cap;
    bool finished;
    window *refused; /* by the device, though it may be pinned; NULL: none */
    int registrar_count;
    sthi_thread registrars[MAX_REGISTRARS];
    char pin_error[256];
};

static void register_window(sth_arena *a, window *w) {
    /* Called without the lock: a busy window belongs to the registrar that took it. */
    uint64_t page = sthi_page_size(), end = 0;
    STHI_INVARIANT(w->state == WINDOW_BUSY && w->begin % page == 0 && w->begin < w->end);
    sthi_round_up(w->end, page, &end);
    sth_devptr alias = 0;
    uint64_t bytes = end - w->begin;
    bool may = sthi_may_pin(bytes);
    bool pinned = may && sthi_pin(a->device, a->base + w->begin, bytes, &alias) == STH_OK;
    sthi_lock(&a->lock);
    if (may && !pinned) a->refused = w;
    w->alias = alias;
    w->state = pinned ? WINDOW_PINNED : WINDOW_PAGEABLE;
    if (pinned) a->pinned += w->end - w->begin;
    else if (!a->pin_error[0]) strncpy(a->pin_error, sthi_error_last()->message, sizeof a->pin_error - 1);
    sthi_cond_broadcast(&a->changed);
    sthi_unlock(&a->lock);
}

static window *next_queued(sth_arena *a) {
    for (uint32_t i = 0; i < a->window_count; i++)
        if (a->windows[i].state == WINDOW_QUEUED) return &a->windows[i];
    return NULL;
}

static void *registrar_main(void *arg) {
    sth_arena *a = arg;
    sthi_lock(&a->lock);
    for (;;) {
        window *w = next_queued(a);
        if (w) {
            w->state = WINDOW_BUSY;
            sthi_unlock(&a->lock);
            register_window(a, w);
            sthi_lock(&a->lock);
        } else if (a->finished) {
            break;
        } else {
            sthi_cond_wait(&a->changed, &a->lock);
        }
    }
    sthi_unlock(&a->lock);
    return NULL;
}

sth_status sthi_arena_create(sth_device *device, uint64_t capacity, sth_arena **out) {
    return sthi_arena_create_bounded(device, capacity, UINT64_MAX, out);
}

static bool map_pages(sth_arena *a, uint64_t bytes, uint32_t in_common) {
    if (in_common) {
        a->common = sthi_common_create(bytes, in_common);
        a->base = a->common ? sthi_common_image(a->common) : NULL;
        a->view = a->common ? sthi_common_view(a->common) : NULL;
    } else {
        a->base = a->view = sthi_pages_map(bytes, 1);
    }
    return a->base != NULL;
}

static void unmap_pages(sth_arena *a) {
    if (a->common) sthi_common_destroy(a->common);
    else sthi_pages_unmap(a->base, a->mapped);
}

/* in_common: the reservations that others may hold, too; 0: none. */
static sth_status create(sth_device *device, uint64_t capacity, uint64_t pinned, uint32_t in_common, sth_arena **out) {
    uint64_t page = sthi_page_size(), windows = capacity / WINDOW_BYTES + 2 + MAX_SWITCHES, bytes = 0;
    if (capacity > CAPACITY_MOST || !sthi_add_u64(capacity, (windows * 2 + in_common) * page, &bytes) ||
        !sthi_round_up(bytes, page, &bytes))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "arena", "an arena of %llu bytes is too large",
                         (unsigned long long)capacity);
    sth_arena *a = sthi_zalloc(1, sizeof *a);
    if (!a) return sthi_no_memory("arena", "an arena's record");
    /* A reservation longer than a window opens one of its own, so twice the count is enough. */
    a->window_cap = (uint32_t)(2 * windows + 2);
    a->mapped = bytes;
    bool mapped = map_pages(a, bytes, in_common); /* first: it refuses sizes whose windows would be many, too */
    a->windows = mapped ? sthi_zalloc(a->window_cap, sizeof *a->windows) : NULL;
    if (!a->windows) {
        unmap_pages(a);
        sthi_free(a);
        if (in_common && !mapped)
            return sthi_fail(STH_UNSUPPORTED, NULL, 0, "arena", "this system has no memory for processes to share");
        return sthi_no_memory("arena", "%llu bytes of weights", (unsigned long long)bytes);
    }
    sthi_device_retain(device);
    a->device = device;
    a->pin_left = pinned;
    atomic_init(&a->refs, 1);
    a->owners = 1;
    a->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&a->lock);
    sthi_cond_init(&a->changed);
    if (!(device->capabilities & STH_CAP_PINNED_HOST))
        strncpy(a->pin_error, "the device does not pin host memory", sizeof a->pin_error - 1);
    *out = a;
    return STH_OK;
}

sth_status sthi_arena_create_bounded(sth_device *device, uint64_t capacity, uint64_t pinned, sth_arena **out) {
    return create(device, capacity, pinned, 0, out);
}

sth_status sthi_arena_create_common(sth_device *device, uint64_t capacity, uint64_t pinned, uint32_t most,
                                    sth_arena **out) {
    if (!most) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "most", "an arena in common of no reservations");
    return create(device, capacity, pinned, most, out);
}

sth_status sthi_arena_create_pageable(sth_device *device, uint64_t capacity, sth_arena **out) {
    STHI_TRY(sthi_arena_create(device, capacity, out));
    snprintf((*out)->pin_error, sizeof (*out)->pin_error, "it was made pageable");
    return STH_OK;
}

bool sthi_arena_is_here(const sth_arena *a) { return a && !sthi_is_child(a->fork_depth); }

static void stop_registrars(sth_arena *a) {
    sthi_lock(&a->lock);
    a->finished = true;
    sthi_cond_broadcast(&a->changed);
    int running = a->registrar_count;
    a->registrar_count = 0;
    sthi_unlock(&a->lock);
    for (int i = 0; i < running; i++) sthi_thread_join(a->registrars[i]);
}

static void destroy(sth_arena *a) {
    unmap_pages(a);
    sthi_cond_fini(&a->changed);
    sthi_mutex_fini(&a->lock);
    sthi_device_release(a->device);
    sthi_free(a->windows);
    sthi_free(a);
}

static void drop_reference(sth_arena *a) {
    if (atomic_fetch_sub(&a->refs, 1) == 1) destroy(a);
}

/* Gives a window's memory back if nobody holds it. The caller holds a reference. */
static void empty_window(sth_arena *a, window *w) {
    sthi_lock(&a->lock);
    bool unused = !a->owners && !w->ranges && w->state != WINDOW_GONE;
    bool pinned = w->state == WINDOW_PINNED;
    STHI_INVARIANT(!unused || (w->state != WINDOW_QUEUED && w->state != WINDOW_BUSY));
    if (unused) w->state = WINDOW_GONE; /* from here on it is this thread's */
    sthi_unlock(&a->lock);
    if (!unused) return;
    uint64_t end = 0;
    sthi_round_up(w->end, sthi_page_size(), &end);
    if (pinned) sthi_unpin(a->device, a->base + w->begin, end - w->begin);
    if (a->common) sthi_common_drop(a->common, w->begin, w->end);
    sthi_pages_discard(a->base + w->begin, end - w->begin);
    if (a->common) sthi_pages_discard(a->view + w->begin, end - w->begin);
}

void sthi_arena_retain(sth_arena *a) {
    if (!sthi_arena_is_here(a)) return;
    sthi_lock(&a->lock);
    STHI_INVARIANT(a->owners);
    a->owners++;
    sthi_unlock(&a->lock);
    atomic_fetch_add(&a->refs, 1);
}

void sthi_arena_release(sth_arena *a) {
    if (!sthi_arena_is_here(a)) return;
    sthi_lock(&a->lock);
    bool last = a->owners == 1; /* then no other thread has a right to retain it */
    if (!last) a->owners--;
    sthi_unlock(&a->lock);
    if (last) {
        stop_registrars(a);
        sthi_lock(&a->lock);
        a->owners = 0;
        sthi_unlock(&a->lock);
        for (uint32_t i = 0; i < a->window_count; i++) empty_window(a, &a->windows[i]);
    }
    drop_reference(a);
}

/* Where an address lies, in the image or in the view of it; UINT64_MAX: in neither. */
static uint64_t offset_of(const sth_arena *a, const void *address) {
    uint64_t at = (uintptr_t)address - (uintptr_t)a->view;
    if (at >= a->mapped) at = (uintptr_t)address - (uintptr_t)a->base;
    return at < a->mapped ? at : UINT64_MAX;
}

/* The window of an address that was reserved. */
static window *window_at(sth_arena *a, const void *address) {
    uint64_t at = offset_of(a, address);
    uint32_t i = a->window_count;
    STHI_INVARIANT(at < a->mapped && i);
    while (--i && a->windows[i].begin > at) continue;
    return &a->windows[i];
}

void sthi_arena_retain_range(sth_arena *a, const void *address) {
    if (!sthi_arena_is_here(a)) return;
    sthi_lock(&a->lock);
    STHI_INVARIANT(a->owners);
    window_at(a, address)->ranges++;
    sthi_unlock(&a->lock);
    atomic_fetch_add(&a->refs, 1);
}

void sthi_arena_release_range(sth_arena *a, const void *address) {
    if (!sthi_arena_is_here(a)) return;
    sthi_lock(&a->lock);
    window *w = window_at(a, address);
    STHI_INVARIANT(w->ranges);
    w->ranges--;
    sthi_unlock(&a->lock);
    empty_window(a, w);
    drop_reference(a);
}

/* Lock held. One more registrar for one more window; pinning runs in the kernel and gains from cores. */
static bool add_registrar(sth_arena *a) {
    int most = sthi_cpu_count() / 2 < MAX_REGISTRARS ? sthi_cpu_count() / 2 : MAX_REGISTRARS;
    if (a->registrar_count && a->registrar_count >= most) return true;
    STHI_INVARIANT(!a->finished && a->registrar_count < MAX_REGISTRARS);
    if (sthi_thread_start(&a->registrars[a->registrar_count], "sth-register", registrar_main, a) == STH_OK)
        a->registrar_count++;
    return a->registrar_count > 0;
}

/* Bytes of the pages under the first `bytes` of a window. */
static uint64_t pages_of(uint64_t bytes) {
    uint64_t span = UINT64_MAX;
    return sthi_round_up(bytes, sthi_page_size(), &span) ? span : UINT64_MAX;
}

/* Lock held. Hands the open window over to the registrars, or leaves it pageable. */
static void close_window(sth_arena *a) {
    if (!a->window_count) return;
    window *w = &a->windows[a->window_count - 1];
    if (w->state != WINDOW_OPEN || w->end == w->begin) return;
    STHI_INVARIANT(w->pageable || pages_of(w->end - w->begin) <= a->pin_left);
    w->state = a->pin_error[0] || w->pageable ? WINDOW_PAGEABLE : WINDOW_QUEUED;
    if (!w->pageable) a->pin_left -= pages_of(w->end - w->begin);
    if (w->state == WINDOW_QUEUED && !add_registrar(a)) {
        w->state = WINDOW_PAGEABLE;
        strncpy(a->pin_error, sthi_error_last()->message, sizeof a->pin_error - 1);
    }
    sthi_cond_broadcast(&a->changed);
}

/* Lock held. Whether `need` more bytes go into the open window: they fit into it, and are pinned or not as it is. */
static bool goes_on(const sth_arena *a, const window *w, uint64_t need) {
    uint64_t held = w->end - w->begin;
    if (w->state != WINDOW_OPEN || (held && held + need > WINDOW_BYTES)) return false;
    if (!w->pageable) return pages_of(held + need) <= a->pin_left;
    return pages_of(need) > a->pin_left || a->switches == MAX_SWITCHES;
}

/* Lock held. A new window in place of the open one. */
static window *open_window(sth_arena *a, uint64_t begin, uint64_t need) {
    bool was_pageable = a->window_count && a->windows[a->window_count - 1].pageable;
    close_window(a);
    STHI_INVARIANT(a->window_count < a->window_cap && begin >= a->used && begin % sthi_page_size() == 0);
    window *w = &a->windows[a->window_count++];
    *w = (window){.begin = begin, .end = begin, .state = WINDOW_OPEN, .pageable = pages_of(need) > a->pin_left};
    a->switches += was_pageable && !w->pageable;
    return w;
}

static sth_status reserve(sth_arena *a, uint64_t bytes, void **out) {
    uint64_t need = 0, page = sthi_page_size();
    if (!sthi_round_up(bytes, a->common ? page : STHI_ALIGN, &need))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "arena", "a reservation of %llu bytes is too large",
                         (unsigned long long)bytes);
    sthi_lock(&a->lock);
    if (a->finished) {
        sthi_unlock(&a->lock);
        return sthi_fail(STH_INVALID_STATE, NULL, 0, "arena", "a reservation after the arena was finished");
    }
    window *w = a->window_count ? &a->windows[a->window_count - 1] : NULL;
    bool fresh = !w || !goes_on(a, w, need);
    uint64_t begin = a->used;
    if (fresh) sthi_round_up(begin, page, &begin);
    if (!sthi_range_inside(begin, need, a->mapped) || (fresh && a->window_count == a->window_cap)) {
        sthi_unlock(&a->lock);
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, "arena",
                         "the arena is full: %llu bytes asked, %llu of %llu used", (unsigned long long)bytes,
                         (unsigned long long)a->used, (unsigned long long)a->mapped);
    }
    if (fresh) w = open_window(a, begin, need);
    w->end = a->used = begin + need;
    a->reserved += need;
    sthi_unlock(&a->lock);
    *out = a->view + begin;
    return STH_OK;
}

sth_status sthi_arena_reserve(sth_arena *a, uint64_t bytes, void **out) {
    if (a->common)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, "arena", "what an arena in common takes is placed with its bytes");
    return reserve(a, bytes, out);
}

typedef struct write_job {
    uint8_t *dst;
    const uint8_t *src;
    uint64_t bytes;
    atomic_uint_fast64_t next;
} write_job;

static void *write_slices(void *arg) {
    write_job *job = arg;
    for (;;) {
        uint64_t at = atomic_fetch_add(&job->next, WRITE_SLICE);
        if (at >= job->bytes) return NULL;
        memcpy(job->dst + at, job->src + at, sthi_min_u64(WRITE_SLICE, job->bytes - at));
    }
}

static void write_bytes(uint8_t *dst, const void *src, uint64_t bytes) {
    write_job job = {.dst = dst, .src = src, .bytes = bytes};
    atomic_init(&job.next, 0);
    sthi_thread helpers[MAX_WRITERS];
    int wanted = (int)sthi_min_u64(bytes / (2 * WRITE_SLICE), (uint64_t)sthi_cpu_count() - 1), started = 0;
    if (wanted > MAX_WRITERS) wanted = MAX_WRITERS;
    /* A helper that cannot start is only a slower copy: the caller's own thread does the rest. */
    while (started < wanted &&
           sthi_thread_start(&helpers[started], "sth-fill", write_slices, &job) == STH_OK)
        started++;
    write_slices(&job);
    for (int i = 0; i < started; i++) sthi_thread_join(helpers[i]);
}

sth_status sthi_arena_write(sth_arena *a, void *dst, const void *src, uint64_t bytes) {
    if (!sthi_range_inside(offset_of(a, dst), bytes, a->used))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "arena", "write outside the reserved part");
    if (a->common)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, "arena", "devices of other processes may read what is in common");
    write_bytes(dst, src, bytes);
    return STH_OK;
}

static sth_status check_parts(const sth_arena *a, uint64_t bytes, const sth_arena_part *parts, uint32_t count) {
    if (!a->common || !sthi_common_left(a->common))
        return sthi_fail(STH_INVALID_STATE, NULL, 0, "arena", "an arena that has no room in common for one more");
    for (uint32_t i = 0; i < count; i++)
        if (!sthi_range_inside(parts[i].offset, parts[i].bytes, bytes))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "parts", "a part lies outside its %llu bytes",
                             (unsigned long long)bytes);
    return STH_OK;
}

/* Copies the parts to where they go. *out_print is of what lies there then: the sources may be written meanwhile, and
 * others take the weights by it. */
static sth_status write_parts(uint8_t *to, uint64_t bytes, const sth_arena_part *parts, uint32_t count,
                              uint64_t out_print[2]) {
    sth_arena_part *written = sthi_alloc((count + 1) * sizeof *written);
    if (!written) return sthi_no_memory("arena", "the places of %u weights", count);
    for (uint32_t i = 0; i < count; i++) {
        write_bytes(to + parts[i].offset, parts[i].source, parts[i].bytes);
        written[i] = (sth_arena_part){parts[i].offset, to + parts[i].offset, parts[i].bytes};
    }
    sth_status rc = sthi_common_print(written, count, bytes, out_print);
    sthi_free(written);
    return rc;
}

sth_status sthi_arena_place(sth_arena *a, uint64_t bytes, const sth_arena_part *parts, uint32_t count,
                            const uint64_t print[2], void **out) {
    uint64_t sum[2] = {0, 0};
    void *address = NULL;
    bool found = false;
    STHI_TRY(check_parts(a, bytes, parts, count));
    if (print) memcpy(sum, print, sizeof sum);
    else STHI_TRY(sthi_common_print(parts, count, bytes, sum));
    STHI_TRY(reserve(a, bytes, &address));
    uint64_t at = offset_of(a, address);
    sthi_common_begin(a->common);
    STHI_TRY(sthi_common_find(a->common, sum, at, pages_of(bytes), &found));
    if (!found) {
        STHI_TRY(write_parts(a->base + at, bytes, parts, count, sum));
        sthi_common_publish(a->common, sum);
    }
    sthi_lock(&a->lock);
    if (found) a->found += pages_of(bytes);
    sthi_unlock(&a->lock);
    *out = address;
    return STH_OK;
}

void sthi_arena_leave(sth_arena *a, const void *address, uint64_t bytes) {
    uint64_t at = offset_of(a, address);
    if (!a->common || !sthi_range_inside(at, bytes, a->used)) return;
    sthi_common_drop(a->common, at, at + bytes);
    sthi_pages_discard(a->view + at, pages_of(bytes));
}

void sthi_arena_pin_rest(sth_arena *a) {
    sthi_lock(&a->lock);
    close_window(a);
    sthi_unlock(&a->lock);
}

/* Whether slabs can still be pinned, tried with memory that was refused. */
static bool has_room_for_slabs(const sth_arena *a, const window *refused) {
    sth_devptr alias;
    uint8_t *p = a->base + refused->begin;
    uint64_t bytes = sthi_min_u64(pages_of(refused->end - refused->begin), SLAB_ROOM);
    if (sthi_pin(a->device, p, bytes, &alias) != STH_OK) return false;
    sthi_unpin(a->device, p, bytes);
    return true;
}

/* The registrars have ended, and nobody has asked yet which windows are pinned. */
static void leave_room_for_slabs(sth_arena *a) {
    window *refused = a->refused, *last = NULL;
    a->refused = NULL;
    if (!refused || has_room_for_slabs(a, refused)) return;
    sthi_lock(&a->lock);
    for (uint32_t i = 0; i < a->window_count; i++)
        if (a->windows[i].state == WINDOW_PINNED) last = &a->windows[i];
    if (last) {
        last->state = WINDOW_PAGEABLE;
        last->alias = 0;
        a->pinned -= last->end - last->begin;
    }
    sthi_unlock(&a->lock);
    if (last) sthi_unpin(a->device, a->base + last->begin, pages_of(last->end - last->begin));
}

sth_status sthi_arena_finish(sth_arena *a) {
    sthi_lock(&a->lock);
    close_window(a);
    sthi_unlock(&a->lock);
    if (a->common) sthi_common_end(a->common);
    stop_registrars(a); /* they empty the queue before they stop */
    leave_room_for_slabs(a);
    return STH_OK;
}

static sthi_mutex *lock_of(const sth_arena *a) { return (sthi_mutex *)&a->lock; }

uint64_t sthi_arena_bytes(const sth_arena *a) {
    sthi_lock(lock_of(a));
    uint64_t n = a->reserved;
    sthi_unlock(lock_of(a));
    return n;
}

uint64_t sthi_arena_pinned_bytes(const sth_arena *a) {
    sthi_lock(lock_of(a));
    uint64_t n = a->pinned;
    sthi_unlock(lock_of(a));
    return n;
}

const char *sthi_arena_pin_error(const sth_arena *a) {
    sthi_lock(lock_of(a));
    bool failed = a->pin_error[0] != 0;
    sthi_unlock(lock_of(a));
    return failed ? a->pin_error : ""; /* once written it stays */
}

/* A copy of the window that holds [host, host+bytes). */
static bool window_of(const sth_arena *a, const void *host, uint64_t bytes, window *out) {
    uint64_t at = offset_of(a, host);
    bool found = false;
    sthi_lock(lock_of(a));
    for (uint32_t i = 0; i < a->window_count && !found; i++) {
        *out = a->windows[i];
        found = at >= out->begin && sthi_range_inside(at - out->begin, bytes, out->end - out->begin);
    }
    sthi_unlock(lock_of(a));
    return found;
}

bool sthi_arena_is_pinned(const sth_arena *a, const void *host, uint64_t bytes) {
    window w;
    return window_of(a, host, bytes, &w) && w.state == WINDOW_PINNED;
}

sth_devptr sthi_arena_device_alias(const sth_arena *a, const void *host) {
    window w;
    if (!window_of(a, host, 1, &w) || w.state != WINDOW_PINNED || !w.alias) return 0;
    return w.alias + (offset_of(a, host) - w.begin);
}

const void *sthi_arena_image(const sth_arena *a, const void *address) {
    uint64_t at = offset_of(a, address);
    return at < a->mapped ? a->base + at : NULL;
}

uint64_t sthi_arena_found_bytes(const sth_arena *a) {
    sthi_lock(lock_of(a));
    uint64_t n = a->found;
    sthi_unlock(lock_of(a));
    return n;
}
