#include "base/error.h"
#include "pack/formats.h"
sth_status sthi_pack_v3(sthi_pack_job *job, const char *out) {
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, out, "%.300s: %.300s: v3-int4 cannot be written yet", out, job->in);
}
