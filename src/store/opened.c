/* Files of checkpoints, opened for reading. See opened.h. A record of a checkpoint's files stays where it is while the
 * list grows: readers have its address. */
#include "store/opened.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"

sthi_access *sthi_opened_files(const sthi_opened *o, const sth_checkpoint *c) {
    for (uint32_t i = 0; i < o->count; i++)
        if (o->list[i].checkpoint == c) return o->list[i].files;
    return NULL;
}

static sth_status add_checkpoint(sthi_opened *o, sth_checkpoint *c, sthi_access **out) {
    sthi_opened_checkpoint *grown = sthi_realloc(o->list, o->count + 1, sizeof *grown);
    if (grown) o->list = grown;
    sthi_access *files = grown ? sthi_zalloc(c->file_count, sizeof *files) : NULL;
    if (!files) return sthi_no_memory(NULL, "the records of files");
    o->list[o->count++] = (sthi_opened_checkpoint){.checkpoint = c, .files = files};
    *out = files;
    return STH_OK;
}

sth_status sthi_opened_add(sthi_opened *o, sth_checkpoint *c, const sth_file_range *ranges, uint32_t range_count) {
    sthi_access *files = sthi_opened_files(o, c);
    if (!files) STHI_TRY(add_checkpoint(o, c, &files));
    for (uint32_t i = 0; i < range_count; i++)
        if (!files[ranges[i].file].file) sthi_access_open(&c->files[ranges[i].file], &files[ranges[i].file]);
    return STH_OK;
}

sthi_access *sthi_opened_nth(const sthi_opened *o, uint32_t n) {
    for (uint32_t i = 0; i < o->count; i++)
        for (uint32_t f = 0; f < o->list[i].checkpoint->file_count; f++)
            if (o->list[i].files[f].file && n-- == 0) return &o->list[i].files[f];
    return NULL;
}

void sthi_opened_close(sthi_opened *o) {
    sthi_access *file;
    for (uint32_t n = 0; (file = sthi_opened_nth(o, n)); n++) sthi_access_close(file);
    for (uint32_t i = 0; i < o->count; i++) sthi_free(o->list[i].files);
    sthi_free(o->list);
    *o = (sthi_opened){0};
}

static int by_place(const void *left, const void *right) {
    const sth_file_range *a = left, *b = right;
    return a->place_offset < b->place_offset ? -1 : a->place_offset > b->place_offset;
}

void sthi_ranges_sort(sth_file_range *ranges, uint32_t count) {
    if (count) qsort(ranges, count, sizeof *ranges, by_place);
}
