/* v1: a zip with a pickle {manifest, layers} and the tensors' bytes as members. Makes a checkpoint of it, whose
 * tensors are named as in v2, so that everything after opening is the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/dtype.h"
#include "store/path.h"
#include "store/pickle.h"
#include "store/quant.h"
#include "store/sparse.h"

#define PICKLE "data.pkl"
typedef unsigned long long ull;
typedef sthi_pickle_node node;

typedef struct reader {
    sth_quant *slab;
    const sthi_file *file;
    char *root; /* what the members' names begin with, '/' included */
    sthi_pickle pickle;
    const node **layers; /* cells of the dict `layers`: name, value; sorted by name */
    uint64_t layer_count;
    uint64_t pickle_at;
} reader;

static sth_status out_of_memory(const reader *r) {
    return sthi_no_memory(r->slab->path, "opening %.300s", r->slab->path);
}

/* CORRUPT_DATA about the value `at`; NULL for the pickle as a whole. */
static sth_status corrupt(const reader *r, const char *layer, const node *at, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "slab", 0, r->slab->path, "%.300s: byte %llu: %s%.160s%s%s", r->slab->path,
                     (ull)(r->pickle_at + (at ? at->at : 0)), layer ? "layer '" : "", layer ? layer : "",
                     layer ? "': " : "", what);
}

/* ---- the zip ---- */

static sth_status find_pickle(reader *r, const sthi_zip_member **out) {
    const sthi_zip *zip = &r->slab->zip;
    const sthi_zip_member *found = NULL;
    for (uint64_t i = 0; i < zip->count; i++) {
        if (!sthi_path_ends_with(zip->members[i].name, "/" PICKLE)) continue;
        if (found) return sthi_quant_corrupt(r->slab, NULL, "it has two members named " PICKLE);
        found = &zip->members[i];
    }
    if (!found) return sthi_quant_corrupt(r->slab, NULL, "it has no member " PICKLE ": not a file of torch.save");
    r->root = sthi_strdup(found->name);
    if (!r->root) return out_of_memory(r);
    r->root[strlen(found->name) - strlen(PICKLE)] = '\0';
    *out = found;
    return STH_OK;
}

static const sthi_zip_member *member(const reader *r, const char *folder, const char *name) {
    char full[512];
    int length = snprintf(full, sizeof full, "%s%s%s", r->root, folder, name);
    return length > 0 && (size_t)length < sizeof full ? sthi_zip_find(&r->slab->zip, full) : NULL;
}

static sth_status check_byte_order(const reader *r) {
    char text[7] = "";
    const sthi_zip_member *m = member(r, "", "byteorder");
    if (!m) return STH_OK;
    if (m->bytes < sizeof text) STHI_TRY(sthi_file_read(r->file, m->offset, m->bytes, text));
    return strcmp(text, "little") == 0 ? STH_OK
                                       : sthi_fail(STH_UNSUPPORTED, "slab", 0, r->slab->path,
                                                   "%.300s: its byte order must be 'little'", r->slab->path);
}

static sth_status parse_pickle(reader *r, const sthi_zip_member *m) {
    if (m->bytes > STHI_PICKLE_MAX_BYTES) return sthi_quant_corrupt(r->slab, NULL, "its pickle is larger than 16 MiB");
    unsigned char *bytes = sthi_alloc((size_t)m->bytes);
    if (!bytes) return out_of_memory(r);
    r->pickle_at = m->offset;
    sth_status status = sthi_file_read(r->file, m->offset, m->bytes, bytes);
    if (status == STH_OK && crc32(0, bytes, (uInt)m->bytes) != m->crc)
        status = corrupt(r, NULL, NULL, "the pickle's checksum is wrong; an interrupted download?");
    if (status == STH_OK)
        status = sthi_pickle_parse(r->slab->path, m->offset, bytes, (size_t)m->bytes, &r->pickle);
    sthi_free(bytes);
    return status;
}

/* ---- fields ---- */

static const char *text_of(const node *dict, const char *key, const char *otherwise) {
    const node *value = sthi_pickle_get(dict, key);
    if (!value) return otherwise;
    return value->kind == STHI_PICKLE_TEXT ? value->text : NULL;
}

