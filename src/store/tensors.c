/* The list of tensors and the check of their extents: sorted once, then one pass, so that a header of
 * many tensors costs n log n. No locks, no I/O. */
#include "store/tensors.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/dtype.h"

typedef unsigned long long ull;

static sth_status grow(sthi_tensors *list) {
    uint64_t capacity = list->capacity ? list->capacity * 2 : 64;
    sth_tensor_info *items = sthi_realloc(list->items, (size_t)capacity, sizeof *items);
    if (!items) return sthi_no_memory(NULL, "%llu tensor records", (ull)capacity);
    list->items = items;
    list->capacity = capacity;
    return STH_OK;
}

sth_status sthi_tensors_add(sthi_tensors *list, const sth_tensor_info *tensor) {
    if (list->count == list->capacity) STHI_TRY(grow(list));
    bool other = tensor->dtype == STH_DTYPE_OTHER;
    size_t length = strlen(tensor->name) + 1, more = other ? strlen(tensor->spelling) + 1 : 0;
    char *name = sthi_alloc(length + more);
    if (!name) return sthi_no_memory(tensor->name, "a tensor's name");
    memcpy(name, tensor->name, length);
    if (other) memcpy(name + length, tensor->spelling, more);
    sth_tensor_info *added = &list->items[list->count++];
    *added = *tensor;
    added->name = name;
    added->spelling = other ? name + length : sthi_dtype_name(tensor->dtype);
    return STH_OK;
}

void sthi_tensors_drop_name(sth_tensor_info *tensor) {
    sthi_free((void *)(uintptr_t)tensor->name);
    tensor->name = NULL;
}

void sthi_tensors_fini(sthi_tensors *list) {
    for (uint64_t i = 0; i < list->count; i++) sthi_tensors_drop_name(&list->items[i]);
    sthi_free(list->items);
    *list = (sthi_tensors){0};
}

static int by_extent(const void *left, const void *right) {
    const sth_tensor_info *a = left, *b = right;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

static bool in_order(const sth_tensor_info *tensors, uint64_t count) {
    for (uint64_t i = 1; i < count; i++)
        if (by_extent(&tensors[i - 1], &tensors[i]) > 0) return false;
    return true;
}

static sth_status check_inside(const sth_tensor_info *t, const sthi_file *file) {
    if (sthi_range_inside(t->offset, t->bytes, file->size)) return STH_OK;
    uint64_t found = t->offset < file->size ? file->size - t->offset : 0;
    return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                     "%.300s: tensor '%.160s' is truncated: %llu bytes wanted at byte %llu, %llu found (the "
                     "file has %llu bytes); an interrupted download?",
                     file->path, t->name, (ull)t->bytes, (ull)t->offset, (ull)found, (ull)file->size);
}

static sth_status fail_overlap(const sth_tensor_info *a, const sth_tensor_info *b, const sthi_file *file) {
    return sthi_fail(
        STH_CORRUPT_DATA, "safetensors", 0, file->path,
        "%.240s: tensors '%.120s' (bytes %llu to %llu) and '%.120s' (bytes %llu to %llu) overlap", file->path,
        a->name, (ull)a->offset, (ull)(a->offset + a->bytes), b->name, (ull)b->offset,
        (ull)(b->offset + b->bytes));
}

sth_status sthi_tensors_check_extents(sth_tensor_info *tensors, uint64_t count, const sthi_file *file,
                                      uint64_t data_begin, uint64_t *out_holes) {
    if (!in_order(tensors, count)) qsort(tensors, (size_t)count, sizeof *tensors, by_extent);
    uint64_t covered = 0, end = data_begin;
    const sth_tensor_info *last = NULL;
    for (uint64_t i = 0; i < count; i++) {
        const sth_tensor_info *t = &tensors[i];
        STHI_TRY(check_inside(t, file));
        if (!t->bytes) continue;
        if (last && t->offset < end) return fail_overlap(last, t, file);
        last = t;
        end = t->offset + t->bytes;
        covered += t->bytes;
    }
    *out_holes = file->size - data_begin - covered;
    return STH_OK;
}
