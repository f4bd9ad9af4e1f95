/* Whether a back end's table may be used. Every table comes through here before its first call, so that a missing entry
 * is named then and not met later as a jump to nowhere. No locks, no calls of the table. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "device/device.h"
#include "device/entries.h"

typedef void (*function)(void);

enum { NEEDED = 1 << 30, OPTIONAL = 0 }; /* no capability's bits */
#define FACTS(need, kind, name, ...) \
    {#name, offsetof(sth_backend_ops, name), ((need) & NEEDED) != 0, (uint32_t)((need) & ~NEEDED), #need, STHI_##kind},
const sthi_entry_facts sthi_entries[] = {STHI_ENTRIES(FACTS)};
#undef FACTS
_Static_assert(sizeof(sth_backend_ops) == offsetof(sth_backend_ops, count) + STHI_ENTRY_COUNT * sizeof(function),
               "STHI_ENTRIES does not list all entries of sth_backend_ops");

/* The table of the first version ended behind this entry: no back end is smaller. */
enum { SMALLEST = offsetof(sth_backend_ops, sim_compute) + sizeof(function), LONGEST_NAME = 15 };

static bool has(const sth_backend_ops *table, const sthi_entry_facts *e) {
    function f = NULL;
    if (e->offset + sizeof f <= table->size) memcpy(&f, (const char *)table + e->offset, sizeof f);
    return f != NULL;
}

static sth_status refuse(const char *name, const char *why) {
    return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, name, "the back end \"%s\" cannot be used: %s", name, why);
}

static bool good_name(const char *name) {
    size_t n = name ? strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_-") : 0;
    return n > 0 && n <= LONGEST_NAME && !name[n];
}

/* Nothing behind abi is looked at in a table of another version: it may mean something else there. */
sth_status sthi_backend_check(const sth_backend_ops *table) {
    if (!table) return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, "back end", "the back end's table is NULL");
    if (table->abi != STH_BACKEND_ABI)
        return sthi_fail(STH_UNSUPPORTED, "stagehand", table->abi, "back end",
                         "the back end was made for version %" PRIu32 " of sth_backend_ops and this library has "
                         "version %d; compile it again with this library's stagehand/backend.h",
                         table->abi, STH_BACKEND_ABI);
    if (table->size < SMALLEST)
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, "back end",
                         "the back end's table says that it is %zu bytes, and the smallest has %d; set size to "
                         "sizeof(sth_backend_ops)",
                         table->size, (int)SMALLEST);
    if (!good_name(table->backend))
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, "back end",
                         "a back end is named with 1 to %d of a-z, 0-9, \"_\" and \"-\", and this one is \"%s\"",
                         LONGEST_NAME, table->backend ? table->backend : "NULL");
    for (size_t i = 0; i < STHI_ENTRY_COUNT; i++)
        if (sthi_entries[i].needed && !has(table, &sthi_entries[i])) {
            char why[96];
            snprintf(why, sizeof why, "its table has no %s, which is required", sthi_entries[i].name);
            return refuse(table->backend, why);
        }
    return STH_OK;
}

sth_status sthi_backend_check_capabilities(const sth_backend_ops *table, uint32_t capabilities) {
    for (size_t i = 0; i < STHI_ENTRY_COUNT; i++)
        if (sthi_entries[i].capability & capabilities && !has(table, &sthi_entries[i])) {
            char why[160];
            snprintf(why, sizeof why, "a device of it has %s, and its table has no %s",
                     sthi_entries[i].capability_name, sthi_entries[i].name);
            return refuse(table->backend, why);
        }
    return STH_OK;
}

void sthi_backend_complete(const sth_backend_ops *given, sth_backend_ops *out) {
    size_t size = given->size < sizeof *out ? given->size : sizeof *out;
    memset(out, 0, sizeof *out);
    memcpy(out, given, size);
    out->size = sizeof *out;
}

sthi_entry sthi_entry_named(const char *name) {
    int i = 0;
    while (i < STHI_ENTRY_COUNT && strcmp(sthi_entries[i].name, name) != 0) i++;
    return (sthi_entry)i;
}

static sth_status lacks(const sth_backend_ops *table, sthi_entry entry) {
    return sthi_fail(STH_UNSUPPORTED, "stagehand", 0, table->backend, "the back end \"%s\" has no %s", table->backend,
                     sthi_entries[entry].name);
}

/* A foreign copy of a device that takes any address is a plain one. */
static sthi_entry met(const sth_backend_ops *table, sthi_entry entry) {
    if (entry == STHI_ENTRY_copy_d2h_foreign && !table->copy_d2h_foreign) return STHI_ENTRY_copy_d2h;
    if (entry == STHI_ENTRY_copy_h2d_foreign && !table->copy_h2d_foreign) return STHI_ENTRY_copy_h2d;
    return entry;
}

sth_status sthi_call_make(const sth_backend_ops *table, sth_backend_device *self, const sthi_call *c) {
    sthi_entry entry = met(table, c->entry);
    if (!has(table, &sthi_entries[entry])) return lacks(table, entry);
    switch (entry) {
#define CALL_STATUS(name, arguments) \
    case STHI_ENTRY_##name: return table->name arguments;
#define CALL_VOID(name, arguments)                \
    case STHI_ENTRY_##name: table->name arguments; \
        return STH_OK;
#define CALL_PLAIN(name, arguments)
#define CALL(need, kind, name, parameters, fields, arguments) CALL_##kind(name, arguments)
        STHI_ENTRIES(CALL)
#undef CALL
    default: return lacks(table, entry);
    }
}
