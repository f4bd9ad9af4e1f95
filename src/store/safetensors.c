/* safetensors: 8 bytes of little-endian header length, a JSON object, then the data, to which all offsets
 * are relative. The header is hostile input: every length is checked against the file before it is
 * used. A tensor of a dtype that is unknown is bytes. No locks. */
#include "store/safetensors.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/header.h"
#include "store/json.h"
#include "store/sparse.h"

#define LENGTH_BYTES 8u
typedef unsigned long long ull;

static sth_status corrupt(const char *path, const char *tensor, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path, "%.300s: tensor '%.160s': %s", path, tensor,
                     what);
}

static uint64_t length_of(const unsigned char raw[LENGTH_BYTES]) {
    uint64_t length = 0;
    for (unsigned i = LENGTH_BYTES; i-- > 0;) length = length << 8 | raw[i];
    return length;
}

static sth_status read_length(const sthi_file *file, uint64_t *out) {
    if (file->size < LENGTH_BYTES)
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                         "%.300s: truncated: %u bytes wanted for the header's length, the file has %llu",
                         file->path, LENGTH_BYTES, (ull)file->size);
    unsigned char raw[LENGTH_BYTES];
    STHI_TRY(sthi_file_read(file, 0, LENGTH_BYTES, raw));
    *out = length_of(raw);
    return STH_OK;
}

static sth_status check_length(const sthi_file *file, uint64_t length) {
    if (length > STHI_JSON_MAX_BYTES)
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                         "%.300s: the header claims %llu bytes; the format allows %u", file->path,
                         (ull)length, STHI_JSON_MAX_BYTES);
    if (sthi_range_inside(LENGTH_BYTES, length, file->size)) return STH_OK;
    return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                     "%.300s: truncated: %llu bytes wanted for the header, %llu found", file->path,
                     (ull)length, (ull)(file->size - LENGTH_BYTES));
}

static sth_status check_metadata(const sthi_file *file, json_t *metadata) {
    const char *key;
    json_t *value;
    if (json_is_null(metadata)) return STH_OK;
    if (!json_is_object(metadata))
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                         "%.300s: __metadata__ is not an object", file->path);
    json_object_foreach (metadata, key, value) {
        if (json_is_string(value)) continue;
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                         "%.300s: __metadata__ entry '%.160s' is not text", file->path, key);
    }
    return STH_OK;
}

static sth_status read_offsets(const char *path, const json_t *offsets, uint64_t data_begin,
                               sth_tensor_info *tensor) {
    uint64_t begin, end;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return corrupt(path, tensor->name, "data_offsets is not a list of two numbers");
    if (!sthi_json_u64(json_array_get(offsets, 0), &begin) ||
        !sthi_json_u64(json_array_get(offsets, 1), &end))
        return corrupt(path, tensor->name, "data_offsets are not integers of at least 0");
    if (end < begin) return corrupt(path, tensor->name, "data_offsets end before they begin");
    if (!sthi_add_u64(data_begin, begin, &tensor->offset))
        return corrupt(path, tensor->name, "data_offsets overflow 64 bits");
    tensor->bytes = end - begin;
    return STH_OK;
}

static sth_status read_tensor(const sthi_file *file, const char *name, const json_t *entry,
                              uint64_t data_begin, sth_tensor_info *tensor) {
    tensor->name = name;
    if (!json_is_object(entry)) return corrupt(file->path, name, "its description is not an object");
    const json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape");
    if (!dtype) return corrupt(file->path, name, "dtype is missing");
    if (!shape) return corrupt(file->path, name, "shape is missing");
    STHI_TRY(read_offsets(file->path, json_object_get(entry, "data_offsets"), data_begin, tensor));
    return sthi_json_type_and_shape(file->path, dtype, shape, tensor);
}

static sth_status add_tensors(const sthi_file *file, uint32_t index, json_t *root, uint64_t data_begin,
                              sthi_tensors *list) {
    const char *name;
    json_t *entry;
    json_object_foreach (root, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            STHI_TRY(check_metadata(file, entry));
            continue;
        }
        sth_tensor_info tensor = {.file = index, .scale = 1};
        STHI_TRY(read_tensor(file, name, entry, data_begin, &tensor));
        STHI_TRY(sthi_tensors_add(list, &tensor));
    }
    return STH_OK;
}

/* As the format's own reader has it. An index that places some of the file's tensors elsewhere changes nothing. */
static sth_status check_no_gap(const sthi_file *file, const sth_tensor_info *tensors, uint64_t count, uint64_t at) {
    for (uint64_t i = 0; i < count; i++) {
        const sth_tensor_info *t = &tensors[i];
        if (t->offset != at)
            return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                             "%.300s: tensor '%.160s' begins at byte %llu of the file; the one before it, or the "
                             "header, ends at byte %llu",
                             file->path, t->name, (ull)t->offset, (ull)at);
        at += t->bytes;
    }
    if (at == file->size) return STH_OK;
    return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                     "%.300s: %llu bytes from byte %llu on belong to no tensor", file->path, (ull)(file->size - at),
                     (ull)at);
}

/* The tensors from `first` on have been read: where they lie, and that they were written. */
static sth_status check_places(const sthi_file *file, uint64_t data_begin, sthi_tensors *list, uint64_t first) {
    uint64_t holes = 0, count = list->count - first;
    sth_tensor_info *tensors = count ? list->items + first : NULL;
    if (tensors) STHI_TRY(sthi_tensors_check_extents(tensors, count, file, data_begin, &holes));
    STHI_TRY(check_no_gap(file, tensors, count, data_begin));
    return tensors ? sthi_sparse_check(file, tensors, count) : STH_OK;
}

