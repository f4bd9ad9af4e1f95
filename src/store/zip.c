/* ZIP, as torch.save writes it: stored members, a central directory with the true sizes, zip64 where they need it.
 *
 *   | local header, name, extra, data, descriptor | ... | directory | zip64 end | locator | end record, comment |
 *
 * The directory is what counts. Of a local header only the lengths of name and extra field are used (they say where
 * the data begins), and its name and method must be those of the directory. Sizes are checked against the file
 * before they are used; since nothing is compressed and no two members share a byte, a member cannot be larger than
 * the file says. No locks. */
#include "store/zip.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"

#define END_BYTES 22u
#define END64_BYTES 56u
#define LOCATOR_BYTES 20u
#define ENTRY_BYTES 46u
#define LOCAL_BYTES 30u
#define COMMENT_MAX 65535u
#define DIRECTORY_MAX 100000000u /* a million members */
#define ENCRYPTED 0x0041u        /* flags: encrypted, strongly encrypted */

typedef unsigned long long ull;

typedef struct directory {
    uint64_t offset, bytes, count;
} directory;

static uint32_t u16_at(const unsigned char *p) { return (uint32_t)(p[0] | p[1] << 8); }
static uint32_t u32_at(const unsigned char *p) { return u16_at(p) | u16_at(p + 2) << 16; }
static uint64_t u64_at(const unsigned char *p) { return u32_at(p) | (uint64_t)u32_at(p + 4) << 32; }

static sth_status corrupt(const sthi_file *file, uint64_t at, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "zip", 0, file->path, "%.300s: byte %llu: %s", file->path, (ull)at, what);
}
static sth_status fail_member(const sthi_file *file, const char *name, uint64_t at, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "zip", 0, file->path, "%.300s: member '%.160s' at byte %llu: %s",
                     file->path, name, (ull)at, what);
}
static sth_status out_of_memory(const sthi_file *file) {
    return sthi_no_memory(file->path, "the zip directory of %.300s", file->path);
}

/* ---- the end of the file ---- */

/* Where the end record begins: the last place whose comment ends with the file. */
static sth_status find_end(const sthi_file *file, uint64_t *out_at, unsigned char end[END_BYTES]) {
    if (file->size < END_BYTES) return corrupt(file, 0, "too short for a zip file");
    uint64_t tail = sthi_min_u64(file->size, END_BYTES + COMMENT_MAX), first = file->size - tail;
    unsigned char *bytes = sthi_alloc((size_t)tail);
    if (!bytes) return out_of_memory(file);
    sth_status status = sthi_file_read(file, first, tail, bytes);
    bool found = false;
    for (uint64_t i = tail - END_BYTES + 1; status == STH_OK && !found && i-- > 0;) {
        if (u32_at(bytes + i) != 0x06054b50u || u16_at(bytes + i + 20) != tail - i - END_BYTES) continue;
        found = true;
        *out_at = first + i;
        memcpy(end, bytes + i, END_BYTES);
    }
    sthi_free(bytes);
    STHI_TRY(status);
    return found ? STH_OK
                 : corrupt(file, file->size, "a zip file's end record is missing here; an interrupted download?");
}

/* The zip64 end record, where the locator in front of the end record leads to one. */
static sth_status read_end64(const sthi_file *file, uint64_t end, directory *d, uint64_t *out_limit) {
    unsigned char locator[LOCATOR_BYTES], record[END64_BYTES];
    if (end < LOCATOR_BYTES) return STH_OK;
    uint64_t at = end - LOCATOR_BYTES;
    STHI_TRY(sthi_file_read(file, at, sizeof locator, locator));
    if (u32_at(locator) != 0x07064b50u) return STH_OK;
    uint64_t where = u64_at(locator + 8);
    if (u32_at(locator + 4) != 0 || u32_at(locator + 16) > 1) return corrupt(file, at, "several disks");
    if (!sthi_range_inside(where, END64_BYTES, at)) return corrupt(file, at, "the zip64 end record lies outside");
    STHI_TRY(sthi_file_read(file, where, sizeof record, record));
    if (u32_at(record) != 0x06064b50u) return corrupt(file, where, "a zip64 end record is expected here");
    if (u64_at(record + 4) != at - where - 12)
        return corrupt(file, where, "the zip64 end record does not end at its locator");
    if (u32_at(record + 16) || u32_at(record + 20) || u64_at(record + 24) != u64_at(record + 32))
        return corrupt(file, where, "several disks");
    *d = (directory){.offset = u64_at(record + 48), .bytes = u64_at(record + 40), .count = u64_at(record + 32)};
    *out_limit = where;
    return STH_OK;
}

