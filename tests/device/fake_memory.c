/* The stand-in's memory: plain allocations, mappings of handles (memory files), registered host memory. The bytes of
 * device memory have numbers of their own, so that two mappings of one handle are seen to be the same. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "fake_parts.h"

static table plain, reserved, mapped, pinned, handles;
static size_t capacity, pin_limit, used;
static uint64_t next_bytes = FAKE_PAGE_UNIT;

static char *host_address(uint64_t p) { return (char *)(uintptr_t)p; }
static uint64_t device_address(const void *p) { return (uint64_t)(uintptr_t)p; }

void fake_memory_init(size_t of_capacity, size_t of_pins) {
    capacity = of_capacity;
    pin_limit = of_pins;
}

static bool inside(const span *s, const char *p, size_t bytes) {
    return p >= s->p && p <= s->p + s->bytes && bytes <= (size_t)(s->p + s->bytes - p);
}

bool fake_is_live(const char *p, size_t bytes) {
    uint64_t found = 0;
    for (size_t i = 0; i < plain.count; i++)
        if (inside(&plain.items[i], p, bytes)) return true;
    while (bytes) { /* it may run over several mappings in a row */
        found = 0;
        for (size_t i = 0; i < mapped.count && !found; i++) {
            const span *s = &mapped.items[i];
            if (s->readable && p >= s->p && p < s->p + s->bytes) found = (uint64_t)(s->p + s->bytes - p);
        }
        if (!found) return false;
        found = found < bytes ? found : bytes;
        p += found;
        bytes -= found;
    }
    return true;
}

bool fake_is_pinned(const char *p, size_t bytes) {
    for (size_t i = 0; i < pinned.count; i++)
        if (inside(&pinned.items[i], p, bytes)) return true;
    return false;
}

static void visit_part(const span *s, const char *p, size_t bytes, void (*visit)(uint64_t, uint64_t, void *),
                       void *context) {
    const char *from = p > s->p ? p : s->p, *to = p + bytes < s->p + s->bytes ? p + bytes : s->p + s->bytes;
    if (from < to) visit(s->bytes_at + (uint64_t)(from - s->p), (uint64_t)(to - from), context);
}

void fake_each_run(const char *p, size_t bytes, void (*visit)(uint64_t, uint64_t, void *), void *context) {
    for (size_t i = 0; i < plain.count; i++) visit_part(&plain.items[i], p, bytes, visit, context);
    for (size_t i = 0; i < mapped.count; i++) visit_part(&mapped.items[i], p, bytes, visit, context);
}

static uint64_t new_bytes(size_t n) {
    uint64_t at = next_bytes;
    next_bytes += n + FAKE_PAGE_UNIT;
    return at;
}

fake_code fake_memory_info(size_t *out_free, size_t *out_total) {
    *out_free = capacity - used;
    *out_total = capacity;
    return FAKE_OK;
}

fake_code fake_alloc(uint64_t *out, size_t bytes) {
    if (bytes == 0) return FAKE_INVALID_VALUE;
    if (bytes > capacity - used) return FAKE_OUT_OF_MEMORY;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || !fake_add(&plain, (span){.p = p, .bytes = bytes, .bytes_at = new_bytes(bytes)}))
        return FAKE_OUT_OF_MEMORY;
    used += bytes;
    *out = device_address(p);
    return FAKE_OK;
}

/* Like a driver, waits for what is enqueued. */
fake_code fake_free(uint64_t address) {
    if (!fake_find(&plain, host_address(address))) return FAKE_INVALID_VALUE;
    fake_wait_for_all(); /* which lets the lock go */
    span *s = fake_find(&plain, host_address(address));
    if (!s) return FAKE_INVALID_VALUE;
    fake_order_gone((fake_touch){.p = s->p, .bytes = s->bytes, .device = true}, true, "device memory");
    used -= s->bytes;
    munmap(s->p, s->bytes);
    fake_drop(&plain, s);
    return FAKE_OK;
}

/* ---- host memory */

fake_code fake_register(void *address, size_t bytes) {
    char *p = address;
    size_t sum = 0;
    if (!p || !bytes) return FAKE_INVALID_VALUE;
    for (size_t i = 0; i < pinned.count; i++) {
        const span *s = &pinned.items[i];
        if (p < s->p + s->bytes && s->p < p + bytes) return FAKE_HOST_REGISTERED;
        sum += s->bytes;
    }
    if (bytes > pin_limit - sum) return fake_refusal();
    return fake_add(&pinned, (span){.p = p, .bytes = bytes}) ? FAKE_OK : FAKE_OUT_OF_MEMORY;
}

fake_code fake_unregister(void *p) {
    span *s = fake_find(&pinned, p);
    if (!s) return FAKE_HOST_NOT_REGISTERED;
    fake_order_gone((fake_touch){.p = s->p, .bytes = s->bytes}, false, "registered host memory");
    fake_drop(&pinned, s);
    return FAKE_OK;
}

