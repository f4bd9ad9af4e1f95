/* The calls of stagehand/pack.h that write. */
#include "base/error.h"
#include "pack/formats.h"
#include "store/dtype.h"
#include "store/path.h"

#define MAX_THREADS 256u

sth_status sthi_pack_check_options(const sth_pack_options *o) {
    if (o->size != sizeof *o || (unsigned)o->format >= STH_PACK_FORMAT_COUNT || o->threads > MAX_THREADS)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options",
                         "options come from sth_pack_options_init, with a known format and at most %u threads",
                         MAX_THREADS);
    if (o->dtype == STH_DTYPE_F32 || o->dtype == STH_DTYPE_BF16 || o->dtype == STH_DTYPE_F16) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options", "weights are unpacked as F32, BF16 or F16, not as %s",
                     sthi_dtype_name(o->dtype));
}

static sth_status plan(sthi_pack_job *job, const char *out) {
    switch (job->options.format) {
    case STH_PACK_V2:
        return sthi_pack_v2(job, out);
    case STH_PACK_LAYER_INDEX:
        return sthi_pack_index(job, out);
    case STH_PACK_LOSSLESS:
        return sthi_pack_lossless(job, out);
    default:
        return sthi_pack_v3(job, out);
    }
}

sth_status sthi_pack(const char *in, const char *out, const sth_pack_options *options) {
    sthi_pack_job job;
    STHI_TRY(sthi_pack_check_options(options));
    STHI_TRY(sthi_job_open(in, options, false, &job));
    sth_status status = plan(&job, out);
    if (status == STH_OK) status = sthi_job_run(&job, out);
    sthi_job_close(&job);
    return status;
}

sth_status sthi_unpack(const char *in, const char *out, const sth_pack_options *options) {
    sthi_pack_job job;
    STHI_TRY(sthi_pack_check_options(options));
    STHI_TRY(sthi_job_open(in, options, true, &job));
    bool lossless = job.quant && job.quant->format == STH_QUANT_LOSSLESS;
    sth_status status = lossless ? sthi_unpack_lossless(&job, out) : sthi_pack_plain(&job, out);
    if (status == STH_OK) status = sthi_job_run(&job, out);
    sthi_job_close(&job);
    return status;
}
