/* Rows that lie in files: a miss of the pool is looked up in slots of host memory, and read from its file where it is
 * in none. Which row stays there is decided as in the pool (core/rows.c), by the misses that the pool had: a row that
 * stays on the device is asked for no more here, and makes room.
 *
 * Invariants: no slot is leased between calls; a slot is filled anew when its last copy to the device has ended.
 * Lock: the rows'. Ranges do not change. */
#include "rows/files.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "rows/rows.h"
#include "store/checkpoint.h"

enum {
    PIECES = 128,        /* requests that are enqueued at once */
    BLOCK = 4096,        /* the largest block of a disk for which parts have room */
    GROUP_BYTES = 16 << 20,
    LEAST_SLOTS = 4
};

void sthi_rows_ram_init(sthi_rows_ram *ram) {
    *ram = (sthi_rows_ram){.group_bytes = GROUP_BYTES};
    sthi_rows_init(&ram->plan);
}

static void free_memory(sthi_rows_ram *ram) {
    sthi_arena_release(ram->arena);
    sthi_free(ram->memory);
    sthi_free(ram->at);
    sthi_free(ram->copied);
    ram->arena = NULL;
    ram->memory = ram->at = NULL;
    ram->copied = NULL;
    (void)sthi_rows_lay(&ram->plan, 0, 1);
}

void sthi_rows_ram_fini(sthi_rows_ram *ram) {
    free_memory(ram);
    sthi_opened_close(&ram->opened);
    sthi_rows_scratch_free(&ram->scratch);
    sthi_fetcher_destroy(ram->fetcher);
    sthi_rows_fini(&ram->plan);
}

/* ---- tables */

/* The last range that begins at `at` or before it. */
static uint32_t range_at(const sthi_rows_file *file, uint64_t at) {
    uint32_t low = 0, high = file->range_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (file->ranges[middle].place_offset <= at) low = middle;
        else high = middle;
    }
    return low;
}

/* Whether the ranges have all of [begin, begin + bytes). */
static bool is_covered(const sthi_rows_file *file, uint64_t begin, uint64_t bytes) {
    for (uint32_t i = range_at(file, begin); bytes; i++) {
        if (i == file->range_count || file->ranges[i].place_offset > begin) return false;
        uint64_t inside = begin - file->ranges[i].place_offset;
        if (inside >= file->ranges[i].bytes) return false;
        uint64_t there = sthi_min_u64(file->ranges[i].bytes - inside, bytes);
        begin += there;
        bytes -= there;
    }
    return true;
}

static sth_status check_ranges(const sth_rows *rows, const char *name, uint32_t count, const sthi_rows_file *file) {
    for (uint32_t i = 0; i < file->range_count; i++) {
        const sth_file_range *r = &file->ranges[i];
        bool known = r->file < file->checkpoint->file_count;
        if (!known || !sthi_range_inside(r->file_offset, r->bytes, file->checkpoint->files[r->file].size))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "table '%s': range %u lies in no file of the "
                             "checkpoint, or ends behind it", name, i);
    }
    for (uint32_t i = 0; i < rows->options.part_count; i++)
        if (!is_covered(file, file->part_offsets[i], count * rows->options.part_bytes[i]))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, name, "table '%s': some bytes of part %u are in no range",
                             name, i);
    return STH_OK;
}

/* Its files are open for reading, and the plan knows it. */
static sth_status take_in(sth_rows *rows, uint32_t count, sthi_rows_file *file) {
    sthi_rows_ram *ram = &rows->ram;
    STHI_TRY(sthi_rows_scratch_grow(&ram->scratch, count));
    STHI_TRY(sthi_opened_add(&ram->opened, file->checkpoint, file->ranges, file->range_count));
    file->files = sthi_opened_files(&ram->opened, file->checkpoint);
    if (!ram->fetcher) ram->fetcher = sthi_fetcher_create();
    if (!ram->fetcher) return sthi_no_memory("rows", "what reads files");
    free_memory(ram);
    return sthi_rows_add(&ram->plan, count, &file->table);
}

