/* A stand-in for the CUDA driver library, for testing the CUDA back end without a GPU.
 *
 * It implements the functions that src/device/cuda/driver.h declares, on host memory; work is done when it
 * is enqueued. It is stricter than the driver where a mistake of ours would go unseen: a call without a
 * current context, an address outside live memory, unexpected flags are errors. One lock guards all of it.
 * It says nothing about speed or about work that is still under way; the simulated device is for that.
 *
 * Read at each cuInit: FAKE_CUDA_DEVICES (default 1), FAKE_CUDA_MEMORY and FAKE_CUDA_PIN_LIMIT (bytes).
 * The tests steer it through the fake_cuda_ functions in fake_cuda.h. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device/cuda/driver.h"
#include "kernels_on_cpu.h"

#define EXPORT __attribute__((visibility("default")))
enum { TABLE = 1024, PAGE_UNIT = 2 << 20 };

struct cu_context_opaque {
    int unused;
};
struct cu_stream_opaque {
    int unused;
};
struct cu_event_opaque {
    bool timing, recorded;
    struct timespec when;
};

typedef struct span {
    char *p;
    size_t bytes;
    int fd;        /* handle: the memory; mapping: unused */
    bool readable; /* mapping: access was set */
} span;

typedef struct table {
    span items[TABLE];
    size_t count;
} table;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cu_context_opaque primary, foreign;
static _Thread_local cu_context current;
static table plain, reserved, mapped, pinned, handles, streams, events;
static int retained, devices, modules;
static size_t capacity, pin_limit, used;
static bool shut_down;
static long calls, fail_at;
static int fail_with;

static span *table_at(table *t, const void *p) {
    for (size_t i = 0; i < t->count; i++)
        if (t->items[i].p == p) return &t->items[i];
    return NULL;
}

static bool table_add(table *t, span s) {
    if (t->count == TABLE) return false;
    t->items[t->count++] = s;
    return true;
}

static void table_drop(table *t, span *s) { *s = t->items[--t->count]; }

static bool inside(const span *s, const char *p, size_t bytes) {
    return p >= s->p && p <= s->p + s->bytes && bytes <= (size_t)(s->p + s->bytes - p);
}

/* True when all bytes are live device memory; a range may run over several mappings in a row. */
static bool live(const char *p, size_t bytes) {
    for (size_t i = 0; i < plain.count; i++)
        if (inside(&plain.items[i], p, bytes)) return true;
    for (bool more = true; more && bytes;) {
        more = false;
        for (size_t i = 0; i < mapped.count && bytes; i++) {
            const span *s = &mapped.items[i];
            if (!s->readable || p < s->p || p >= s->p + s->bytes) continue;
            size_t part = (size_t)(s->p + s->bytes - p);
            part = part < bytes ? part : bytes;
            p += part;
            bytes -= part;
            more = true;
        }
    }
    return bytes == 0;
}

/* Each driver function runs between begin() or begin_in_context(), which take the lock, and end(). */
static cu_result begin(void) {
    pthread_mutex_lock(&lock);
    if (shut_down) return CU_ERROR_DEINITIALIZED;
    return ++calls == fail_at ? fail_with : CU_OK;
}

static cu_result begin_in_context(void) {
    cu_result r = begin();
    if (r != CU_OK) return r;
    return current == &primary && retained > 0 ? CU_OK : CU_ERROR_INVALID_CONTEXT;
}

static cu_result end(cu_result r) {
    pthread_mutex_unlock(&lock);
    return r;
}

static cu_result on_stream(cu_stream s) {
    cu_result r = begin_in_context();
    return r == CU_OK && s && !table_at(&streams, s) ? CU_ERROR_INVALID_HANDLE : r;
}

static char *host_address(cu_deviceptr p) { return (char *)(uintptr_t)p; }
static cu_deviceptr device_address(const void *p) { return (cu_deviceptr)(uintptr_t)p; }

/* ---- what tests steer */

EXPORT long fake_cuda_live(void) {
    static const table *const all[] = {&plain, &reserved, &mapped, &pinned, &handles, &streams, &events};
    pthread_mutex_lock(&lock);
    long n = retained;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) n += (long)all[i]->count;
    pthread_mutex_unlock(&lock);
    return n;
}

