/* A user's executor: its table is checked before anything calls it. */
#include "base/error.h"
#include "base/memory.h"
#include "runner/runner.h"

static sth_status check_table(const sth_executor_ops *ops) {
    if (ops->struct_size < sizeof *ops)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "struct_size",
                         "the executor's table has struct_size %zu and not the %zu bytes of sth_executor_ops",
                         ops->struct_size, sizeof *ops);
    if (ops->version != STH_EXECUTOR_VERSION)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "version",
                         "the executor's table is of version %u; this library knows version %d", ops->version,
                         STH_EXECUTOR_VERSION);
    if (ops->name && ops->run) return STH_OK;
    const char *missing = ops->name ? "run" : "name";
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, missing, "the executor's table has no %s", missing);
}

sth_status sthi_executor_create(const sth_executor_ops *ops, void *self, sth_executor **out) {
    STHI_TRY(check_table(ops));
    sth_executor *e = sthi_zalloc(1, sizeof *e);
    char *name = e ? sthi_strdup(ops->name) : NULL;
    if (!name) {
        sthi_free(e);
        return sthi_no_memory(ops->name, "an executor");
    }
    *e = (sth_executor){.ops = *ops, .self = self, .name = name};
    *out = e;
    return STH_OK;
}

void sthi_executor_close(sth_executor *e) {
    if (!e) return;
    if (e->ops.close) e->ops.close(e->self);
    sthi_free(e->name);
    sthi_free(e);
}