static void drop_from(sthi_tensors *list, uint64_t first) {
    while (list->count > first) sthi_tensors_drop_name(&list->items[--list->count]);
}

static sth_status parse_metadata(const sthi_file *file, const char *text, const sthi_header *header) {
    json_t *metadata = NULL;
    if (!header->metadata) return STH_OK;
    uint64_t at = LENGTH_BYTES + (uint64_t)(header->metadata - text);
    STHI_TRY(sthi_json_parse(file, at, header->metadata, header->metadata_bytes, &metadata));
    sth_status status = check_metadata(file, metadata);
    json_decref(metadata);
    return status;
}

/* *out_odd: only a parser that knows all of JSON can say what is in the header, or what is wrong; the list is as it
 * was. */
static sth_status parse_usual(const sthi_file *file, uint32_t index, const char *text, uint64_t length,
                              sthi_tensors *list, bool *out_odd) {
    sthi_header header;
    sth_tensor_info tensor;
    uint64_t first = list->count, data_begin = LENGTH_BYTES + length;
    char *room = sthi_alloc((size_t)length);
    if (!room) return sthi_no_memory(file->path, "the header of %.300s", file->path);
    sthi_header_begin(&header, text, (size_t)length, room);
    sth_status status = STH_OK;
    while (status == STH_OK && sthi_header_next(&header, &tensor)) {
        tensor.file = index;
        tensor.offset += data_begin; /* both are far below 2^63 */
        status = sthi_tensors_add(list, &tensor);
    }
    sthi_free(room);
    if (status == STH_OK && !header.odd) status = parse_metadata(file, text, &header);
    if (status == STH_OK && !header.odd) status = check_places(file, data_begin, list, first);
    *out_odd = header.odd || status == STH_CORRUPT_DATA; /* a name that comes twice is in the wrong place, too */
    if (!*out_odd) return status;
    drop_from(list, first);
    return STH_OK;
}

static sth_status parse_tree(const sthi_file *file, uint32_t index, const char *text, uint64_t length,
                             sthi_tensors *list) {
    json_t *root = NULL;
    uint64_t first = list->count, data_begin = LENGTH_BYTES + length;
    STHI_TRY(sthi_json_parse(file, LENGTH_BYTES, text, (size_t)length, &root));
    sth_status status = json_is_object(root)
                            ? add_tensors(file, index, root, data_begin, list)
                            : sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                                        "%.300s: the header is not a JSON object", file->path);
    json_decref(root);
    return status == STH_OK ? check_places(file, data_begin, list, first) : status;
}

static sth_status parse_text(const sthi_file *file, uint32_t index, const char *text, uint64_t length,
                             sthi_tensors *list) {
    bool odd = false;
    STHI_TRY(parse_usual(file, index, text, length, list, &odd));
    return odd ? parse_tree(file, index, text, length, list) : STH_OK;
}

sth_status sthi_safetensors_parse(const sthi_file *file, uint32_t index, sthi_tensors *list) {
    uint64_t length = 0;
    char *text = NULL;
    STHI_TRY(read_length(file, &length));
    STHI_TRY(check_length(file, length));
    STHI_TRY(sthi_json_read_text(file, LENGTH_BYTES, length, &text));
    sth_status status = parse_text(file, index, text, length, list);
    sthi_free(text);
    return status;
}

sth_status sthi_safetensors_parse_inner(const sthi_file *file, uint64_t at, uint64_t bytes, const char *path,
                                        uint64_t whole, uint32_t index, sthi_tensors *list) {
    const sthi_file other = {.path = (char *)(uintptr_t)path, .fd = -1, .size = whole};
    unsigned char raw[LENGTH_BYTES];
    char *text = NULL;
    uint64_t length = bytes < LENGTH_BYTES ? UINT64_MAX : bytes - LENGTH_BYTES;
    STHI_TRY(check_length(&other, length));
    STHI_TRY(sthi_file_read(file, at, LENGTH_BYTES, raw));
    if (length_of(raw) != length)
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                         "%.300s: the header claims %llu bytes; %llu are stored", path, (ull)length_of(raw),
                         (ull)length);
    STHI_TRY(sthi_json_read_text(file, at + LENGTH_BYTES, length, &text));
    sth_status status = parse_text(&other, index, text, length, list);
    sthi_free(text);
    return status;
}

sth_status sthi_safetensors_metadata(const sthi_file *file, const char *const *keys, int count, json_t **out,
                                     int *out_key) {
    uint64_t length = 0;
    json_t *root = NULL;
    const char *text = NULL;
    sth_status status = STH_OK;
    *out = NULL;
    STHI_TRY(read_length(file, &length));
    STHI_TRY(check_length(file, length));
    STHI_TRY(sthi_json_read(file, LENGTH_BYTES, length, &root));
    for (int k = 0; !text && k < count; k++) {
        const json_t *value = json_object_get(json_object_get(root, "__metadata__"), keys[k]);
        text = json_string_value(value);
        if (text) status = sthi_json_parse(file, LENGTH_BYTES, text, json_string_length(value), out);
        *out_key = k;
    }
    json_decref(root);
    return status;
}

sth_status sthi_safetensors_probe(const sthi_file *file, int *out_yes) {
    char start[LENGTH_BYTES + 1];
    *out_yes = 0;
    if (file->size < sizeof start) return STH_OK;
    STHI_TRY(sthi_file_read(file, 0, sizeof start, start));
    *out_yes = start[LENGTH_BYTES] == '{';
    return STH_OK;
}
