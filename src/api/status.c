/* Exports status names, their texts and the calling thread's error record. No locks, no allocation:
 * these must work when memory is out. */
#include "base/error.h"
#include "stagehand/status.h"

const char *sth_status_name(sth_status status) { return sthi_status_name(status); }

const char *sth_status_text(sth_status status) { return sthi_status_text(status); }

const sth_error *sth_last_error(void) { return sthi_error_last(); }

sth_status sth_error_set(sth_status status, const char *domain, long native_code, const char *object,
                         const char *message) {
    return sthi_fail(status, domain, native_code, object, "%s", message ? message : "");
}
