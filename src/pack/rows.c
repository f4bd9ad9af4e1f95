/* Widening. Pure but for the errors. */
#include "pack/rows.h"

#include <math.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "store/dtype.h"

bool sthi_rows_is_float(sth_dtype dtype) {
    return dtype == STH_DTYPE_F64 || dtype == STH_DTYPE_F32 || dtype == STH_DTYPE_F16 || dtype == STH_DTYPE_BF16;
}

uint64_t sthi_rows_of_chunk(uint64_t columns, uint64_t row_bytes) {
    return sthi_max_u64(1, STHI_JOB_CHUNK / sthi_max_u64(row_bytes, columns * 4));
}

static float widen_one(sth_dtype dtype, const char *p) {
    uint16_t h;
    double d;
    float f;
    switch (dtype) {
    case STH_DTYPE_BF16:
        memcpy(&h, p, sizeof h);
        return sthi_from_bf16(h);
    case STH_DTYPE_F16:
        memcpy(&h, p, sizeof h);
        return sthi_from_f16(h);
    case STH_DTYPE_F64:
        memcpy(&d, p, sizeof d);
        return (float)d;
    default:
        memcpy(&f, p, sizeof f);
        return f;
    }
}

void sthi_rows_widen(sth_dtype dtype, const void *bytes, uint64_t count, float *out) {
    uint64_t each = sthi_dtype_bits(dtype) / 8;
    for (uint64_t i = 0; i < count; i++) out[i] = widen_one(dtype, (const char *)bytes + i * each);
}

sth_status sthi_rows_read_vector(const sthi_pack_job *job, const sth_tensor_info *t, float **out_wide) {
    char *raw = sthi_alloc((size_t)t->bytes);
    float *wide = sthi_zalloc((size_t)t->shape[0], sizeof *wide);
    sth_status status = raw && wide ? STH_OK : sthi_job_out_of_memory(job);
    if (status == STH_OK) status = sthi_checkpoint_read(job->checkpoint, t->file, t->offset, t->bytes, raw);
    if (status == STH_OK) {
        sthi_rows_widen(t->dtype, raw, t->shape[0], wide);
        *out_wide = wide;
        wide = NULL;
    }
    sthi_free(raw);
    sthi_free(wide);
    return status;
}

sth_status sthi_rows_check(const sthi_pack_job *job, const sth_tensor_info *t, uint64_t first, const float *w,
                           uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        if (isfinite(w[i])) continue;
        const char *path = job->checkpoint->files[t->file].path;
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, path,
                         "%.300s: tensor '%.160s': byte %llu: a value that is not finite (or beyond float32) cannot be "
                         "quantised; leave the tensor out with skip",
                         path, t->name,
                         (unsigned long long)(t->offset + (first + i) * (sthi_dtype_bits(t->dtype) / 8)));
    }
    return STH_OK;
}
