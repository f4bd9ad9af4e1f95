/* Writes that nobody announces: a host image may be changed through numpy, or through a view whose version
 * counter is its own. A watched unit keeps a hash of sampled lines of its image, taken before its copy was
 * issued, and the image is sampled again before that copy is first used in a later epoch. An epoch begins
 * with a step and where the caller says that its code has run in between (sth_runtime_fence).
 *
 * Tensors of up to 16 KiB are hashed whole; of larger ones 128 lines of 64 bytes, spread evenly, first and
 * last included. Each tensor of a unit has its own: the lines of a large weight miss the bias behind it. A
 * write that misses all of them is not seen: callers that write little should say so
 * (sth_unit_mark_written). Lock held throughout. The image is read while others may write it: a torn read
 * hashes to something else, which is what is wanted. */
#include "load/fingerprint.h"

#define XXH_INLINE_ALL
#include <string.h>
#include <xxhash.h>

#include "base/arith.h"
#include "load/names.h"
#include "state/state.h"

enum { LINES = 128, LINE = 64, WHOLE_MAX = 16 << 10 };

uint64_t sthi_fingerprint(const uint8_t *image, uint64_t bytes) {
    if (bytes <= WHOLE_MAX) return XXH3_64bits(image, bytes);
    uint8_t sample[LINES * LINE];
    uint64_t last = bytes - LINE, step = last / (LINES - 1) / LINE * LINE;
    for (uint64_t i = 0; i + 1 < LINES; i++) memcpy(sample + i * LINE, image + i * step, LINE);
    memcpy(sample + sizeof sample - LINE, image + last, LINE);
    return XXH3_64bits(sample, sizeof sample);
}

uint64_t sthi_fingerprint_place(const sthi_unit *u, const uint8_t *image, uint64_t bytes) {
    if (u->tensor_count < 2) return sthi_fingerprint(image, bytes);
    uint64_t both[2] = {0, 0};
    for (uint32_t i = 0; i < u->tensor_count; i++) {
        uint64_t begin = i ? u->tensors[i].place_offset : 0;
        uint64_t end = i + 1 < u->tensor_count ? sthi_min_u64(u->tensors[i + 1].place_offset, bytes) : bytes;
        if (begin >= end) continue;
        both[1] = sthi_fingerprint(image + begin, end - begin);
        both[0] = XXH3_64bits(both, sizeof both);
    }
    return both[0];
}

bool sthi_watched(const sthi_unit *u) {
    bool has_image = u->host && (!u->segments || u->master);
    return has_image && (u->flags & (STH_UNIT_WRITABLE | STH_UNIT_WATCHED));
}

/* What is sampled: the image, or what a packed image was encoded from. */
static uint64_t sample(const sthi_unit *u) {
    return u->segments ? sthi_fingerprint_place(u, u->master, u->bytes)
                       : sthi_fingerprint_place(u, u->host, u->host_bytes);
}

uint64_t sthi_fingerprint_master(const sthi_unit *u) { return sthi_watched(u) ? sample(u) : 0; }

/* A sample shows some writes, not all: after a silent write to several units the device may hold new values of one and
 * old values of another. A caller that promised not to write silently gets an error instead. */
static sth_status refuse_silent_write(const sthi_unit *u) {
    return sthi_fail(STH_INVALID_STATE, NULL, 0, u->name,
                     "'%.160s' (unit '%.160s') was written between two steps without a word, in a runtime that was "
                     "told that nobody does so: write inside `with runtime.writing():`, do it again there, or wrap "
                     "with inference_mode=False (C: sth_unit_mark_written after the write)",
                     sthi_tensor_name(u, 0), u->name);
}

sth_status sthi_fingerprint_compare(sth_runtime *rt, uint32_t unit) {
    sthi_unit *u = &rt->units[unit];
    sthi_slot *s = &rt->places.slots[u->slot];
    if (!sthi_watched(u) || u->seen_epoch == rt->step.epoch) return STH_OK;
    bool differs = sample(u) != u->fingerprint;
    if (differs && rt->options.read_only && !s->stale) return refuse_silent_write(u);
    u->seen_epoch = rt->step.epoch;
    s->stale = s->stale || differs;
    return STH_OK;
}