static bool number_of(const node *dict, const char *key, uint64_t otherwise, uint64_t *out) {
    const node *value = sthi_pickle_get(dict, key);
    *out = value && value->kind == STHI_PICKLE_INT ? (uint64_t)value->integer : otherwise;
    return !value || (value->kind == STHI_PICKLE_INT && value->integer >= 0);
}

static sth_status check_manifest(const reader *r, const node *manifest) {
    const char *version = text_of(manifest, "quant_version", "bp8"), *layout = text_of(manifest, "layout", "rowwise");
    uint64_t pack;
    if (!version || !layout || !number_of(manifest, "pack_k", 64, &pack))
        return corrupt(r, NULL, manifest, "a field of the manifest has the wrong type");
    bool known = (strcmp(version, "bp8") == 0 || strcmp(version, "squareq_bp8_v1") == 0) &&
                 (strcmp(layout, "rowwise") == 0 || strcmp(layout, "rowwise_sym_int8") == 0);
    return known ? STH_OK
                 : sthi_fail(STH_UNSUPPORTED, "slab", 0, r->slab->path,
                             "%.300s: quant_version '%.60s' with layout '%.60s' is not known", r->slab->path, version,
                             layout);
}

/* ---- the layers' dict, sorted, so that many names cost n log n ---- */

static int by_key(const void *left, const void *right) {
    return strcmp((*(const node *const *)left)->text, (*(const node *const *)right)->text);
}

static sth_status sort_layers(reader *r, const node *dict) {
    uint64_t n = 0;
    r->layer_count = dict->items.count / 2;
    r->layers = sthi_zalloc((size_t)r->layer_count, 2 * sizeof *r->layers);
    if (!r->layers) return out_of_memory(r);
    for (const sthi_pickle_cell *cell = dict->items.first; cell; cell = cell->next->next) {
        r->layers[n++] = cell->value;
        r->layers[n++] = cell->next->value;
    }
    if (n) qsort(r->layers, (size_t)r->layer_count, 2 * sizeof *r->layers, by_key);
    for (uint64_t i = 1; i < r->layer_count; i++)
        if (strcmp(r->layers[2 * i]->text, r->layers[2 * i - 2]->text) == 0)
            return corrupt(r, r->layers[2 * i]->text, r->layers[2 * i], "it is there twice");
    return STH_OK;
}

static const node *layer_tensors(const reader *r, const char *name) {
    node key = {.kind = STHI_PICKLE_TEXT, .text = name};
    const node *pointer = &key;
    if (!r->layer_count) return NULL;
    const node **found = bsearch(&pointer, r->layers, (size_t)r->layer_count, 2 * sizeof *r->layers, by_key);
    return found ? found[1] : NULL;
}

/* ---- tensors ---- */

/* Rank, shape and size of a tensor whose elements follow one another in rows. */
static bool read_shape(const node *tensor, sth_tensor_info *t) {
    uint64_t elements = 1, extents[2] = {1, 1};
    const sthi_pickle_cell *size = tensor->tensor.size->items.first, *stride = tensor->tensor.stride->items.first;
    uint32_t rank = tensor->tensor.size->items.count;
    if (rank < 1 || rank > 2 || tensor->tensor.stride->items.count != rank) return false;
    for (uint32_t i = 0; i < rank; i++, size = size->next) {
        if (size->value->kind != STHI_PICKLE_INT || size->value->integer < 1) return false;
        extents[i] = (uint64_t)size->value->integer;
        if (!sthi_mul_u64(elements, extents[i], &elements)) return false;
        t->shape[i] = extents[i];
    }
    for (uint32_t i = 0; i < rank; i++, stride = stride->next) {
        uint64_t wanted = rank == 2 && i == 0 ? extents[1] : 1;
        if (stride->value->kind != STHI_PICKLE_INT) return false;
        if (extents[i] > 1 && (uint64_t)stride->value->integer != wanted) return false;
    }
    t->rank = (int)rank;
    return sthi_mul_u64(elements, sthi_dtype_bits(t->dtype) / 8, &t->bytes);
}