sth_status sthi_rows_file_add(sth_rows *rows, const char *name, uint32_t count, sth_checkpoint *checkpoint,
                              const sth_file_range *ranges, uint32_t range_count, const uint64_t *part_offsets,
                              sthi_rows_file **out) {
    sthi_rows_file *file = sthi_zalloc(1, sizeof *file);
    if (file) file->ranges = sthi_alloc(range_count * sizeof *file->ranges);
    if (!file || !file->ranges) {
        sthi_free(file);
        return sthi_no_memory(name, "table '%s'", name);
    }
    file->checkpoint = checkpoint;
    file->range_count = range_count;
    memcpy(file->ranges, ranges, range_count * sizeof *file->ranges);
    sthi_ranges_sort(file->ranges, range_count);
    for (uint32_t i = 0; i < rows->options.part_count; i++) file->part_offsets[i] = part_offsets[i];
    sth_status rc = check_ranges(rows, name, count, file);
    if (rc == STH_OK) rc = take_in(rows, count, file);
    if (rc == STH_OK) *out = file;
    else sthi_rows_file_free(file);
    return rc;
}

void sthi_rows_file_free(sthi_rows_file *file) {
    if (!file) return;
    sthi_free(file->ranges);
    sthi_free(file);
}

/* ---- memory */

static uint32_t slots_for(const sth_rows *rows) {
    const sthi_rows_ram *ram = &rows->ram;
    uint64_t least = sthi_max_u64(2 * ram->group_bytes / ram->slot_bytes + 1, LEAST_SLOTS);
    uint64_t slots = sthi_max_u64(rows->options.ram_bytes / ram->slot_bytes, least);
    return (uint32_t)sthi_min_u64(slots, ram->plan.row_count);
}

static sth_status take_memory(sth_rows *rows, uint32_t slots) {
    sthi_rows_ram *ram = &rows->ram;
    ram->memory = sthi_zalloc(slots, sizeof *ram->memory);
    ram->at = sthi_zalloc(slots, rows->options.part_count * sizeof *ram->at);
    ram->copied = sthi_zalloc(slots, sizeof *ram->copied);
    if (!ram->memory || !ram->at || !ram->copied) return sthi_no_memory("rows", "records of %u rows in RAM", slots);
    STHI_TRY(sthi_arena_create(rows->device, slots * ram->slot_bytes, &ram->arena));
    for (uint32_t i = 0; i < slots; i++) {
        void *address;
        STHI_TRY(sthi_arena_reserve(ram->arena, ram->slot_bytes, &address));
        ram->memory[i] = address;
    }
    sthi_arena_pin_rest(ram->arena);
    return sthi_rows_lay(&ram->plan, slots, slots);
}

sth_status sthi_rows_ram_open(sth_rows *rows) {
    sthi_rows_ram *ram = &rows->ram;
    if (ram->plan.views || !ram->plan.table_count) return STH_OK;
    ram->slot_bytes = 0;
    for (uint32_t i = 0; i < rows->options.part_count; i++) {
        ram->part_room[i] = (rows->options.part_bytes[i] + 3 * BLOCK + STHI_ALIGN - 1) / STHI_ALIGN * STHI_ALIGN;
        ram->slot_bytes += ram->part_room[i];
    }
    sth_status rc = take_memory(rows, slots_for(rows));
    if (rc != STH_OK) free_memory(ram);
    return rc;
}

uint32_t sthi_rows_ram_group(const sthi_rows_ram *ram) {
    uint64_t most = sthi_max_u64(ram->group_bytes / ram->slot_bytes, 1);
    return (uint32_t)sthi_min_u64(most, sthi_max_u64(ram->plan.slot_count / 2, 1));
}

/* ---- reads */

typedef struct batch {
    sth_rows *rows;
    const sthi_rows_file *file;
    const char *name;
    sthi_piece pieces[PIECES];
    uint32_t row[PIECES], file_number[PIECES], count;
} batch;

static sth_status name_failure(const batch *b, uint32_t piece, uint64_t offset) {
    sthi_error_copy why;
    sthi_error_save(&why);
    const char *tensor = sthi_checkpoint_tensor_at(b->file->checkpoint, b->file_number[piece], offset);
    return sthi_fail(why.status, why.domain, why.native, why.object, "row %u of '%s', tensor '%s': %s", b->row[piece],
                     b->name, tensor ? tensor : "(between tensors)", why.message);
}

static sth_status flush(batch *b) {
    uint32_t piece = 0;
    uint64_t offset = 0;
    if (!b->count) return STH_OK;
    sth_status rc = sthi_fetch(b->rows->ram.fetcher, b->pieces, b->count, &piece, &offset);
    if (rc != STH_OK) return name_failure(b, piece, offset);
    for (uint32_t i = 0; i < b->count; i++) b->rows->ram.read_bytes += b->pieces[i].bytes;
    b->count = 0;
    return STH_OK;
}