EXPORT void fake_cuda_fail(long nth, int with) {
    pthread_mutex_lock(&lock);
    calls = 0;
    fail_at = nth;
    fail_with = with;
    pthread_mutex_unlock(&lock);
}

EXPORT long fake_cuda_calls(void) {
    pthread_mutex_lock(&lock);
    long n = calls;
    pthread_mutex_unlock(&lock);
    return n;
}

EXPORT void fake_cuda_shut_down(int yes) {
    pthread_mutex_lock(&lock);
    shut_down = yes;
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_cuda_switch_context(void) { current = &foreign; }

EXPORT void fake_cuda_reset(void) {
    pthread_mutex_lock(&lock);
    for (; plain.count; plain.count--)
        munmap(plain.items[plain.count - 1].p, plain.items[plain.count - 1].bytes);
    for (; reserved.count; reserved.count--)
        munmap(reserved.items[reserved.count - 1].p, reserved.items[reserved.count - 1].bytes);
    for (; handles.count; handles.count--) close(handles.items[handles.count - 1].fd);
    for (; streams.count; streams.count--) free(streams.items[streams.count - 1].p);
    for (; events.count; events.count--) free(events.items[events.count - 1].p);
    mapped.count = pinned.count = 0;
    retained = 0;
    used = 0;
    pthread_mutex_unlock(&lock);
}

/* ---- start-up and devices */

static size_t setting(const char *name, size_t fallback) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : fallback;
}

EXPORT cu_result cuInit(unsigned flags) {
    cu_result r = begin();
    if (r == CU_OK) {
        devices = (int)setting("FAKE_CUDA_DEVICES", 1);
        capacity = setting("FAKE_CUDA_MEMORY", (size_t)1 << 30);
        pin_limit = setting("FAKE_CUDA_PIN_LIMIT", SIZE_MAX);
        if (devices == 0) r = CU_ERROR_NO_DEVICE;
        if (flags) r = CU_ERROR_INVALID_VALUE;
    }
    return end(r);
}

EXPORT cu_result cuDriverGetVersion(int *out) {
    cu_result r = begin();
    if (r == CU_OK) *out = 12040;
    return end(r);
}

static const struct {
    cu_result code;
    const char *name, *text;
} errors[] = {
    {CU_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CU_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CU_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CU_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CU_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CU_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
};

static cu_result describe(cu_result code, const char **name, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *(name ? name : text) = name ? errors[i].name : errors[i].text;
            return CU_OK;
        }
    return CU_ERROR_INVALID_VALUE;
}

EXPORT cu_result cuGetErrorName(cu_result code, const char **out) { return describe(code, out, NULL); }
EXPORT cu_result cuGetErrorString(cu_result code, const char **out) { return describe(code, NULL, out); }

EXPORT cu_result cuDeviceGetCount(int *out) {
    cu_result r = begin();
    if (r == CU_OK) *out = devices;
    return end(r);
}

EXPORT cu_result cuDeviceGet(cu_device *out, int ordinal) {
    cu_result r = begin();
    if (r == CU_OK && (ordinal < 0 || ordinal >= devices)) r = CU_ERROR_INVALID_DEVICE;
    if (r == CU_OK) *out = ordinal;
    return end(r);
}

EXPORT cu_result cuDeviceGetName(char *out, int room, cu_device device) {
    cu_result r = begin();
    if (r == CU_OK) snprintf(out, (size_t)room, "stand-in card %d", device);
    return end(r);
}

EXPORT cu_result cuDeviceGetAttribute(int *out, int attribute, cu_device device) {
    (void)device;
    cu_result r = begin();
    if (r == CU_OK)
        *out = attribute == CU_ATTRIBUTE_COMPUTE_MAJOR ? 9 : attribute == CU_ATTRIBUTE_CAN_MAP_HOST_MEMORY ||
               attribute == CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED ||
               attribute == CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    return end(r);
}