static sth_status place_tensor(const reader *r, const char *layer, const node *tensor, sth_tensor_info *t) {
    const node *storage = tensor->tensor.storage;
    uint64_t stored, begin;
    t->dtype = storage->storage.dtype;
    if (!read_shape(tensor, t)) return corrupt(r, layer, tensor, "a tensor is empty, or not stored row by row");
    const sthi_zip_member *m = member(r, "data/", storage->storage.key);
    if (!m) return corrupt(r, layer, storage, "the member that holds a tensor is missing");
    uint64_t each = sthi_dtype_bits(t->dtype) / 8;
    if (!sthi_mul_u64(storage->storage.count, each, &stored) || stored != m->bytes)
        return sthi_fail(STH_CORRUPT_DATA, "slab", 0, r->slab->path,
                         "%.300s: tensor '%.160s': member '%.160s' at byte %llu has %llu bytes; the pickle says %llu "
                         "elements of %s",
                         r->slab->path, t->name, m->name, (ull)m->offset, (ull)m->bytes, (ull)storage->storage.count,
                         sthi_dtype_name(t->dtype));
    if (tensor->tensor.offset < 0 || !sthi_mul_u64((uint64_t)tensor->tensor.offset, each, &begin) ||
        !sthi_range_inside(begin, t->bytes, stored))
        return corrupt(r, layer, tensor, "a tensor reaches past its storage");
    t->offset = m->offset + begin;
    return STH_OK;
}

static const char *const keys[] = {"qweight", "scale", "zero_point", "bias"};

/* Adds the tensors of a layer to the checkpoint under their names as in v2. */
static sth_status add_tensors(const reader *r, const char *layer, const node *dict, uint64_t has_bias) {
    uint32_t known = 0;
    if (!sthi_pickle_is_record(dict)) return corrupt(r, layer, dict, "its tensors are not a dict with distinct keys");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const node *tensor = sthi_pickle_get(dict, keys[i]);
        if (!tensor && i == 3) continue;
        if (!tensor || tensor->kind != STHI_PICKLE_TENSOR)
            return corrupt(r, layer, dict,
                           "qweight, scale or zero_point is missing, or one of its values is no tensor");
        size_t size = strlen(layer) + 16;
        char *name = sthi_alloc(size);
        if (!name) return out_of_memory(r);
        snprintf(name, size, "%s.%s", layer, keys[i]);
        sth_tensor_info t = {.name = name, .scale = 1};
        sth_status status = place_tensor(r, layer, tensor, &t);
        if (status == STH_OK) status = sthi_tensors_add(&r->slab->checkpoint->tensors, &t);
        sthi_free(name);
        STHI_TRY(status);
        known++;
    }
    if (dict->items.count != 2 * known) return corrupt(r, layer, dict, "it has values that are not known");
    if ((known == 4) != (has_bias != 0)) return corrupt(r, layer, dict, "the manifest disagrees about its bias");
    return STH_OK;
}

/* ---- layers ---- */

typedef struct v1_layer {
    const char *name;
    uint64_t out, in, padded, has_bias;
} v1_layer;

static sth_status read_entry(const reader *r, const node *entry, v1_layer *l) {
    if (!sthi_pickle_is_record(entry))
        return corrupt(r, NULL, entry, "an entry of the manifest is not a dict with distinct keys");
    const node *bias = sthi_pickle_get(entry, "has_bias");
    l->name = text_of(entry, "name", NULL);
    if (!l->name || !*l->name) return corrupt(r, NULL, entry, "an entry of the manifest has no name");
    bool sound = number_of(entry, "out", 0, &l->out) && number_of(entry, "inp", 0, &l->in) &&
                 number_of(entry, "padded_in", l->in, &l->padded) && (!bias || bias->kind == STHI_PICKLE_BOOL);
    l->has_bias = bias && bias->integer;
    if (!sound || l->padded < l->in || !l->out || !l->in)
        return corrupt(r, l->name, entry, "its sizes in the manifest make no sense");
    return STH_OK;
}

