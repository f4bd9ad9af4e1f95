/* A losslessly packed file: a safetensors file whose metadata says so. It holds the header of the original byte by
 * byte (of an index of shards that of each, and the index), which says what comes back, and each tensor of the
 * original under its own name: as it was, or packed, as U8. How long the pieces of packed tensors are stands in one
 * list for all. docs/lossless.md has the layout. Everything is compared with everything before a byte is packed out.
 * No locks. */
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/lossless.h"
#include "store/dtype.h"
#include "store/json.h"
#include "store/path.h"
#include "store/quant.h"
#include "store/safetensors.h"

enum { VERSION = 1, FILES_MOST = 10000, NAME_MOST = 200, SUM_BYTES = 16 };

typedef unsigned long long ull;

static sth_status corrupt(const sth_quant *slab, const sth_tensor_info *t, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "lossless", 0, slab->path, "%.300s: tensor '%.160s' at byte %llu: %s",
                     slab->path, t->name, (ull)t->offset, what);
}

bool sthi_original_name_is_fine(const char *name) {
    return sthi_path_is_plain(name) && !strchr(name, '/') && strlen(name) <= NAME_MOST &&
           strncmp(name, "state.json", strlen("state.json")) != 0;
}

/* ---- what describes the originals */

static sth_status check_name(const sth_quant *slab, const char *name) {
    if (name && sthi_original_name_is_fine(name)) return STH_OK;
    return sthi_fail(STH_CORRUPT_DATA, "lossless", 0, slab->path,
                     "%.300s: '%.200s' is no name of a file inside a folder", slab->path, name ? name : "?");
}

/* {"version": 1, "bytes": [n, ...]}, of shards also "files": [name, ...] and "index": name. */
static sth_status read_description(sth_quant *slab, json_t **out_bytes) {
    const json_t *all = slab->description, *files = json_object_get(all, "files"),
                 *index = json_object_get(all, "index");
    uint64_t version;
    *out_bytes = json_object_get(all, "bytes");
    if (!sthi_json_u64(json_object_get(all, "version"), &version))
        return sthi_quant_corrupt(slab, NULL, STHI_LOSSLESS_KEY " in its header has no version");
    if (version != VERSION)
        return sthi_fail(STH_UNSUPPORTED, "lossless", 0, slab->path,
                         "%.300s: is losslessly packed in version %llu; version %d is known: use a newer Stagehand",
                         slab->path, (ull)version, VERSION);
    size_t count = json_array_size(*out_bytes);
    if (!count || count > FILES_MOST || (!index && count != 1) || (index && json_array_size(files) != count))
        return sthi_quant_corrupt(slab, NULL, STHI_LOSSLESS_KEY " in its header does not say which files were packed");
    if (index) STHI_TRY(check_name(slab, json_string_value(index)));
    slab->originals.index_name = json_string_value(index);
    slab->originals.items = sthi_zalloc(count, sizeof *slab->originals.items);
    if (!slab->originals.items) return sthi_no_memory(slab->path, "the files packed in %.300s", slab->path);
    for (size_t i = 0; index && i < count; i++) {
        const char *name = json_string_value(json_array_get(files, i));
        STHI_TRY(check_name(slab, name));
        for (size_t k = 0; k < i; k++)
            if (strcmp(slab->originals.items[k].name, name) == 0 || strcmp(name, slab->originals.index_name) == 0)
                return sthi_quant_corrupt(slab, NULL, "two of the files packed in it have the same name");
        slab->originals.items[i].name = name;
    }
    return STH_OK;
}

/* One of the tensors that describe the others. */
static sth_status find_own(const sth_quant *slab, const char *name, sth_dtype dtype, int rank,
                           const sth_tensor_info **out) {
    char full[64];
    snprintf(full, sizeof full, STHI_LOSSLESS_PREFIX "%s", name);
    const sth_tensor_info *t = sthi_checkpoint_find(slab->checkpoint, full);
    if (!t)
        return sthi_fail(STH_CORRUPT_DATA, "lossless", 0, slab->path, "%.300s: tensor '%s' is missing", slab->path,
                         full);
    if (t->dtype != dtype || t->rank != rank) return corrupt(slab, t, "is of another dtype or rank than it must be");
    *out = t;
    return STH_OK;
}

static sth_status read_header(sth_quant *slab, uint32_t i, const json_t *bytes) {
    sthi_original *o = &slab->originals.items[i];
    char name[32], path[400];
    uint64_t whole;
    if (!sthi_json_u64(json_array_get(bytes, i), &whole))
        return sthi_quant_corrupt(slab, NULL, "the size of a file packed in it is no number");
    snprintf(name, sizeof name, "header.%u", i);
    STHI_TRY(find_own(slab, name, STH_DTYPE_U8, 1, &o->header));
    slab->originals.count = i + 1;
    snprintf(path, sizeof path, "%.300s: the original%s%.60s", slab->path, o->name ? " " : "", o->name ? o->name : "");
    return sthi_safetensors_parse_inner(&slab->checkpoint->files[o->header->file], o->header->offset, o->header->bytes,
                                        path, whole, i, &o->tensors);
}

static sth_status read_sizes(sth_quant *slab) {
    sthi_originals *o = &slab->originals;
    STHI_TRY(find_own(slab, "lengths", STH_DTYPE_U32, 1, &o->sizes));
    o->lengths = sthi_alloc((size_t)o->sizes->bytes);
    if (!o->lengths) return sthi_no_memory(slab->path, "the lengths of the pieces of %.300s", slab->path);
    return sthi_checkpoint_read(slab->checkpoint, o->sizes->file, o->sizes->offset, o->sizes->bytes, o->lengths);
}