EXPORT cu_result cuDevicePrimaryCtxRetain(cu_context *out, cu_device device) {
    cu_result r = begin();
    if (r == CU_OK && device >= devices) r = CU_ERROR_INVALID_DEVICE;
    if (r == CU_OK) {
        retained++;
        *out = &primary;
    }
    return end(r);
}

EXPORT cu_result cuDevicePrimaryCtxRelease_v2(cu_device device) {
    (void)device;
    cu_result r = begin();
    if (r == CU_OK && retained == 0) r = CU_ERROR_INVALID_CONTEXT;
    if (r == CU_OK) retained--;
    return end(r);
}

EXPORT cu_result cuCtxGetCurrent(cu_context *out) {
    cu_result r = begin();
    if (r == CU_OK) *out = current;
    return end(r);
}

EXPORT cu_result cuCtxSetCurrent(cu_context context) {
    cu_result r = begin();
    if (r == CU_OK) current = context;
    return end(r);
}

EXPORT cu_result cuCtxSynchronize(void) { return end(begin_in_context()); }

/* ---- memory */

EXPORT cu_result cuMemGetInfo_v2(size_t *out_free, size_t *out_total) {
    cu_result r = begin_in_context();
    if (r == CU_OK) {
        *out_free = capacity - used;
        *out_total = capacity;
    }
    return end(r);
}

static cu_result take(cu_deviceptr *out, size_t bytes) {
    if (bytes == 0) return CU_ERROR_INVALID_VALUE;
    if (bytes > capacity - used) return CU_ERROR_OUT_OF_MEMORY;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || !table_add(&plain, (span){.p = p, .bytes = bytes})) return CU_ERROR_OUT_OF_MEMORY;
    used += bytes;
    *out = device_address(p);
    return CU_OK;
}

EXPORT cu_result cuMemAlloc_v2(cu_deviceptr *out, size_t bytes) {
    cu_result r = begin_in_context();
    return end(r == CU_OK ? take(out, bytes) : r);
}

EXPORT cu_result cuMemFree_v2(cu_deviceptr address) {
    cu_result r = begin_in_context();
    span *s = table_at(&plain, host_address(address));
    if (r == CU_OK && !s) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) {
        used -= s->bytes;
        munmap(s->p, s->bytes);
        table_drop(&plain, s);
    }
    return end(r);
}

static cu_result pin(char *p, size_t bytes, unsigned flags) {
    if (!p || !bytes || flags != (CU_HOST_REGISTER_PORTABLE | CU_HOST_REGISTER_DEVICEMAP))
        return CU_ERROR_INVALID_VALUE;
    size_t sum = 0;
    for (size_t i = 0; i < pinned.count; i++) {
        const span *s = &pinned.items[i];
        if (p < s->p + s->bytes && s->p < p + bytes) return CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        sum += s->bytes;
    }
    if (bytes > pin_limit - sum) return CU_ERROR_OUT_OF_MEMORY;
    return table_add(&pinned, (span){.p = p, .bytes = bytes}) ? CU_OK : CU_ERROR_OUT_OF_MEMORY;
}

EXPORT cu_result cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
    cu_result r = begin_in_context();
    return end(r == CU_OK ? pin(p, bytes, flags) : r);
}

EXPORT cu_result cuMemHostUnregister(void *p) {
    cu_result r = begin_in_context();
    span *s = table_at(&pinned, p);
    if (r == CU_OK && !s) r = CU_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (r == CU_OK) table_drop(&pinned, s);
    return end(r);
}

EXPORT cu_result cuMemHostGetDevicePointer_v2(cu_deviceptr *out, void *p, unsigned flags) {
    cu_result r = begin_in_context();
    if (r == CU_OK && (flags || !table_at(&pinned, p))) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) *out = device_address(p);
    return end(r);
}

EXPORT cu_result cuMemcpyHtoDAsync_v2(cu_deviceptr dst, const void *src, size_t bytes, cu_stream stream) {
    cu_result r = on_stream(stream);
    if (r == CU_OK && !live(host_address(dst), bytes)) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) memcpy(host_address(dst), src, bytes);
    return end(r);
}