static sth_status find_directory(const sthi_file *file, directory *out) {
    unsigned char end[END_BYTES] = {0};
    uint64_t at = 0, limit;
    STHI_TRY(find_end(file, &at, end));
    if (u16_at(end + 4) || u16_at(end + 6) || u16_at(end + 8) != u16_at(end + 10))
        return corrupt(file, at, "several disks");
    directory small = {.offset = u32_at(end + 16), .bytes = u32_at(end + 12), .count = u16_at(end + 10)}, d = small;
    limit = at;
    STHI_TRY(read_end64(file, at, &d, &limit));
    bool agree = (small.offset == UINT32_MAX || small.offset == d.offset) &&
                 (small.bytes == UINT32_MAX || small.bytes == d.bytes) &&
                 (small.count == UINT16_MAX || small.count == d.count);
    if (!agree) return corrupt(file, at, "the end record and its zip64 form disagree");
    if (!sthi_range_inside(d.offset, d.bytes, limit) || d.offset + d.bytes != limit)
        return corrupt(file, at, "the directory does not lie directly in front of the end records");
    if (d.bytes > DIRECTORY_MAX) return corrupt(file, at, "the directory is larger than 100 MB");
    if (d.count > d.bytes / ENTRY_BYTES) return corrupt(file, at, "the directory is too small for its entries");
    *out = d;
    return STH_OK;
}

/* ---- entries ---- */

/* Values of 0xffffffff stand in the zip64 extra field, in this order: size, compressed size, offset. */
static bool read_extra64(const unsigned char *extra, size_t length, uint64_t *size, uint64_t *packed,
                         uint64_t *offset) {
    uint64_t *const values[] = {size, packed, offset};
    bool needed = *size == UINT32_MAX || *packed == UINT32_MAX || *offset == UINT32_MAX;
    for (size_t at = 0; length - at >= 4;) {
        size_t id = u16_at(extra + at), bytes = u16_at(extra + at + 2), used = 0;
        if (bytes > length - at - 4) return false;
        for (size_t i = 0; id == 1 && i < 3; i++) {
            if (*values[i] != UINT32_MAX) continue;
            if (bytes - used < 8) return false;
            *values[i] = u64_at(extra + at + 4 + used);
            used += 8;
        }
        if (id == 1) return true;
        at += 4 + bytes;
    }
    return !needed;
}

typedef struct entry {
    uint32_t flags, method;
    uint64_t packed;
    size_t name_bytes, all_bytes;
} entry;

/* Parses the entry at p, of which `left` bytes are there. */
static sth_status parse_entry(const sthi_file *file, const unsigned char *p, uint64_t left, uint64_t at, entry *e,
                              sthi_zip_member *m) {
    if (left < ENTRY_BYTES || u32_at(p) != 0x02014b50u) return corrupt(file, at, "an entry is expected here");
    size_t name = u16_at(p + 28), extra = u16_at(p + 30), comment = u16_at(p + 32);
    *e = (entry){.flags = u16_at(p + 8), .method = u16_at(p + 10), .packed = u32_at(p + 20),
                 .name_bytes = name, .all_bytes = ENTRY_BYTES + name + extra + comment};
    *m = (sthi_zip_member){.crc = u32_at(p + 16), .bytes = u32_at(p + 24), .header = u32_at(p + 42)};
    if (left < e->all_bytes) return corrupt(file, at, "the entry reaches past the directory");
    if (!name || memchr(p + ENTRY_BYTES, 0, name)) return corrupt(file, at, "the entry's name is not text");
    if (u16_at(p + 34)) return corrupt(file, at, "several disks");
    if (!read_extra64(p + ENTRY_BYTES + name, extra, &m->bytes, &e->packed, &m->header))
        return corrupt(file, at, "the entry's zip64 field is missing or too short");
    return STH_OK;
}

static sth_status check_entry(const sthi_file *file, const entry *e, const sthi_zip_member *m, uint64_t at) {
    if (e->flags & ENCRYPTED) return fail_member(file, m->name, at, "is encrypted");
    if (e->method) return fail_member(file, m->name, at, "is compressed; only stored members are read");
    if (e->packed != m->bytes) return fail_member(file, m->name, at, "its two sizes differ though it is stored");
    return STH_OK;
}

