/* JSON through jansson, which bounds nesting and reports the byte of an error. Every value from the text
 * is checked for its type before use. No locks; the parsed tree belongs to the caller. */
#include "store/json.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/dtype.h"

typedef unsigned long long ull;

sth_status sthi_json_parse(const sthi_file *file, uint64_t offset, const char *text, size_t bytes, json_t **out) {
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (root) {
        *out = root;
        return STH_OK;
    }
    /* jansson says nothing at all when an allocation fails halfway. */
    if (!error.text[0] || json_error_code(&error) == json_error_out_of_memory)
        return sthi_no_memory(file->path, "parsing %.300s", file->path);
    uint64_t at = offset + (error.position > 0 ? (uint64_t)error.position : 0);
    return sthi_fail(STH_CORRUPT_DATA, "json", json_error_code(&error), file->path,
                     "%.300s: invalid JSON at byte %llu: %.200s", file->path, (ull)at, error.text);
}

sth_status sthi_json_read_text(const sthi_file *file, uint64_t offset, uint64_t bytes, char **out) {
    if (bytes > STHI_JSON_MAX_BYTES)
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, file->path,
                         "%.300s: the JSON text would have %llu bytes; the limit is %u", file->path,
                         (ull)bytes, STHI_JSON_MAX_BYTES);
    char *text = sthi_alloc((size_t)bytes);
    if (!text)
        return sthi_no_memory(file->path, "%llu bytes of JSON in %.300s", (ull)bytes, file->path);
    sth_status status = sthi_file_read(file, offset, bytes, text);
    if (status == STH_OK) *out = text;
    else sthi_free(text);
    return status;
}

sth_status sthi_json_read(const sthi_file *file, uint64_t offset, uint64_t bytes, json_t **out) {
    char *text = NULL;
    STHI_TRY(sthi_json_read_text(file, offset, bytes, &text));
    sth_status status = sthi_json_parse(file, offset, text, (size_t)bytes, out);
    sthi_free(text);
    return status;
}

void sthi_json_free_text(char *text) {
    json_free_t release;
    json_get_alloc_funcs(NULL, &release);
    if (text) release(text);
}

bool sthi_json_u64(const json_t *value, uint64_t *out) {
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static sth_status read_dtype(const char *path, const json_t *dtype, sth_tensor_info *tensor) {
    tensor->dtype = STH_DTYPE_U8;
    if (!dtype) return STH_OK;
    const char *text = json_string_value(dtype);
    if (!text)
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                         "%.300s: tensor '%.160s': dtype is not text", path, tensor->name);
    tensor->spelling = text;
    if (!sthi_dtype_find(text, &tensor->dtype)) tensor->dtype = STH_DTYPE_OTHER;
    return STH_OK;
}

/* Bits of an element, 0 where nobody here knows: a dtype of a format yet to come is bytes. */
static uint32_t bits_of(const sth_tensor_info *tensor) {
    static const struct {
        const char *name;
        uint32_t bits;
    } parts[] = {{"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}}; /* of a byte: no tensor here can have them */
    for (size_t i = 0; tensor->dtype == STH_DTYPE_OTHER && i < sizeof parts / sizeof *parts; i++)
        if (strcmp(tensor->spelling, parts[i].name) == 0) return parts[i].bits;
    return sthi_dtype_bits(tensor->dtype);
}

/* Fills rank and shape; *out_elements is their product. The product of the non-zero extents must fit as
 * well, since strides are made of it. */
static sth_status read_shape(const char *path, const json_t *shape, sth_tensor_info *tensor,
                             uint64_t *out_elements) {
    size_t rank = json_array_size(shape);
    if (!json_is_array(shape))
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                         "%.300s: tensor '%.160s': shape is not a list", path, tensor->name);
    if (rank > STH_MAX_RANK)
        return sthi_fail(STH_UNSUPPORTED, "safetensors", 0, path,
                         "%.300s: tensor '%.160s' has %zu dimensions; at most %d are supported", path,
                         tensor->name, rank, STH_MAX_RANK);
    uint64_t product = 1;
    bool empty = false;
    for (size_t i = 0; i < rank; i++) {
        uint64_t n;
        if (!sthi_json_u64(json_array_get(shape, i), &n))
            return sthi_fail(
                STH_CORRUPT_DATA, "safetensors", 0, path,
                "%.300s: tensor '%.160s': extent %zu of its shape is not an integer of at least 0", path,
                tensor->name, i);
        if (n == 0) empty = true;
        else if (!sthi_mul_u64(product, n, &product))
            return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                             "%.300s: tensor '%.160s': the product of its shape overflows 64 bits", path,
                             tensor->name);
        tensor->shape[i] = n;
    }
    tensor->rank = (int)rank;
    *out_elements = empty ? 0 : product;
    return STH_OK;
}

static sth_status flat_shape(const char *path, sth_tensor_info *tensor) {
    uint64_t each = tensor->dtype == STH_DTYPE_OTHER ? 1 : sthi_dtype_bits(tensor->dtype) / 8;
    if (tensor->bytes % each)
        return sthi_fail(STH_CORRUPT_DATA, "stagehand", 0, path,
                         "%.300s: tensor '%.160s': %llu bytes are not a whole number of %s elements", path,
                         tensor->name, (ull)tensor->bytes, sthi_dtype_name(tensor->dtype));
    tensor->rank = 1;
    tensor->shape[0] = tensor->bytes / each;
    return STH_OK;
}

bool sthi_json_size_fits(const sth_tensor_info *tensor) {
    uint64_t product = 1, bits;
    bool empty = false;
    uint32_t each = bits_of(tensor);
    for (int i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] == 0) empty = true;
        else if (!sthi_mul_u64(product, tensor->shape[i], &product)) return false;
    }
    if (!sthi_mul_u64(empty ? 0 : product, each, &bits)) return false;
    return !each || (bits % 8 == 0 && bits / 8 == tensor->bytes);
}

sth_status sthi_json_type_and_shape(const char *path, const json_t *dtype, const json_t *shape,
                                    sth_tensor_info *tensor) {
    STHI_TRY(read_dtype(path, dtype, tensor));
    if (!shape) return flat_shape(path, tensor);
    uint64_t elements = 0, bits = 0;
    uint32_t each = bits_of(tensor);
    STHI_TRY(read_shape(path, shape, tensor, &elements));
    if (!sthi_mul_u64(elements, each, &bits))
        return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                         "%.300s: tensor '%.160s': the size of its shape overflows 64 bits", path,
                         tensor->name);
    if (!each || (bits % 8 == 0 && bits / 8 == tensor->bytes)) return STH_OK;
    return sthi_fail(STH_CORRUPT_DATA, "safetensors", 0, path,
                     "%.300s: tensor '%.160s': dtype %s and its shape need %llu%s bytes, the offsets give %llu",
                     path, tensor->name, tensor->spelling ? tensor->spelling : sthi_dtype_name(tensor->dtype),
                     (ull)(bits / 8), bits % 8 ? " and a part of" : "", (ull)tensor->bytes);
}