fake_code fake_host_pointer(uint64_t *out, void *p) {
    if (!fake_find(&pinned, p)) return FAKE_INVALID_VALUE;
    *out = device_address(p);
    return FAKE_OK;
}

/* ---- virtual memory */

fake_code fake_reserve(uint64_t *out, size_t bytes) {
    if (bytes == 0 || bytes % FAKE_PAGE_UNIT) return FAKE_INVALID_VALUE;
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || !fake_add(&reserved, (span){.p = p, .bytes = bytes})) return FAKE_OUT_OF_MEMORY;
    *out = device_address(p);
    return FAKE_OK;
}

static bool any_mapped(const span *where) {
    for (size_t i = 0; i < mapped.count; i++)
        if (inside(where, mapped.items[i].p, mapped.items[i].bytes)) return true;
    return false;
}

fake_code fake_unreserve(uint64_t address, size_t bytes) {
    span *s = fake_find(&reserved, host_address(address));
    if (!s || s->bytes != bytes || any_mapped(s)) return FAKE_INVALID_VALUE;
    munmap(s->p, s->bytes);
    fake_drop(&reserved, s);
    return FAKE_OK;
}

/* Handles are file descriptors; the memory lives on in its mappings when the handle is released. */
static span *handle_at(uint64_t handle) {
    for (size_t i = 0; i < handles.count; i++)
        if ((uint64_t)handles.items[i].fd == handle) return &handles.items[i];
    return NULL;
}

fake_code fake_create(uint64_t *out, size_t bytes) {
    if (bytes == 0 || bytes % FAKE_PAGE_UNIT) return FAKE_INVALID_VALUE;
    if (bytes > capacity - used) return FAKE_OUT_OF_MEMORY;
    int fd = memfd_create("fake-driver", MFD_CLOEXEC);
    if (fd < 0) return FAKE_OUT_OF_MEMORY;
    if (ftruncate(fd, (off_t)bytes) ||
        !fake_add(&handles, (span){.bytes = bytes, .fd = fd, .bytes_at = new_bytes(bytes)})) {
        close(fd);
        return FAKE_OUT_OF_MEMORY;
    }
    *out = (uint64_t)fd;
    return FAKE_OK;
}

fake_code fake_release_handle(uint64_t handle) {
    span *s = handle_at(handle);
    if (!s) return FAKE_INVALID_VALUE;
    close(s->fd);
    fake_drop(&handles, s);
    return FAKE_OK;
}

fake_code fake_map(uint64_t address, size_t bytes, uint64_t handle) {
    const span *h = handle_at(handle);
    char *p = host_address(address);
    bool room = false;
    for (size_t i = 0; i < reserved.count; i++) room |= inside(&reserved.items[i], p, bytes);
    if (!h || !room || bytes != h->bytes || fake_find(&mapped, p)) return FAKE_INVALID_VALUE;
    if (mmap(p, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd, 0) == MAP_FAILED) return FAKE_OUT_OF_MEMORY;
    return fake_add(&mapped, (span){.p = p, .bytes = bytes, .bytes_at = h->bytes_at}) ? FAKE_OK : FAKE_OUT_OF_MEMORY;
}

/* Does not wait for work on the memory. */
fake_code fake_unmap(uint64_t address, size_t bytes) {
    span *s = fake_find(&mapped, host_address(address));
    if (!s || s->bytes != bytes) return FAKE_INVALID_VALUE;
    if (s->readable)
        fake_order_gone((fake_touch){.p = s->p, .bytes = s->bytes, .device = true}, false, "mapped memory");
    (void)mmap(s->p, s->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    fake_drop(&mapped, s);
    return FAKE_OK;
}

fake_code fake_access(uint64_t address, size_t bytes) {
    char *p = host_address(address);
    size_t done = 0;
    while (done < bytes) {
        span *s = fake_find(&mapped, p + done);
        if (!s || mprotect(s->p, s->bytes, PROT_READ | PROT_WRITE)) return FAKE_INVALID_VALUE;
        s->readable = true;
        done += s->bytes;
    }
    return done == bytes ? FAKE_OK : FAKE_INVALID_VALUE;
}

long fake_memory_live(void) {
    return (long)(plain.count + reserved.count + mapped.count + pinned.count + handles.count);
}

void fake_memory_reset(void) {
    for (; plain.count; plain.count--) munmap(plain.items[plain.count - 1].p, plain.items[plain.count - 1].bytes);
    for (; reserved.count; reserved.count--)
        munmap(reserved.items[reserved.count - 1].p, reserved.items[reserved.count - 1].bytes);
    for (; handles.count; handles.count--) close(handles.items[handles.count - 1].fd);
    mapped.count = pinned.count = 0;
    used = 0;
}
