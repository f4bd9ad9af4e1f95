/* Exports status names, their texts and the calling thread's error record. The names and texts come from
 * STH_STATUS_LIST. No locks, no allocation: these must work when memory is out. */
#include "base/error.h"
#include "stagehand/status.h"

const char *sth_status_name(sth_status status) {
    switch (status) {
#define NAME(name, value, class, text) \
    case STH_##name:                   \
        return #name;
        STH_STATUS_LIST(NAME)
#undef NAME
    }
    return "UNKNOWN";
}

const char *sth_status_text(sth_status status) {
    switch (status) {
#define TEXT(name, value, class, text) \
    case STH_##name:                   \
        return text;
        STH_STATUS_LIST(TEXT)
#undef TEXT
    }
    return "unknown status";
}

const sth_error *sth_last_error(void) { return sthi_error_last(); }

sth_status sth_error_set(sth_status status, const char *domain, long native_code, const char *object,
                         const char *message) {
    return sthi_fail(status, domain, native_code, object, "%s", message ? message : "");
}