EXPORT cu_result cuMemcpyDtoHAsync_v2(void *dst, cu_deviceptr src, size_t bytes, cu_stream stream) {
    cu_result r = on_stream(stream);
    if (r == CU_OK && !live(host_address(src), bytes)) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) memcpy(dst, host_address(src), bytes);
    return end(r);
}

EXPORT cu_result cuMemcpyDtoDAsync_v2(cu_deviceptr dst, cu_deviceptr src, size_t bytes, cu_stream stream) {
    cu_result r = on_stream(stream);
    if (r == CU_OK && !(live(host_address(src), bytes) && live(host_address(dst), bytes))) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) memcpy(host_address(dst), host_address(src), bytes);
    return end(r);
}

/* ---- kernels: made by the stand-in for the compiler (fake_nvrtc.c), known by their names */

EXPORT cu_result cuModuleLoadData(cu_module *out, const void *image) {
    cu_result r = begin_in_context();
    if (r == CU_OK && strcmp(image, "fake image")) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) *out = (cu_module)&modules;
    if (r == CU_OK) modules++;
    return end(r);
}

EXPORT cu_result cuModuleUnload(cu_module module) {
    cu_result r = begin_in_context();
    if (r == CU_OK && (module != (cu_module)&modules || !modules)) r = CU_ERROR_INVALID_HANDLE;
    if (r == CU_OK) modules--;
    return end(r);
}

static const char *const encodings[] = {"int8", "fp8", "int4"}, *const dtypes[] = {"f32", "bf16", "f16"};

EXPORT cu_result cuModuleGetFunction(cu_function *out, cu_module module, const char *name) {
    cu_result r = begin_in_context(), found = CU_ERROR_INVALID_VALUE;
    char want[40];
    for (int i = 0; r == CU_OK && module && i < 9; i++) {
        snprintf(want, sizeof want, "sthi_expand_%s_%s", encodings[i / 3], dtypes[i % 3]);
        if (strcmp(want, name)) continue;
        *out = (cu_function)(uintptr_t)(i + 1);
        found = CU_OK;
    }
    return end(r == CU_OK ? found : r);
}

/* Runs the kernel's text, where it could be compiled for the CPU. */
EXPORT cu_result cuLaunchKernel(cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                unsigned shared, cu_stream stream, void **p, void **extra) {
    cu_result r = on_stream(stream);
    bool flat = gy == 1 && gz == 1 && by == 1 && bz == 1 && !shared && !extra && gx && bx && bx <= 1024;
    int kernel = (int)(uintptr_t)f - 1;
    if (r == CU_OK && (!flat || kernel < 0 || kernel >= 9)) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) {
        char *at[4];
        for (int i = 0; i < 4; i++) {
            cu_deviceptr address = *(cu_deviceptr *)p[5 + i];
            at[i] = address ? host_address(address) : NULL;
            if (at[i] && !live(at[i], 1)) r = CU_ERROR_INVALID_VALUE;
        }
        if (r == CU_OK)
            kernel_on_cpu(kernel, gx, bx, *(unsigned *)p[0], *(unsigned *)p[1], *(unsigned *)p[2], *(unsigned *)p[3],
                          *(unsigned long long *)p[4], at[0], at[1], at[2], at[3]);
    }
    return end(r);
}

/* ---- virtual memory management */

static bool plain_memory(const cu_allocation_prop *p) {
    return p->type == CU_ALLOCATION_TYPE_PINNED && p->location.type == CU_LOCATION_TYPE_DEVICE &&
           p->requested_handle_types == 0 && !p->win32_metadata;
}

EXPORT cu_result cuMemGetAllocationGranularity(size_t *out, const cu_allocation_prop *p, int which) {
    cu_result r = begin();
    if (r == CU_OK && (!plain_memory(p) || which != CU_GRANULARITY_MINIMUM)) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) *out = PAGE_UNIT;
    return end(r);
}

static cu_result reserve(cu_deviceptr *out, size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || !table_add(&reserved, (span){.p = p, .bytes = bytes}))
        return CU_ERROR_OUT_OF_MEMORY;
    *out = device_address(p);
    return CU_OK;
}

