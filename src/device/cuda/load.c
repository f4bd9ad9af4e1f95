/* Finds the CUDA driver at run time and puts its failures into our words.
 *
 * The library is libcuda.so.1 as the system's loader finds it, or the absolute path in the environment
 * variable STAGEHAND_CUDA_LIBRARY. A relative path is refused, so that nothing is ever loaded from the
 * current directory. Once loaded it stays: the driver cannot be unloaded safely.
 * Lock: `lock`, held while loading, which may take seconds. A failed load is tried again at the next call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/thread.h"
#include "device/cuda/cuda.h"

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER};
static cuda_driver driver;
static bool loaded;

static const struct {
    const char *symbol;
    size_t offset;
} symbols[] = {
#define CUDA_ENTRY(member, symbol, parameters) {#symbol, offsetof(cuda_driver, member)},
    CUDA_SYMBOLS(CUDA_ENTRY)
#undef CUDA_ENTRY
};

static sth_status open_library(void **out) {
    const char *path = secure_getenv("STAGEHAND_CUDA_LIBRARY");
    if (path && *path != '/')
        return sthi_fail(
            STH_BACKEND_UNAVAILABLE, "cuda", 0, path,
            "STAGEHAND_CUDA_LIBRARY is \"%s\"; it must be the absolute path of the driver library", path);
    const char *name = path ? path : "libcuda.so.1";
    *out = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (*out) return STH_OK;
    const char *why = dlerror();
    return sthi_fail(STH_BACKEND_UNAVAILABLE, "cuda", 0, name,
                     "the CUDA driver cannot be loaded (%s); install the NVIDIA driver, give the container "
                     "access to the GPU, or set STAGEHAND_CUDA_LIBRARY to the path of libcuda.so.1",
                     why ? why : name);
}

static sth_status read_symbols(void *library, cuda_driver *out) {
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *f = dlsym(library, symbols[i].symbol);
        if (!f)
            return sthi_fail(
                STH_BACKEND_UNAVAILABLE, "cuda", 0, symbols[i].symbol,
                "the CUDA driver has no function %s; Stagehand needs a driver for CUDA 11 or later",
                symbols[i].symbol);
        memcpy((char *)out + symbols[i].offset, &f, sizeof f);
    }
    return STH_OK;
}

static sth_status load_locked(void) {
    if (!loaded) {
        void *library;
        cuda_driver fresh;
        STHI_TRY(open_library(&library));
        sth_status status = read_symbols(library, &fresh);
        if (status != STH_OK) {
            dlclose(library); /* nothing of it has run */
            return status;
        }
        driver = fresh;
        loaded = true;
    }
    cu_result r = driver.init(0);
    if (r == CU_OK) return STH_OK;
    return sthi_cuda_fail_as(
        STH_BACKEND_UNAVAILABLE, &driver, r, "cuInit", "the CUDA driver does not start",
        "check that nvidia-smi lists a GPU, that CUDA_VISIBLE_DEVICES is not empty, and that "
        "this process was not forked from one that used CUDA");
}

sth_status sthi_cuda_load(const cuda_driver **out) {
    sthi_lock(&lock);
    sth_status status = load_locked();
    sthi_unlock(&lock);
    if (status == STH_OK) *out = &driver;
    return status;
}

static sth_status status_of(cu_result r) {
    switch (r) {
    case CU_ERROR_INVALID_VALUE:
    case CU_ERROR_INVALID_HANDLE: return STH_INVALID_ARGUMENT;
    case CU_ERROR_OUT_OF_MEMORY: return STH_OUT_OF_DEVICE_MEMORY;
    case CU_ERROR_DEINITIALIZED:
    case CU_ERROR_CONTEXT_IS_DESTROYED: return STH_SHUT_DOWN;
    case CU_ERROR_NO_DEVICE:
    case CU_ERROR_INVALID_DEVICE: return STH_BACKEND_UNAVAILABLE;
    case CU_ERROR_NOT_SUPPORTED: return STH_UNSUPPORTED;
    default: return STH_DEVICE_ERROR;
    }
}

sth_status sthi_cuda_fail_as(sth_status status, const cuda_driver *d, cu_result r, const char *object,
                             const char *what, const char *advice) {
    const char *name = NULL, *text = NULL;
    if (d->error_name(r, &name) != CU_OK || !name) name = "an error it has no name for";
    if (d->error_text(r, &text) != CU_OK || !text) text = "no description";
    return sthi_fail(status, "cuda", r, object, "%s: the driver reports %s (%s)%s%s", what, name, text,
                     advice ? "; " : "", advice ? advice : "");
}

sth_status sthi_cuda_fail(const cuda_driver *d, cu_result r, const char *object, const char *what,
                          const char *advice) {
    return sthi_cuda_fail_as(status_of(r), d, r, object, what, advice);
}

void sthi_cuda_ended(const cuda_driver *d, cu_result r, const char *object, const char *what) {
    if (r != CU_OK && r != CU_ERROR_DEINITIALIZED && r != CU_ERROR_CONTEXT_IS_DESTROYED)
        (void)sthi_cuda_fail(d, r, object, what, NULL);
}
