/* Tensors to units. Tensors are sorted by the natural order of their module's name and, within a module, by
 * their place on disk; each run of equal names is one unit. Names of blocks are prefixes of names of units.
 * Does not know in which order the model really calls its modules: names are the best guess that a file
 * allows. */
#include "units.h"

#include <inttypes.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "stagehand/lossless.h"
#include "stagehand/util.h"

#define PLACE_ALIGN 512u

typedef struct entry {
    const sth_tensor_info *tensor;
    char *module;
    uint64_t index;
} entry;

static int by_module(const void *left, const void *right) {
    const entry *a = left, *b = right;
    int order = sth_compare_natural(a->module, b->module);
    return order ? order : (a->index > b->index) - (a->index < b->index);
}

/* "h.0.attn.weight" belongs to "h.0.attn". A name without parts, or whose last part is a number (as layers
 * of a layer index are called), is a module by itself. */
static char *module_of(const char *tensor) {
    const char *dot = strrchr(tensor, '.');
    if (!dot || dot == tensor || dot[1 + strspn(dot + 1, "0123456789")] == 0)
        return cli_copy(tensor, strlen(tensor));
    return cli_copy(tensor, (size_t)(dot - tensor));
}

static entry *sorted_entries(const sth_checkpoint *checkpoint, uint64_t *out_count) {
    uint64_t count = sth_checkpoint_tensor_count(checkpoint), used = 0;
    entry *entries = cli_alloc(count, sizeof *entries);
    for (uint64_t i = 0; i < count; i++) {
        const sth_tensor_info *t = sth_checkpoint_tensor(checkpoint, i);
        if (t->bytes) entries[used++] = (entry){t, module_of(t->name), i};
    }
    if (used) qsort(entries, used, sizeof *entries, by_module);
    *out_count = used;
    return entries;
}

/* ---- blocks */

typedef struct search {
    const char *pattern;
    regex_t regex;
    units *out;
} search;

/* Finds the one prefix of `module` that the pattern matches; its length, 0 if none. */
static int match_module(const search *s, const char *module, size_t *out_length) {
    char *prefix = cli_copy(module, strlen(module));
    size_t length = strlen(module), found = 0;
    int code = CLI_OK;
    for (size_t end = 1; end <= length && code == CLI_OK; end++) {
        if (module[end] != '.' && module[end] != 0) continue;
        prefix[end] = 0;
        if (regexec(&s->regex, prefix, 0, NULL, 0) == 0) {
            if (found)
                code = cli_usage(
                    "--blocks '%s' matches both %.*s and %s inside it: blocks must not nest. End the "
                    "pattern with $ so that it matches one of them",
                    s->pattern, (int)found, module, prefix);
            found = end;
        }
        prefix[end] = module[end];
    }
    free(prefix);
    *out_length = found;
    return code;
}

/* Modules of a block follow one another. */
static const char *block_named(units *out, const char *module, size_t length) {
    const char *last = out->block_count ? out->blocks[out->block_count - 1] : NULL;
    if (last && strncmp(last, module, length) == 0 && last[length] == 0) return last;
    out->blocks[out->block_count] = cli_copy(module, length);
    return out->blocks[out->block_count++];
}

static int fail_no_match(const char *pattern, const entry *entries, uint64_t count) {
    char examples[512] = "";
    size_t used = 0;
    for (uint64_t i = 0, shown = 0; i < count && shown < 4; i++) {
        if (i && strcmp(entries[i].module, entries[i - 1].module) == 0) continue;
        size_t length = strlen(entries[i].module);
        if (length > 100) length = 100;
        memcpy(examples + used, shown ? ", " : "", shown ? 2 : 0);
        used += shown++ ? 2 : 0;
        memcpy(examples + used, entries[i].module, length);
        used += length;
    }
    return cli_usage("--blocks '%s' matches no module. The file has modules such as %.*s", pattern,
                     (int)used, examples);
}

/* ---- units */

static int add_bytes(uint64_t *total, uint64_t bytes, const char *name) {
    if (__builtin_add_overflow(*total, bytes, total) || *total > INT64_MAX)
        return cli_fail(CLI_DATA, "%s: the sizes of its tensors add up to more than can be addressed",
                        name);
    return CLI_OK;
}