EXPORT cu_result cuMemAddressReserve(cu_deviceptr *out, size_t bytes, size_t alignment, cu_deviceptr hint,
                                     unsigned long long flags) {
    cu_result r = begin_in_context();
    if (r == CU_OK && (bytes == 0 || bytes % PAGE_UNIT || alignment || hint || flags))
        r = CU_ERROR_INVALID_VALUE;
    return end(r == CU_OK ? reserve(out, bytes) : r);
}

static bool any_mapped(const span *where) {
    for (size_t i = 0; i < mapped.count; i++)
        if (inside(where, mapped.items[i].p, mapped.items[i].bytes)) return true;
    return false;
}

EXPORT cu_result cuMemAddressFree(cu_deviceptr address, size_t bytes) {
    cu_result r = begin_in_context();
    span *s = table_at(&reserved, host_address(address));
    if (r == CU_OK && (!s || s->bytes != bytes || any_mapped(s))) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) {
        munmap(s->p, s->bytes);
        table_drop(&reserved, s);
    }
    return end(r);
}

static cu_result create(cu_memory *out, size_t bytes) {
    if (bytes == 0 || bytes % PAGE_UNIT) return CU_ERROR_INVALID_VALUE;
    if (bytes > capacity - used) return CU_ERROR_OUT_OF_MEMORY;
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0) return CU_ERROR_OUT_OF_MEMORY;
    if (ftruncate(fd, (off_t)bytes) || !table_add(&handles, (span){.bytes = bytes, .fd = fd})) {
        close(fd);
        return CU_ERROR_OUT_OF_MEMORY;
    }
    *out = (cu_memory)fd;
    return CU_OK;
}

/* Handles are file descriptors; the memory lives on in its mappings when the handle is released. */
static span *handle_at(cu_memory memory) {
    for (size_t i = 0; i < handles.count; i++)
        if (handles.items[i].fd == (int)memory) return &handles.items[i];
    return NULL;
}

EXPORT cu_result cuMemCreate(cu_memory *out, size_t bytes, const cu_allocation_prop *p,
                             unsigned long long flags) {
    cu_result r = begin_in_context();
    if (r == CU_OK && (flags || !plain_memory(p))) r = CU_ERROR_INVALID_VALUE;
    return end(r == CU_OK ? create(out, bytes) : r);
}

EXPORT cu_result cuMemRelease(cu_memory memory) {
    cu_result r = begin_in_context();
    span *s = handle_at(memory);
    if (r == CU_OK && !s) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK || calls == fail_at) { /* then it reports the failure of some earlier work */
        close(s->fd);
        table_drop(&handles, s);
    }
    return end(r);
}

static cu_result map(char *p, size_t bytes, size_t offset, cu_memory memory) {
    const span *h = handle_at(memory);
    bool room = false;
    for (size_t i = 0; i < reserved.count; i++) room |= inside(&reserved.items[i], p, bytes);
    if (!h || !room || offset || bytes != h->bytes || table_at(&mapped, p)) return CU_ERROR_INVALID_VALUE;
    if (mmap(p, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd, 0) == MAP_FAILED)
        return CU_ERROR_OUT_OF_MEMORY;
    return table_add(&mapped, (span){.p = p, .bytes = bytes}) ? CU_OK : CU_ERROR_OUT_OF_MEMORY;
}

EXPORT cu_result cuMemMap(cu_deviceptr address, size_t bytes, size_t offset, cu_memory memory,
                          unsigned long long flags) {
    cu_result r = begin_in_context();
    if (r == CU_OK && flags) r = CU_ERROR_INVALID_VALUE;
    return end(r == CU_OK ? map(host_address(address), bytes, offset, memory) : r);
}

EXPORT cu_result cuMemUnmap(cu_deviceptr address, size_t bytes) {
    cu_result r = begin_in_context();
    span *s = table_at(&mapped, host_address(address));
    if (r == CU_OK && (!s || s->bytes != bytes)) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) {
        mmap(s->p, s->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        table_drop(&mapped, s);
    }
    return end(r);
}

static cu_result open_access(char *p, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
        span *s = table_at(&mapped, p + done);
        if (!s || mprotect(s->p, s->bytes, PROT_READ | PROT_WRITE)) return CU_ERROR_INVALID_VALUE;
        s->readable = true;
        done += s->bytes;
    }
    return done == bytes ? CU_OK : CU_ERROR_INVALID_VALUE;
}

