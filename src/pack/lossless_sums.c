/* The rows of checksums: the tensors of each original in the order on disk, then the headers, then the index. Pure but
 * for the read. */
#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/memory.h"
#include "pack/lossless.h"

static int digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool sthi_sum_of_text(const char *text, uint8_t out[STHI_SUM_BYTES]) {
    if (!text || strlen(text) != 2 * STHI_SUM_BYTES) return false;
    for (int i = 0; i < STHI_SUM_BYTES; i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

void sthi_sum_digits(uint64_t high, uint64_t low, char out[33]) {
    snprintf(out, 33, "%016llx%016llx", (unsigned long long)high, (unsigned long long)low);
}

void sthi_sum_text(const void *bytes, uint64_t count, char out[33]) {
    XXH128_hash_t h = XXH3_128bits(bytes, (size_t)count);
    sthi_sum_digits(h.high64, h.low64, out);
}

sth_status sthi_sums_read(const sth_quant *slab, uint8_t **out) {
    const sth_tensor_info *t = slab->originals.sums;
    uint8_t *sums = sthi_alloc((size_t)t->bytes);
    if (!sums) return sthi_no_memory(slab->path, "the checksums of %.300s", slab->path);
    sth_status status = sthi_checkpoint_read(slab->checkpoint, t->file, t->offset, t->bytes, sums);
    if (status == STH_OK) *out = sums;
    else sthi_free(sums);
    return status;
}

sth_status sthi_sums_each(const sth_quant *slab, sthi_sum_function each, void *context) {
    const sthi_originals *o = &slab->originals;
    uint64_t row = 0;
    for (uint32_t i = 0; i < o->count; i++)
        for (uint64_t k = 0; k < o->items[i].tensors.count; k++)
            STHI_TRY(each(context, row++, &(sthi_sum_row){&o->items[i].tensors.items[k], i}));
    for (uint32_t i = 0; i < o->count; i++) STHI_TRY(each(context, row++, &(sthi_sum_row){NULL, i}));
    return o->index ? each(context, row, &(sthi_sum_row){NULL, o->count}) : STH_OK;
}
