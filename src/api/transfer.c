/* Exported functions of stagehand/transfer.h: checks arguments, then calls src/quant. */
#include "stagehand/transfer.h"

#include "base/error.h"
#include "device/four_bits.h"
#include "quant/segment.h"

#define STHI_TEXT(name, text) text,
static const char *const names[] = {STH_TRANSFER_LIST(STHI_TEXT)};
#undef STHI_TEXT

const char *sth_transfer_name(sth_transfer encoding) {
    return (unsigned)encoding < STH_TRANSFER_COUNT ? names[encoding] : "?";
}

sth_status sth_transfer_layout(const sth_segment *tensors, uint32_t count, uint64_t piece_bytes, sth_segment *segments,
                               uint32_t capacity, uint32_t *out_count, uint64_t *out_packed_bytes) {
    if (!tensors || !count || !out_count || !out_packed_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_transfer_layout needs tensors and addresses for the results");
    return sthi_segments_layout(tensors, count, piece_bytes, segments, capacity, out_count, out_packed_bytes);
}

sth_status sth_transfer_fit(const sth_segment *tensors, uint32_t count, uint64_t piece_bytes, const void *place,
                            uint32_t threads, sth_segment *segments, uint32_t capacity, uint32_t *out_count,
                            uint64_t *out_packed_bytes) {
    if (!tensors || !count || (segments && !place) || !out_count || !out_packed_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL,
                         "sth_transfer_fit needs tensors, their values and addresses for the results");
    return sthi_segments_fit(tensors, count, piece_bytes, place, threads, segments, capacity, out_count,
                             out_packed_bytes);
}

uint64_t sth_transfer_largest(const sth_segment *tensor, uint64_t piece_bytes) {
    sth_segment whole = {0};
    if (!tensor) return 0;
    whole = *tensor;
    whole.stride = 0;
    return sthi_is_four_bits((int)whole.encoding) ? 0 : sthi_segment_piece(&whole, piece_bytes);
}

sth_status sth_transfer_encode(const sth_segment *segments, uint32_t count, const void *place, void *packed,
                               uint32_t threads, sth_transfer_error *inout_error) {
    if (!segments || !place || !packed)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "sth_transfer_encode needs segments and both images");
    STHI_TRY(sthi_segments_check(segments, count, UINT64_MAX, UINT64_MAX, "packed image"));
    return sthi_segments_encode(segments, count, place, packed, threads, inout_error, NULL);
}

sth_status sth_transfer_decode(const sth_segment *segments, uint32_t count, const void *packed, void *place) {
    if (!segments || !place || !packed)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "sth_transfer_decode needs segments and both images");
    STHI_TRY(sthi_segments_check(segments, count, UINT64_MAX, UINT64_MAX, "packed image"));
    sthi_segments_decode(segments, count, packed, place, 0);
    return STH_OK;
}
