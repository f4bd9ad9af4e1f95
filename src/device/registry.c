/* The list of back ends: those of this build, those that the program registers, and shared objects that the user names.
 *
 * A table is checked, copied and stays; shared objects are never unloaded, so that what was opened through one may
 * outlive everything. Nothing is looked up by a bare name: neither the current directory nor the loader's path decides
 * which code runs.
 * Lock: `lock`, held while a table is taken and while a shared object is loaded; readers of the list take none. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/infile.h"
#include "base/thread.h"
#include "device/decorate/layer.h"

static const sth_backend_ops *const built_in[] = {&sthi_sim_ops, &sthi_cuda_ops, &sthi_hip_ops};
enum { BUILT_IN = sizeof built_in / sizeof *built_in, MOST = 32 };
static const char VARIABLE[] = "STAGEHAND_BACKENDS";

typedef struct taken {
    const sth_backend_ops *source; /* the user's table, which tells a second taking from another back end */
    sth_backend_ops ops;
    char name[16];
} taken;

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER};
static taken list[MOST]; /* entries below `count` never change */
static atomic_int count;

static const sth_backend_ops *at(int i) {
    if (i < 0) return NULL;
    if (i < BUILT_IN) return built_in[i];
    i -= BUILT_IN;
    return i < atomic_load_explicit(&count, memory_order_acquire) ? &list[i].ops : NULL;
}

/* The first `length` characters of `name`. "cpu" is another name of "sim". */
static const sth_backend_ops *named(const char *name, size_t length) {
    const sth_backend_ops *ops;
    if (length == 3 && !strncmp(name, "cpu", 3)) return &sthi_sim_ops;
    for (int i = 0; (ops = at(i)); i++)
        if (strlen(ops->backend) == length && !strncmp(name, ops->backend, length)) return ops;
    return NULL;
}

/* ---- taking a table */

static sth_status add_locked(const sth_backend_ops *table, const char **out_name) {
    int n = atomic_load_explicit(&count, memory_order_relaxed);
    STHI_TRY(sthi_backend_check(table));
    for (int i = 0; i < n; i++)
        if (list[i].source == table && !strcmp(list[i].name, table->backend)) {
            *out_name = list[i].name;
            return STH_OK;
        }
    if (named(table->backend, strlen(table->backend)))
        return sthi_fail(STH_INVALID_STATE, "stagehand", 0, table->backend,
                         "there is a back end \"%s\" already; give this one another name", table->backend);
    if (n == MOST)
        return sthi_fail(STH_INVALID_STATE, "stagehand", 0, table->backend,
                         "%d back ends were taken already, and no more fit",
                         MOST);
    taken *t = &list[n];
    t->source = table;
    snprintf(t->name, sizeof t->name, "%s", table->backend);
    sthi_backend_complete(table, &t->ops);
    t->ops.backend = *out_name = t->name;
    atomic_store_explicit(&count, n + 1, memory_order_release);
    return STH_OK;
}

sth_status sthi_backend_register(const sth_backend_ops *table) {
    const char *name;
    sthi_lock(&lock);
    sth_status rc = add_locked(table, &name);
    sthi_unlock(&lock);
    return rc;
}

/* ---- shared objects */

static sth_status set_error(sth_status status, const char *domain, long native_code, const char *object,
                            const char *message) {
    return sthi_fail(status, domain, native_code, object, "%s", message ? message : "");
}

static const sth_backend_host host = {.abi = STH_BACKEND_ABI, .size = sizeof host, .error_set = set_error};

static sth_status find_entry(const char *path, sth_backend_entry **out) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *why = library ? NULL : dlerror();
    if (!library)
        return sthi_fail(STH_BACKEND_UNAVAILABLE, "stagehand", 0, path, "the back end %s cannot be loaded: %s", path,
                         why ? why : "no reason is given");
    void *symbol = dlsym(library, STH_BACKEND_ENTRY);
    if (!symbol) {
        dlclose(library);
        return sthi_fail(STH_BACKEND_UNAVAILABLE, "stagehand", 0, path,
                         "%s is no back end: it does not export " STH_BACKEND_ENTRY " (see stagehand/backend.h)", path);
    }
    memcpy(out, &symbol, sizeof symbol);
    return STH_OK;
}

