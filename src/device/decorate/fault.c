/* fault(CALL=N, ...): the N-th call of a kind since the device was opened fails, once; CALL=N+ also all later ones.
 * status=NAME (default DEVICE_ERROR) and native=CODE say how. Without options nothing fails. Calls are counted by
 * atomics; void calls have no failure to report and cannot be named. */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "device/decorate/layer.h"

typedef struct fault_layer {
    sthi_layer layer;
    uint64_t fails[STHI_ENTRY_COUNT]; /* the number of the call that fails; 0: none */
    bool forever[STHI_ENTRY_COUNT];
    sth_status status;
    uint64_t native;
    _Atomic uint64_t met[STHI_ENTRY_COUNT];
} fault_layer;

static const char KNOWN[] =
    "calls that return a status, each with the number of the one that fails (copy_h2d=3, or 3+ for all from there on), "
    "status=NAME and native=CODE";

static sth_status init(sthi_layer *l) {
    ((fault_layer *)l)->status = STH_DEVICE_ERROR;
    return STH_OK;
}

static bool status_named(const char *name, sth_status *out) {
    static const sth_status all[] = {
#define VALUE(id, value, class, text) STH_##id,
        STH_STATUS_LIST(VALUE)
#undef VALUE
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] != STH_OK && !strcmp(sthi_status_name(all[i]), name)) {
            *out = all[i];
            return true;
        }
    return false;
}

static bool set_call(fault_layer *f, const char *key, const char *value) {
    char digits[24];
    size_t n = strspn(value, "0123456789");
    sthi_entry entry = sthi_entry_named(key);
    if (entry == STHI_ENTRY_COUNT || sthi_entries[entry].kind != STHI_STATUS) return false;
    if (n >= sizeof digits || (strcmp(value + n, "") != 0 && strcmp(value + n, "+") != 0)) return false;
    memcpy(digits, value, n);
    digits[n] = 0;
    f->forever[entry] = value[n] == '+';
    return sthi_layer_number(digits, UINT64_MAX / 2, &f->fails[entry]) && f->fails[entry] > 0;
}

static sth_status set(sthi_layer *l, const char *key, const char *value) {
    fault_layer *f = (fault_layer *)l;
    bool good;
    if (!strcmp(key, "status")) good = status_named(value, &f->status);
    else if (!strcmp(key, "native")) good = sthi_layer_number(value, INT32_MAX, &f->native);
    else good = set_call(f, key, value);
    return good ? STH_OK : sthi_layer_bad_option(l, key, value, KNOWN);
}

static sth_status before(sthi_layer *l, const sthi_call *c) {
    fault_layer *f = (fault_layer *)l;
    uint64_t n = 1 + atomic_fetch_add_explicit(&f->met[c->entry], 1, memory_order_relaxed), fails = f->fails[c->entry];
    if (!fails || !(n == fails || (f->forever[c->entry] && n > fails))) return STH_OK;
    return sthi_fail(f->status, "fault", (long)f->native, sthi_entries[c->entry].name,
                     "%s: call %" PRIu64 " was made to fail on purpose", sthi_entries[c->entry].name, n);
}

const sthi_decorator sthi_fault_decorator = {
    .name = "fault", .size = sizeof(fault_layer), .init = init, .set = set, .before = before};
