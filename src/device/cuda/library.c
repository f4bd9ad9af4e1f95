/* Finds a library of the CUDA toolkit, which is also in PyTorch's wheels. Where it is looked for, in this order: the absolute
 * path in its environment variable, one that the process has loaded, the system's loader by name, and the folders of the
 * nvidia and torch packages next to libraries that the process has loaded. Nothing is ever taken from the current
 * directory. No locks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/cuda/library.h"

typedef struct finder {
    const cuda_library *what;
    void *library;
} finder;

static void *open_in(const cuda_library *what, const char *folder, size_t length, const char *below) {
    char path[PATH_MAX];
    for (const char *const *name = what->names; *name; name++) {
        int n = snprintf(path, sizeof path, "%.*s%s/%s", (int)length, folder, below, *name);
        void *library = n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (library) return library;
    }
    return NULL;
}

/* One library of the process: the one that is looked for, or one of the packages that bring it along. */
static int look_at(struct dl_phdr_info *info, size_t size, void *context) {
    finder *f = context;
    (void)size;
    const char *path = info->dlpi_name, *at;
    if (!path || *path != '/') return 0;
    if (strstr(path, f->what->stem)) f->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!f->library && ((at = strstr(path, "/nvidia/")) || (at = strstr(path, "/torch/lib/"))))
        for (const char *const *below = f->what->below; !f->library && *below; below++)
            f->library = open_in(f->what, path, (size_t)(at - path), *below);
    return f->library != NULL;
}

static sth_status find(const cuda_library *what, void **out) {
    const char *path = secure_getenv(what->variable);
    if (path && *path != '/')
        return sthi_fail(STH_BACKEND_UNAVAILABLE, what->domain, 0, path,
                         "%s is \"%s\"; it must be the absolute path of the library", what->variable, path);
    finder f = {what, NULL};
    if (path) f.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (const char *const *n = what->names; !path && !f.library && *n; n++) f.library = dlopen(*n, RTLD_NOW | RTLD_NOLOAD);
    for (const char *const *n = what->names; !path && !f.library && *n; n++) f.library = dlopen(*n, RTLD_NOW | RTLD_LOCAL);
    if (!path && !f.library) dl_iterate_phdr(look_at, &f);
    *out = f.library;
    if (f.library) return STH_OK;
    return sthi_fail(STH_BACKEND_UNAVAILABLE, what->domain, 0, path ? path : what->names[0], "there is no %s: install %s, or set "
                     "%s to the path of the library", what->what, what->package, what->variable);
}

sth_status sthi_cuda_library(const cuda_library *what, const cuda_symbol *symbols, size_t count, void *out_table) {
    void *library;
    STHI_TRY(find(what, &library));
    for (size_t i = 0; i < count; i++) {
        void *f = dlsym(library, symbols[i].symbol);
        if (!f)
            return sthi_fail(STH_BACKEND_UNAVAILABLE, what->domain, 0, symbols[i].symbol,
                             "%s has no function %s; it is older than %s", what->what, symbols[i].symbol, what->oldest);
        memcpy((char *)out_table + symbols[i].offset, &f, sizeof f);
    }
    return STH_OK;
}