static sth_status load_locked(const char *path, const char **out_name) {
    sth_backend_entry *entry = NULL;
    if (!strchr(path, '/'))
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, path,
                         "a back end is loaded from a path, and \"%s\" is only a name; write \"./%s\" for a file "
                         "in the current directory",
                         path, path);
    STHI_TRY(sthi_infile_check(path, "a back end"));
    STHI_TRY(find_entry(path, &entry));
    sthi_fail(STH_OK, NULL, 0, NULL, "%s", "");
    const sth_backend_ops *table = entry(&host);
    if (table) {
        if (add_locked(table, out_name) == STH_OK) return STH_OK;
    } else if (sthi_error_last()->status == STH_OK) {
        return sthi_fail(STH_UNSUPPORTED, "stagehand", STH_BACKEND_ABI, path,
                         "the back end %s gave no table for version %d of sth_backend_ops, and no reason", path,
                         STH_BACKEND_ABI);
    }
    const sth_error *e = sthi_error_last();
    return sthi_fail(e->status, e->domain, e->native_code, path, "%s: %s", path, e->message);
}

static sth_status load_listed_locked(const char *paths) {
    char path[PATH_MAX];
    sth_status rc = STH_OK;
    sthi_error_copy first;
    for (size_t n; *paths; paths += n + (paths[n] == ':')) {
        const char *name;
        n = strcspn(paths, ":");
        if (n == 0) continue;
        snprintf(path, sizeof path, "%.*s", (int)n, paths);
        sth_status one = *path == '/' && n < sizeof path
                             ? load_locked(path, &name)
                             : sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, path,
                                         "%s holds \"%s\"; it must hold absolute paths, with \":\" between them",
                                         VARIABLE, path);
        if (one != STH_OK && rc == STH_OK) sthi_error_save(&first);
        if (rc == STH_OK) rc = one;
    }
    return rc == STH_OK ? STH_OK : sthi_error_restore(&first);
}

static sth_status load_environment(void) {
    const char *paths = secure_getenv(VARIABLE);
    if (!paths || !*paths) return STH_OK;
    sthi_lock(&lock);
    sth_status rc = load_listed_locked(paths);
    sthi_unlock(&lock);
    return rc;
}

sth_status sthi_backend_load(const char *path, const char **out_name) {
    const char *name;
    if (!path) return load_environment();
    sthi_lock(&lock);
    sth_status rc = load_locked(path, &name);
    sthi_unlock(&lock);
    if (rc == STH_OK && out_name) *out_name = name;
    return rc;
}

/* ---- reading the list */

const sth_backend_ops *sthi_backend_at(int i) {
    const sth_backend_ops *ops = at(i);
    if (ops || i < 0) return ops;
    (void)load_environment(); /* what cannot be loaded is no device, and says so where it is asked for by name */
    return at(i);
}

static bool parse_index(const char *text, int *out) {
    if (*text < '0' || *text > '9') return false;
    char *end;
    unsigned long n = strtoul(text, &end, 10);
    if (*end || n > INT_MAX) return false;
    *out = (int)n;
    return true;
}

static sth_status unknown(const char *name, bool environment_failed) {
    char known[256] = "";
    const sth_backend_ops *ops;
    for (int i = 0; (ops = at(i)); i++) {
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s\"%s\"", i ? ", " : "", ops->backend);
    }
    return sthi_fail(STH_BACKEND_UNAVAILABLE, "stagehand", 0, name, "there is no back end for \"%s\"; there are %s%s%s",
                     name, known, environment_failed ? "; " : "", environment_failed ? sthi_error_last()->message : "");
}

sth_status sthi_backend_find(const char *name, const sth_backend_ops **out, int *out_index) {
    name = sthi_undecorated(name);
    size_t length = strcspn(name, ":");
    int index = 0;
    if (name[length] == ':' && !parse_index(name + length + 1, &index))
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, name,
                         "\"%s\" is not a device; write a back end and a number, such as \"cuda:1\"", name);
    const sth_backend_ops *ops = named(name, length);
    if (!ops) {
        bool failed = load_environment() != STH_OK;
        ops = named(name, length);
        if (!ops) return unknown(name, failed);
    }
    *out = ops;
    *out_index = index;
    return STH_OK;
}
