/* Finds a GPU's driver, or its run-time compiler, when it is first needed, and puts the driver's failures into our
 * words.
 *
 * A library is the absolute path that an environment variable names; else one that the process has loaded; else what
 * the system's loader finds by name; else one in a package that brings it along. A relative path is refused, so that
 * nothing is ever loaded from the current directory. Once loaded it stays: a driver cannot be unloaded safely.
 * Lock: `lock`, held while a driver is loaded, which may take seconds. A failed load is tried again at the next
 * call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/infile.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/gpu/gpu.h"

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER};

/* Paths of libraries that the process has loaded, each ended by 0. They are collected first and opened afterwards: the
 * loader holds a lock while it lists them, which another thread's dlopen waits for with the lock that ours would
 * need. */
typedef struct finder {
    const gpu_library *wanted;
    bool packages; /* those that bring it along, not the library itself */
    char *paths;
    size_t bytes;
} finder;

/* Where the path shows that the library is one to look at; NULL: it is not. */
static const char *mark_in(const finder *f, const char *path) {
    const char *at = NULL;
    if (!f->packages) return f->wanted->loaded_as ? strstr(path, f->wanted->loaded_as) : NULL;
    for (const char *const *p = f->wanted->packages; p && *p && !at; p++) at = strstr(path, *p);
    return at;
}

static int note(struct dl_phdr_info *info, size_t size, void *context) {
    finder *f = context;
    const char *path = info->dlpi_name;
    (void)size;
    if (!path || *path != '/' || !mark_in(f, path)) return 0;
    size_t n = strlen(path) + 1;
    char *more = sthi_realloc(f->paths, f->bytes + n, 1);
    if (!more) return 0; /* the loader may find it by its name */
    memcpy(more + f->bytes, path, n);
    f->paths = more;
    f->bytes += n;
    return 0;
}

static void *open_in(const gpu_library *l, const char *folder, size_t length, const char *below) {
    char path[PATH_MAX];
    for (const char *const *name = l->names; *name; name++) {
        int n = snprintf(path, sizeof path, "%.*s%s/%s", (int)length, folder, below, *name);
        void *library = n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (library) return library;
    }
    return NULL;
}

static void *open_at(const finder *f, const char *path) {
    if (!f->packages) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    size_t length = (size_t)(mark_in(f, path) - path);
    void *library = NULL;
    for (const char *const *below = f->wanted->below; below && *below && !library; below++)
        library = open_in(f->wanted, path, length, *below);
    return library;
}

static void *look_among_loaded(const gpu_library *l, bool packages) {
    finder f = {.wanted = l, .packages = packages};
    void *library = NULL;
    dl_iterate_phdr(note, &f);
    for (size_t at = 0; at < f.bytes && !library; at += strlen(f.paths + at) + 1) library = open_at(&f, f.paths + at);
    sthi_free(f.paths);
    return library;
}

static void *find(const gpu_library *l) {
    static const int ways[] = {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL};
    void *library = look_among_loaded(l, false);
    for (int i = 0; i < 2; i++)
        for (const char *const *name = l->names; *name && !library; name++) library = dlopen(*name, ways[i]);
    return library ? library : look_among_loaded(l, true);
}

static sth_status open_library(const gpu_library *l, void **out) {
    const char *path = secure_getenv(l->variable);
    if (path && *path != '/')
        return sthi_fail(STH_BACKEND_UNAVAILABLE, l->domain, 0, path,
                         "%s is \"%s\"; it must be the absolute path of %s's library", l->variable, path, l->what);
    if (path) STHI_TRY(sthi_infile_check(path, l->what));
    (void)dlerror();
    *out = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : find(l);
    if (*out) return STH_OK;
    const char *why = dlerror(), *name = path ? path : l->names[0];
    return sthi_fail(STH_BACKEND_UNAVAILABLE, l->domain, 0, name,
                     "%s cannot be loaded (%s); %s, or set %s to the path of its library", l->what, why ? why : name,
                     l->advice, l->variable);
}

sth_status sthi_gpu_library_load(const gpu_library *l) {
    void *library;
    STHI_TRY(open_library(l, &library));
    for (size_t i = 0; i < l->symbol_count; i++) {
        if (dlsym(library, l->symbols[i].name)) continue;
        sth_status rc = sthi_fail(STH_BACKEND_UNAVAILABLE, l->domain, 0, l->symbols[i].name,
                                  "%s has no function %s; %s", l->what, l->symbols[i].name, l->too_old);
        dlclose(library); /* nothing of it has run */
        return rc;
    }
    for (size_t i = 0; i < l->symbol_count; i++) {
        void *f = dlsym(library, l->symbols[i].name);
        memcpy(l->symbols[i].slot, &f, sizeof f);
    }
    return STH_OK;
}

sth_status sthi_gpu_load(const gpu_vendor *v) {
    sthi_lock(&lock);
    sth_status status = v->driver->init ? STH_OK : sthi_gpu_library_load(v->library);
    gpu_result r = status == STH_OK ? v->driver->init(0) : GPU_OK;
    sthi_unlock(&lock);
    if (r == GPU_OK) return status;
    return sthi_gpu_fail_as(STH_BACKEND_UNAVAILABLE, v, r, v->library->what, "it does not start", v->start_advice);
}

static sth_status status_of(gpu_result r) {
    switch (r) {
    case GPU_ERROR_INVALID_VALUE:
    case GPU_ERROR_INVALID_HANDLE: return STH_INVALID_ARGUMENT;
    case GPU_ERROR_OUT_OF_MEMORY: return STH_OUT_OF_DEVICE_MEMORY;
    case GPU_ERROR_DEINITIALIZED:
    case GPU_ERROR_CONTEXT_IS_DESTROYED: return STH_SHUT_DOWN;
    case GPU_ERROR_NO_DEVICE:
    case GPU_ERROR_INVALID_DEVICE: return STH_BACKEND_UNAVAILABLE;
    case GPU_ERROR_NOT_SUPPORTED: return STH_UNSUPPORTED;
    default: return STH_DEVICE_ERROR;
    }
}

sth_status sthi_gpu_fail_as(sth_status status, const gpu_vendor *v, gpu_result r, const char *object, const char *what,
                            const char *advice) {
    const char *name = NULL, *text = NULL;
    if (v->driver->error_name(r, &name) != GPU_OK || !name) name = "an error it has no name for";
    if (v->driver->error_text(r, &text) != GPU_OK || !text) text = "no description";
    return sthi_fail(status, v->name, r, object, "%s: the driver reports %s (%s)%s%s", what, name, text,
                     advice ? "; " : "", advice ? advice : "");
}

sth_status sthi_gpu_fail(const gpu_vendor *v, gpu_result r, const char *object, const char *what, const char *advice) {
    return sthi_gpu_fail_as(status_of(r), v, r, object, what, advice);
}

void sthi_gpu_ended(const gpu_vendor *v, gpu_result r, const char *object, const char *what) {
    if (r != GPU_OK && r != GPU_ERROR_DEINITIALIZED && r != GPU_ERROR_CONTEXT_IS_DESTROYED)
        (void)sthi_gpu_fail(v, r, object, what, NULL);
}