static uint64_t place_bytes(uint64_t bytes) {
    return (bytes + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
}

enum { LEAST_PACKED = 4096 }; /* values of a tensor that is packed */

uint64_t units_packed_bytes(sth_dtype dtype, uint64_t bytes) {
    uint64_t values = bytes / (dtype == STH_DTYPE_F32 ? 4 : 2);
    uint64_t packed = values >= LEAST_PACKED ? sth_lossless_estimate(dtype, NULL, values) : bytes;
    return packed < bytes ? place_bytes(packed) : bytes;
}

/* Makes a unit of entries[0 .. count). Ranges are appended to out->ranges, which has room for all. */
static int add_unit(units *out, uint64_t *range_count, const entry *entries, uint64_t count,
                    const char *block) {
    unit *u = &out->unit[out->count++];
    *u = (unit){.name = cli_copy(entries->module, strlen(entries->module)),
                .block = block,
                .first_range = *range_count,
                .range_count = (uint32_t)count};
    for (uint64_t i = 0; i < count; i++) {
        const sth_tensor_info *t = entries[i].tensor;
        if (t->bytes > INT64_MAX)
            return cli_fail(CLI_DATA, "%s: %" PRIu64 " bytes are too many", t->name, t->bytes);
        out->ranges[(*range_count)++] = (sth_file_range){t->file, t->offset, t->bytes, u->bytes};
        u->packed += units_packed_bytes(t->dtype, place_bytes(t->bytes));
        int code = add_bytes(&u->bytes, place_bytes(t->bytes), u->name);
        if (code) return code;
    }
    if (u->bytes > out->largest) out->largest = u->bytes;
    return add_bytes(&out->bytes, u->bytes, u->name);
}

static int add_module(units *out, const search *s, uint64_t *ranges, const entry *entries, uint64_t count) {
    size_t length = 0;
    int code = s ? match_module(s, entries->module, &length) : CLI_OK;
    if (code) return code;
    if (!s || length) {
        const char *block = s ? block_named(out, entries->module, length) : NULL;
        return add_unit(out, ranges, entries, count, block);
    }
    out->left_out_tensors += count;
    for (uint64_t i = 0; i < count && !code; i++)
        code = add_bytes(&out->left_out_bytes, entries[i].tensor->bytes, entries[i].tensor->name);
    return code;
}

static int add_modules(units *out, const search *s, const entry *entries, uint64_t count) {
    uint64_t ranges = 0;
    out->unit = cli_alloc(count, sizeof *out->unit);
    out->ranges = cli_alloc(count, sizeof *out->ranges);
    out->blocks = cli_alloc(count, sizeof *out->blocks);
    for (uint64_t first = 0, end; first < count; first = end) {
        for (end = first + 1; end < count && !strcmp(entries[end].module, entries[first].module);) end++;
        int code = add_module(out, s, &ranges, entries + first, end - first);
        if (code) return code;
    }
    if (s && out->count == 0) return fail_no_match(s->pattern, entries, count);
    return CLI_OK;
}

static int load_blocks(units *out, const char *pattern, const entry *entries, uint64_t count) {
    search s = {.pattern = pattern, .out = out};
    int error = regcomp(&s.regex, pattern, REG_EXTENDED | REG_NOSUB);
    if (error) {
        char why[128];
        regerror(error, &s.regex, why, sizeof why);
        return cli_usage("--blocks '%s' is not a POSIX extended regular expression: %s", pattern, why);
    }
    int code = add_modules(out, &s, entries, count);
    regfree(&s.regex);
    return code;
}

int units_load(const sth_checkpoint *checkpoint, const char *pattern, units *out) {
    uint64_t count = 0;
    int code;
    *out = (units){0};
    entry *entries = sorted_entries(checkpoint, &count);
    if (count == 0 || count > UINT32_MAX)
        code = cli_fail(CLI_DATA,
                        "the checkpoint has no tensors with bytes in them: there is nothing to stream");
    else
        code = pattern ? load_blocks(out, pattern, entries, count) : add_modules(out, NULL, entries, count);
    for (uint64_t i = 0; i < count; i++) free(entries[i].module);
    free(entries);
    if (code) units_free(out);
    return code;
}

void units_free(units *u) {
    for (uint32_t i = 0; i < u->count; i++) free(u->unit[i].name);
    for (uint32_t i = 0; i < u->block_count; i++) free(u->blocks[i]);
    free(u->unit);
    free(u->ranges);
    free(u->blocks);
    *u = (units){0};
}
