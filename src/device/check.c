/* Whether a back end's table may be used. Every table comes through here before its first call, so that a missing entry
 * is named then and not met later as a jump to nowhere. No locks, no calls of the table. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "device/device.h"

typedef void (*entry)(void);

typedef struct known_entry {
    const char *name;
    size_t offset;
    bool required;
    uint32_t capability;         /* 0: of none */
    const char *capability_name;
} known_entry;

static const known_entry known[] = {
#define REQUIRED(name) {#name, offsetof(sth_backend_ops, name), true, 0, NULL},
#define CAPABILITY(name, bit) {#name, offsetof(sth_backend_ops, name), false, STH_CAP_##bit, "STH_CAP_" #bit},
#define OPTIONAL(name) {#name, offsetof(sth_backend_ops, name), false, 0, NULL},
    STHI_BACKEND_ENTRIES(REQUIRED, CAPABILITY, OPTIONAL)
#undef REQUIRED
#undef CAPABILITY
#undef OPTIONAL
};
enum { KNOWN = sizeof known / sizeof *known };
_Static_assert(sizeof(sth_backend_ops) == offsetof(sth_backend_ops, count) + KNOWN * sizeof(entry),
               "STHI_BACKEND_ENTRIES does not list all entries of sth_backend_ops");

/* The table of the first version ended behind this entry: no back end is smaller. */
enum { SMALLEST = offsetof(sth_backend_ops, sim_compute) + sizeof(entry), LONGEST_NAME = 15 };

static bool has(const sth_backend_ops *table, const known_entry *e) {
    entry f = NULL;
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
    for (size_t i = 0; i < KNOWN; i++)
        if (known[i].required && !has(table, &known[i])) {
            char why[96];
            snprintf(why, sizeof why, "its table has no %s, which is required", known[i].name);
            return refuse(table->backend, why);
        }
    return STH_OK;
}

sth_status sthi_backend_check_capabilities(const sth_backend_ops *table, uint32_t capabilities) {
    for (size_t i = 0; i < KNOWN; i++)
        if (known[i].capability & capabilities && !has(table, &known[i])) {
            char why[160];
            snprintf(why, sizeof why, "a device of it has %s, and its table has no %s",
                     known[i].capability_name, known[i].name);
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