/* Where the part's bytes begin in its room: there its first piece has the remainder that direct reads want. */
static uint8_t *place(uint8_t *room, const sthi_access *access, uint64_t offset) {
    uint64_t align = sthi_access_is_direct(access) && access->align <= BLOCK ? access->align : 1;
    uint8_t *least = room + BLOCK;
    return least + (offset - (uint64_t)(uintptr_t)least) % align;
}

static sth_status read_part(batch *b, uint32_t row, uint32_t part, uint32_t slot, uint8_t *room) {
    sthi_rows_ram *ram = &b->rows->ram;
    const sthi_rows_file *file = b->file;
    uint64_t bytes = b->rows->options.part_bytes[part], at = file->part_offsets[part] + row * bytes, done = 0;
    uint8_t **to = &ram->at[slot * b->rows->options.part_count + part];
    for (uint32_t i = range_at(file, at); done < bytes; i++) {
        const sth_file_range *r = &file->ranges[i];
        uint64_t inside = at + done - r->place_offset;
        sthi_access *access = &file->files[r->file];
        sthi_piece *piece = &b->pieces[b->count];
        if (!done) *to = place(room, access, r->file_offset + inside);
        *piece = (sthi_piece){.access = access, .offset = r->file_offset + inside, .to = *to + done,
                              .bytes = sthi_min_u64(r->bytes - inside, bytes - done)};
        bool fits = access->align <= BLOCK;
        piece->free_before = fits && !done;
        done += piece->bytes;
        piece->free_behind = fits && done == bytes;
        b->row[b->count] = row;
        b->file_number[b->count++] = r->file;
        if (b->count == PIECES) STHI_TRY(flush(b));
    }
    return STH_OK;
}

/* The slot may be written: its last copy to the device has ended. */
static sth_status come_behind_copy(sth_rows *rows, uint32_t slot) {
    sth_event *event = sthi_rows_ring_event(&rows->fills, rows->ram.copied[slot]);
    if (!event) return STH_OK;
    STHI_TRY(rows->device->ops->event_synchronize(rows->device->self, event));
    sthi_rows_ring_pass(&rows->fills, rows->ram.copied[slot]);
    return STH_OK;
}

static sth_status read_rows(sth_rows *rows, uint32_t table, uint32_t count) {
    sthi_rows_ram *ram = &rows->ram;
    batch b = {.rows = rows, .file = rows->images[table].file, .name = rows->images[table].name};
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = ram->scratch.loads[i].slot;
        STHI_TRY(come_behind_copy(rows, slot));
        uint8_t *room = ram->memory[slot];
        for (uint32_t part = 0; part < rows->options.part_count; room += ram->part_room[part++])
            STHI_TRY(read_part(&b, ram->scratch.loads[i].row, part, slot, room));
    }
    return flush(&b);
}

sth_status sthi_rows_ram_read(sth_rows *rows, uint32_t table, const sthi_rows_load *loads, const uint32_t *uses,
                              uint32_t count, uint32_t tokens) {
    sthi_rows_ram *ram = &rows->ram;
    uint32_t number = rows->images[table].file->table, missing = 0;
    for (uint32_t i = 0; i < count; i++) ram->scratch.asked[i] = loads[i].row;
    bool room = sthi_rows_ask(&ram->plan, number, ram->scratch.asked, uses, count, tokens, ram->scratch.loads,
                              &missing);
    STHI_INVARIANT(room); /* nobody else has a lease */
    (void)room;
    sth_status rc = read_rows(rows, table, missing);
    if (rc == STH_OK) return STH_OK;
    sthi_rows_ram_end(rows, table, loads, count, 0);
    for (uint32_t i = 0; i < missing; i++) sthi_rows_lose(&ram->plan, ram->scratch.loads[i].slot);
    return rc;
}

const uint8_t *sthi_rows_ram_part(const sth_rows *rows, uint32_t table, uint32_t row, uint32_t part) {
    uint32_t slot = sthi_rows_slot_of(&rows->ram.plan, rows->images[table].file->table, row);
    return rows->ram.at[slot * rows->options.part_count + part];
}

void sthi_rows_ram_end(sth_rows *rows, uint32_t table, const sthi_rows_load *loads, uint32_t count, uint64_t number) {
    sthi_rows_ram *ram = &rows->ram;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = sthi_rows_slot_of(&ram->plan, rows->images[table].file->table, loads[i].row);
        if (number) ram->copied[slot] = number;
        sthi_rows_end(&ram->plan, slot);
    }
}
