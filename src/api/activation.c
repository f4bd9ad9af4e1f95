/* Exported functions of stagehand/activation.h: check the arguments, then hand over to activation/. */
#include "activation/store.h"
#include "api/arguments.h"
#include "core/watermark.h"

/* No memory has more; sums of such sizes fit 64 bits. */
#define MOST_BYTES (UINT64_C(1) << 57)

static sth_status bad_options(const char *why) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "options", "%s", why);
}

static sth_status check_marks(uint64_t high, uint64_t low) {
    return low <= high ? STH_OK : bad_options("the low watermark is above the high one");
}

void sth_activation_options_init(sth_activation_options *options) {
    if (options) sthi_activation_options_init(options);
}

static sth_status check_classes(const sth_activation_options *o) {
    if (o->class_count > STH_ACTIVATION_CLASSES) return bad_options("there are more classes of slabs than fit");
    for (uint32_t i = 0; i < o->class_count; i++)
        if (!o->class_bytes[i] || (i && o->class_bytes[i] <= o->class_bytes[i - 1]) || !o->class_slabs[i])
            return bad_options("classes of slabs grow, and have at least one slab each");
    return STH_OK;
}

sth_status sth_activation_create(sth_device *device, const sth_activation_options *options,
                                 sth_activation **out_activation) {
    sth_activation_options complete;
    if (!device || !out_activation) return null_argument("device or out_activation");
    sthi_activation_options_init(&complete);
    if (options) {
        if (options->size != sizeof *options)
            return bad_options("options were not set up by sth_activation_options_init of this version");
        complete = *options;
    }
    STHI_TRY(check_marks(complete.high, complete.low));
    STHI_TRY(check_classes(&complete));
    return sthi_activation_create(device, &complete, out_activation);
}

void sth_activation_destroy(sth_activation *activation) { sthi_activation_destroy(activation); }

sth_status sth_activation_close(sth_activation *activation) {
    return activation ? sthi_activation_close(activation) : null_argument("activation");
}

sth_status sth_activation_set_marks(sth_activation *activation, uint64_t high, uint64_t low) {
    if (!activation) return null_argument("activation");
    STHI_TRY(check_marks(high, low));
    return sthi_activation_set_marks(activation, high, low);
}

void sth_watermark_init(sth_watermark *mark, uint64_t high, uint64_t low, bool follows, uint64_t budget) {
    if (mark) sthi_watermark_init(mark, high, low, follows, budget);
}
bool sth_watermark_follow(sth_watermark *mark, uint64_t peak, bool moved) {
    return mark && sthi_watermark_follow(mark, peak, moved);
}
bool sth_watermark_limit(sth_watermark *mark, const sth_watermark *given, uint64_t most) {
    return mark && given && sthi_watermark_limit(mark, given, most);
}
uint64_t sth_watermark_low(const sth_watermark *mark) { return mark ? sthi_watermark_low(mark) : 0; }

sth_status sth_activation_set_pinned_limit(sth_activation *activation, uint64_t bytes) {
    return activation ? sthi_activation_set_pinned_limit(activation, bytes) : null_argument("activation");
}

sth_status sth_activation_set_caps(sth_activation *activation, uint32_t max_d2h, uint32_t max_h2d) {
    return activation ? sthi_activation_set_caps(activation, max_d2h, max_h2d) : null_argument("activation");
}

sth_status sth_activation_pass(sth_activation *activation, uint64_t step) {
    return activation ? sthi_activation_pass(activation, step) : null_argument("activation");
}

sth_status sth_activation_save(sth_activation *activation, uint64_t bytes, bool passing, sth_record *out_record) {
    if (!activation || !out_record) return null_argument("activation or out_record");
    if (!bytes || bytes > MOST_BYTES)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "bytes", "a record of %llu bytes is not possible",
                         (unsigned long long)bytes);
    return sthi_activation_save(activation, bytes, passing, out_record);
}

sth_status sth_activation_recomputable(sth_activation *activation, sth_record record) {
    return activation ? sthi_activation_recomputable(activation, record) : null_argument("activation");
}

sth_status sth_activation_set_held(sth_activation *activation, sth_record record, bool held) {
    return activation ? sthi_activation_set_held(activation, record, held) : null_argument("activation");
}

sth_status sth_activation_drop(sth_activation *activation, sth_record record) {
    return activation ? sthi_activation_drop(activation, record) : null_argument("activation");
}

sth_status sth_activation_relieve(sth_activation *activation, uint64_t used, uint64_t need, sth_stream stream,
                                  sth_record *out_record, sth_relief *out_relief) {
    if (!activation || !out_record || !out_relief) return null_argument("activation, out_record or out_relief");
    return sthi_activation_relieve(activation, used, need, stream, out_record, out_relief);
}

sth_status sth_activation_spill(sth_activation *activation, sth_record record, sth_devptr source,
                                sth_stream stream) {
    if (!activation || !source) return null_argument("activation or source");
    return sthi_activation_spill(activation, record, source, stream);
}

sth_status sth_activation_ask(sth_activation *activation, sth_record record, sth_activation_state *out_state) {
    if (!activation || !out_state) return null_argument("activation or out_state");
    return sthi_activation_ask(activation, record, out_state);
}

sth_status sth_activation_ahead(sth_activation *activation, uint64_t used, sth_record *out_record) {
    if (!activation || !out_record) return null_argument("activation or out_record");
    return sthi_activation_ahead(activation, used, out_record);
}

sth_status sth_activation_restore(sth_activation *activation, sth_record record, sth_devptr target,
                                  sth_stream stream) {
    if (!activation || !target) return null_argument("activation or target");
    return sthi_activation_restore(activation, record, target, stream);
}

sth_status sth_activation_arrive(sth_activation *activation, sth_record record, sth_stream stream) {
    return activation ? sthi_activation_arrive(activation, record, stream) : null_argument("activation");
}

sth_status sth_activation_recomputed(sth_activation *activation, sth_record record) {
    return activation ? sthi_activation_recomputed(activation, record) : null_argument("activation");
}

sth_status sth_activation_let_go(sth_activation *activation, sth_record record, sth_stream stream) {
    return activation ? sthi_activation_let_go(activation, record, stream) : null_argument("activation");
}

sth_status sth_activation_release(sth_activation *activation, sth_record record, sth_stream stream) {
    return activation ? sthi_activation_release(activation, record, stream) : null_argument("activation");
}

sth_status sth_activation_state_get(sth_activation *activation, sth_record record,
                                    sth_activation_state *out_state) {
    if (!activation || !out_state) return null_argument("activation or out_state");
    return sthi_activation_state_get(activation, record, out_state);
}

sth_status sth_activation_stats_get(sth_activation *activation, sth_activation_stats *out_stats) {
    if (!activation || !out_stats) return null_argument("activation or out_stats");
    return sthi_activation_stats_get(activation, out_stats);
}