/* ---- tensors */

static bool same_shape(const sth_tensor_info *a, const sth_tensor_info *b) {
    bool same = a->rank == b->rank && strcmp(a->spelling, b->spelling) == 0;
    for (int i = 0; same && i < a->rank; i++) same = a->shape[i] == b->shape[i];
    return same;
}

/* The pieces of a packed tensor, of which the lengths are the next ones in the list. */
static const char *wrong_pieces(const sthi_originals *o, const sth_tensor_info *t, const sth_tensor_info *packed,
                                uint64_t first, uint64_t *out_pieces) {
    sthi_lossless_form form = sthi_lossless_form_of((int)t->dtype);
    if (!form.bits || packed->dtype != STH_DTYPE_U8 || packed->rank != 1)
        return "is neither as the original's header has it nor packed";
    uint64_t elements = t->bytes / (form.bits / 8), together = sthi_lossless_together(form), sum = 0;
    uint64_t pieces = sthi_lossless_pieces(form, elements);
    if (!pieces || pieces > UINT32_MAX || !sthi_range_inside(first, pieces, o->sizes->shape[0]))
        return "has more pieces than there are lengths of, or none";
    for (uint64_t i = 0; i < pieces; i++) {
        uint64_t length = o->lengths[first + i], count = sthi_min_u64(together, elements - i * together);
        uint64_t most = sthi_lossless_bytes((int)t->dtype, count, count) + STHI_ALIGN;
        if (length % STHI_ALIGN || length >= most || !sthi_lossless_has_size((int)t->dtype, count, length))
            return "has a piece of a length that none of so many values can have";
        sum += length; /* of at most 2^32 numbers of 32 bits */
    }
    *out_pieces = pieces;
    return sum == packed->bytes ? NULL : "does not have the bytes of its pieces";
}

/* used: tensors of the container that stand for some of an original. inout_first: pieces so far. */
static sth_status take_tensor(sth_quant *slab, const sth_tensor_info *t, unsigned char *used, uint64_t *inout_first) {
    const sth_tensor_info *stored = sthi_checkpoint_find(slab->checkpoint, t->name);
    uint64_t pieces = 0;
    if (!stored)
        return sthi_fail(STH_CORRUPT_DATA, "lossless", 0, slab->path,
                         "%.300s: tensor '%.160s' of the original is missing", slab->path, t->name);
    if (used[stored - slab->checkpoint->tensors.items]++)
        return corrupt(slab, stored, "stands for two tensors of the originals");
    if (same_shape(t, stored)) return STH_OK;
    const char *wrong = wrong_pieces(&slab->originals, t, stored, *inout_first, &pieces);
    if (wrong) return corrupt(slab, stored, wrong);
    sth_quant_layer l = {.name = t->name, .encoding = STH_ENCODING_LOSSLESS, .out = 1, .tensor = t,
                         .in = t->bytes / (sthi_dtype_bits(t->dtype) / 8), .pieces = (uint32_t)pieces,
                         .lengths = slab->originals.lengths + *inout_first};
    l.padded_in = l.group = l.in;
    l.parts[STH_QUANT_PART_CODES] = stored;
    *inout_first += pieces;
    return sthi_quant_add(slab, &l);
}

static sth_status take_tensors(sth_quant *slab, unsigned char *used, uint64_t *out_count) {
    const sthi_originals *o = &slab->originals;
    uint64_t pieces = 0, count = 0;
    for (uint32_t i = 0; i < o->count; i++) {
        const sthi_tensors *all = &o->items[i].tensors;
        for (uint64_t k = 0; k < all->count; k++) STHI_TRY(take_tensor(slab, &all->items[k], used, &pieces));
        count += all->count;
    }
    *out_count = count;
    if (pieces == o->sizes->shape[0]) return STH_OK;
    return corrupt(slab, o->sizes, "has lengths of pieces that no tensor has");
}

static sth_status check_rest(const sth_quant *slab, uint64_t count) {
    const sthi_originals *o = &slab->originals;
    uint64_t own = o->count + 2 + (o->index != NULL), rows = count + o->count + (o->index != NULL);
    if (slab->checkpoint->tensors.count != count + own)
        return sthi_quant_corrupt(slab, NULL, "it has tensors that the original has not");
    if (o->sums->shape[0] == rows && o->sums->shape[1] == SUM_BYTES) return STH_OK;
    return corrupt(slab, o->sums, "does not have one checksum for each tensor");
}

sth_status sthi_quant_open_lossless(sth_quant *slab) {
    json_t *bytes = NULL;
    uint64_t count = 0;
    sthi_originals *o = &slab->originals;
    slab->format = STH_QUANT_LOSSLESS;
    STHI_TRY(read_description(slab, &bytes));
    for (uint32_t i = 0; i < json_array_size(bytes); i++) STHI_TRY(read_header(slab, i, bytes));
    if (o->index_name) STHI_TRY(find_own(slab, "index", STH_DTYPE_U8, 1, &o->index));
    STHI_TRY(find_own(slab, "xxh3_128", STH_DTYPE_U8, 2, &o->sums));
    STHI_TRY(read_sizes(slab));
    unsigned char *used = sthi_zalloc((size_t)slab->checkpoint->tensors.count, 1);
    if (!used) return sthi_no_memory(slab->path, "the tensors of %.300s", slab->path);
    sth_status status = take_tensors(slab, used, &count);
    sthi_free(used);
    return status == STH_OK ? check_rest(slab, count) : status;
}
