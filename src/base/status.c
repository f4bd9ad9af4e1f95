/* Names and texts of statuses, from STH_STATUS_LIST. No locks, no allocation: these must work when
 * memory is out. */
#include "base/error.h"

const char *sthi_status_name(sth_status status) {
    switch (status) {
#define NAME(name, value, class, text) \
    case STH_##name:                   \
        return #name;
        STH_STATUS_LIST(NAME)
#undef NAME
    }
    return "UNKNOWN";
}

const char *sthi_status_text(sth_status status) {
    switch (status) {
#define TEXT(name, value, class, text) \
    case STH_##name:                   \
        return text;
        STH_STATUS_LIST(TEXT)
#undef TEXT
    }
    return "unknown status";
}