static sth_status for_each_entry(reader *r, const node *list, sth_status (*act)(reader *r, const v1_layer *l)) {
    for (const sthi_pickle_cell *cell = list->items.first; cell; cell = cell->next) {
        v1_layer l;
        STHI_TRY(read_entry(r, cell->value, &l));
        STHI_TRY(act(r, &l));
    }
    return STH_OK;
}

static sth_status add_layer_tensors(reader *r, const v1_layer *l) {
    const node *tensors = layer_tensors(r, l->name);
    if (!tensors) return corrupt(r, l->name, NULL, "it is in the manifest but not among the layers");
    return add_tensors(r, l->name, tensors, l->has_bias);
}

static sth_status add_layer(reader *r, const v1_layer *l) {
    sth_quant_layer layer = {.name = l->name, .encoding = STH_ENCODING_INT8_ROW, .out = l->out, .in = l->in,
                            .padded_in = l->padded, .group = l->padded};
    const sthi_quant_want wanted[] = {
        {STH_QUANT_PART_CODES, STH_DTYPE_I8, 2, {l->out, l->padded}},
        {STH_QUANT_PART_SCALES, STH_DTYPE_F32, 1, {l->out}},
        {STH_QUANT_PART_ZERO_POINTS, STH_DTYPE_F32, 1, {l->out}},
        {STH_QUANT_PART_BIAS, STH_DTYPE_F32, 1, {l->out}},
    };
    char suffix[16];
    for (size_t i = 0; i < (l->has_bias ? 4 : 3); i++) {
        snprintf(suffix, sizeof suffix, ".%s", keys[i]);
        STHI_TRY(sthi_quant_take_suffixed(r->slab, l->name, suffix, &wanted[i], &layer));
    }
    return sthi_quant_add(r->slab, &layer);
}

static sth_status read_pickled(reader *r) {
    const node *root = r->pickle.root;
    bool record = sthi_pickle_is_record(root);
    const node *manifest = record ? sthi_pickle_get(root, "manifest") : NULL,
               *layers = record ? sthi_pickle_get(root, "layers") : NULL,
               *list = manifest && sthi_pickle_is_record(manifest) ? sthi_pickle_get(manifest, "layers") : NULL;
    if (!layers || layers->kind != STHI_PICKLE_DICT || !list || list->kind != STHI_PICKLE_LIST)
        return corrupt(r, NULL, root, "not a slab: its pickle is not {manifest: {layers: [...]}, layers: {...}}");
    sth_checkpoint *c = r->slab->checkpoint;
    STHI_TRY(check_manifest(r, manifest));
    STHI_TRY(sort_layers(r, layers));
    if (list->items.count != r->layer_count)
        return corrupt(r, NULL, list, "manifest and layers have different numbers of entries");
    STHI_TRY(for_each_entry(r, list, add_layer_tensors));
    STHI_TRY(sthi_tensors_check_extents(c->tensors.items, c->tensors.count, r->file, 0, &c->holes[0]));
    STHI_TRY(sthi_sparse_check(r->file, c->tensors.items, c->tensors.count));
    STHI_TRY(sthi_checkpoint_index_names(c, r->slab->path));
    return for_each_entry(r, list, add_layer);
}

static sth_status read_all(reader *r) {
    const sthi_zip_member *pickle = NULL;
    STHI_TRY(sthi_zip_read(r->file, &r->slab->zip));
    STHI_TRY(find_pickle(r, &pickle));
    STHI_TRY(check_byte_order(r));
    STHI_TRY(parse_pickle(r, pickle));
    return read_pickled(r);
}

sth_status sthi_quant_open_v1(sth_quant *slab, const char *path) {
    reader r = {.slab = slab};
    slab->format = STH_QUANT_V1;
    slab->checkpoint = sthi_zalloc(1, sizeof *slab->checkpoint);
    if (!slab->checkpoint) return out_of_memory(&r);
    STHI_TRY(sthi_checkpoint_add_file(slab->checkpoint, path));
    r.file = &slab->checkpoint->files[0];
    sth_status status = read_all(&r);
    sthi_free(r.root);
    sthi_free(r.layers);
    sthi_pickle_fini(&r.pickle);
    return status;
}