/* The data begins behind the local header, whose name and extra field may have lengths of their own. */
static sth_status find_data(const sthi_file *file, sthi_zip_member *m, uint64_t limit) {
    unsigned char local[LOCAL_BYTES + 256];
    size_t name = strlen(m->name);
    if (!sthi_range_inside(m->header, LOCAL_BYTES, limit))
        return fail_member(file, m->name, m->header, "its header lies outside the file");
    uint64_t part = sthi_min_u64(sizeof local, limit - m->header);
    STHI_TRY(sthi_file_read(file, m->header, part, local));
    if (u32_at(local) != 0x04034b50u) return fail_member(file, m->name, m->header, "a header is expected there");
    if (u16_at(local + 26) != name || name > part - LOCAL_BYTES || memcmp(local + LOCAL_BYTES, m->name, name))
        return fail_member(file, m->name, m->header, "its header there has another name");
    if (u16_at(local + 8) || u16_at(local + 6) & ENCRYPTED)
        return fail_member(file, m->name, m->header, "its header says that it is compressed or encrypted");
    m->offset = m->header + LOCAL_BYTES + name + u16_at(local + 28);
    if (sthi_range_inside(m->offset, m->bytes, limit)) return STH_OK;
    return sthi_fail(STH_CORRUPT_DATA, "zip", 0, file->path,
                     "%.300s: member '%.160s': %llu bytes wanted at byte %llu, but the directory begins at byte %llu",
                     file->path, m->name, (ull)m->bytes, (ull)m->offset, (ull)limit);
}

static sth_status read_entries(const sthi_file *file, const directory *d, const unsigned char *bytes, sthi_zip *zip) {
    uint64_t used = 0;
    char *name = zip->names;
    for (uint64_t i = 0; i < d->count; i++) {
        entry e;
        sthi_zip_member m;
        uint64_t at = d->offset + used;
        STHI_TRY(parse_entry(file, bytes + used, d->bytes - used, at, &e, &m));
        memcpy(name, bytes + used + ENTRY_BYTES, e.name_bytes);
        name[e.name_bytes] = '\0';
        m.name = name;
        name += e.name_bytes + 1;
        used += e.all_bytes;
        if (e.name_bytes > 255) return fail_member(file, m.name, at, "its name is longer than 255 bytes");
        STHI_TRY(check_entry(file, &e, &m, at));
        STHI_TRY(find_data(file, &m, d->offset));
        zip->members[zip->count++] = m;
    }
    return used == d->bytes ? STH_OK : corrupt(file, d->offset + used, "the directory is larger than its entries");
}

/* ---- the whole ---- */

static int by_name(const void *left, const void *right) {
    return strcmp(((const sthi_zip_member *)left)->name, ((const sthi_zip_member *)right)->name);
}
static int by_place(const void *left, const void *right) {
    const sthi_zip_member *a = left, *b = right;
    return a->header < b->header ? -1 : a->header > b->header;
}

static sth_status check_apart(const sthi_file *file, sthi_zip *zip) {
    sthi_zip_member *m = zip->members;
    if (zip->count) qsort(m, (size_t)zip->count, sizeof *m, by_place);
    for (uint64_t i = 1; i < zip->count; i++)
        if (m[i].header < m[i - 1].offset + m[i - 1].bytes)
            return sthi_fail(STH_CORRUPT_DATA, "zip", 0, file->path,
                             "%.300s: members '%.120s' and '%.120s' overlap at byte %llu", file->path, m[i - 1].name,
                             m[i].name, (ull)m[i].header);
    if (zip->count) qsort(m, (size_t)zip->count, sizeof *m, by_name);
    for (uint64_t i = 1; i < zip->count; i++)
        if (strcmp(m[i].name, m[i - 1].name) == 0)
            return fail_member(file, m[i].name, m[i].header, "is there twice");
    return STH_OK;
}

static sth_status read_directory(const sthi_file *file, const directory *d, sthi_zip *zip) {
    unsigned char *bytes = sthi_alloc((size_t)d->bytes);
    zip->names = sthi_alloc((size_t)d->bytes); /* each entry has room for its name and a 0 */
    zip->members = sthi_zalloc((size_t)d->count, sizeof *zip->members);
    bool room = bytes && zip->names && zip->members;
    sth_status status = room ? sthi_file_read(file, d->offset, d->bytes, bytes) : out_of_memory(file);
    if (status == STH_OK) status = read_entries(file, d, bytes, zip);
    sthi_free(bytes);
    STHI_TRY(status);
    return check_apart(file, zip);
}

sth_status sthi_zip_read(const sthi_file *file, sthi_zip *out) {
    directory d = {0};
    sthi_zip zip = {0};
    STHI_TRY(find_directory(file, &d));
    sth_status status = read_directory(file, &d, &zip);
    if (status == STH_OK) *out = zip;
    else sthi_zip_fini(&zip);
    return status;
}

void sthi_zip_fini(sthi_zip *zip) {
    sthi_free(zip->members);
    sthi_free(zip->names);
    *zip = (sthi_zip){0};
}

const sthi_zip_member *sthi_zip_find(const sthi_zip *zip, const char *name) {
    sthi_zip_member key = {.name = name};
    if (!zip->count) return NULL;
    return bsearch(&key, zip->members, (size_t)zip->count, sizeof key, by_name);
}