EXPORT cu_result cuMemSetAccess(cu_deviceptr address, size_t bytes, const cu_access_desc *access,
                                size_t count) {
    cu_result r = begin_in_context();
    bool good = count == 1 && access->flags == CU_ACCESS_PROT_READWRITE &&
                access->location.type == CU_LOCATION_TYPE_DEVICE;
    if (r == CU_OK && !good) r = CU_ERROR_INVALID_VALUE;
    return end(r == CU_OK ? open_access(host_address(address), bytes) : r);
}

/* ---- streams and events */

static cu_result make(table *t, void **out, size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p || !table_add(t, (span){.p = p, .bytes = bytes})) return CU_ERROR_OUT_OF_MEMORY;
    *out = p;
    return CU_OK;
}

static cu_result drop(table *t, void *p) {
    span *s = table_at(t, p);
    if (!s) return CU_ERROR_INVALID_HANDLE;
    table_drop(t, s);
    free(p);
    return CU_OK;
}

EXPORT cu_result cuStreamCreateWithPriority(cu_stream *out, unsigned flags, int priority) {
    (void)priority;
    void *made = NULL;
    cu_result r = begin_in_context();
    if (r == CU_OK && flags != CU_STREAM_FLAG_NON_BLOCKING) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) r = make(&streams, &made, sizeof **out);
    if (r == CU_OK) *out = made;
    return end(r);
}

EXPORT cu_result cuStreamDestroy_v2(cu_stream s) {
    cu_result r = begin_in_context();
    return end(r == CU_OK ? drop(&streams, s) : r);
}

EXPORT cu_result cuStreamSynchronize(cu_stream s) { return end(on_stream(s)); }

/* Like the driver, says nothing about an event that was never recorded. */
EXPORT cu_result cuStreamWaitEvent(cu_stream s, cu_event e, unsigned flags) {
    cu_result r = on_stream(s);
    if (r == CU_OK && (flags || !table_at(&events, e))) r = CU_ERROR_INVALID_VALUE;
    return end(r);
}

EXPORT cu_result cuEventCreate(cu_event *out, unsigned flags) {
    void *made = NULL;
    cu_result r = begin_in_context();
    if (r == CU_OK && flags & ~(unsigned)CU_EVENT_FLAG_DISABLE_TIMING) r = CU_ERROR_INVALID_VALUE;
    if (r == CU_OK) r = make(&events, &made, sizeof **out);
    if (r == CU_OK) {
        *out = made;
        (*out)->timing = flags == 0;
    }
    return end(r);
}

EXPORT cu_result cuEventDestroy_v2(cu_event e) {
    cu_result r = begin_in_context();
    return end(r == CU_OK ? drop(&events, e) : r);
}

EXPORT cu_result cuEventRecord(cu_event e, cu_stream s) {
    cu_result r = on_stream(s);
    if (r == CU_OK && !table_at(&events, e)) r = CU_ERROR_INVALID_HANDLE;
    if (r == CU_OK) {
        e->recorded = true;
        clock_gettime(CLOCK_MONOTONIC, &e->when);
    }
    return end(r);
}

static cu_result on_event(cu_event e) {
    cu_result r = begin_in_context();
    return r == CU_OK && !table_at(&events, e) ? CU_ERROR_INVALID_HANDLE : r;
}

EXPORT cu_result cuEventQuery(cu_event e) { return end(on_event(e)); }
EXPORT cu_result cuEventSynchronize(cu_event e) { return end(on_event(e)); }

EXPORT cu_result cuEventElapsedTime(float *out_ms, cu_event a, cu_event b) {
    cu_result r = on_event(a);
    if (r == CU_OK && (!a->timing || !b->timing || !a->recorded || !b->recorded)) r = CU_ERROR_INVALID_HANDLE;
    if (r == CU_OK)
        *out_ms = (float)((double)(b->when.tv_sec - a->when.tv_sec) * 1e3 +
                          (double)(b->when.tv_nsec - a->when.tv_nsec) / 1e6);
    return end(r);
}
