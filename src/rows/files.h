/* Rows that lie in files, and the host memory that they pass through: those that are missed most and last stay in it.
 * Lock: the rows', held while files are read. */
#ifndef STHI_ROWS_FILES_H
#define STHI_ROWS_FILES_H
#include "core/rows.h"
#include "host/arena.h"
#include "rows/scratch.h"
#include "stagehand/checkpoint.h"
#include "store/fetch.h"
#include "store/opened.h"

/* Where the rows of a table lie: part i of row r begins at part_offsets[i] + r x part_bytes[i] of an image whose bytes
 * the ranges name. */
typedef struct sthi_rows_file {
    sth_checkpoint *checkpoint;
    sth_file_range *ranges;   /* [range_count] by place_offset */
    uint32_t range_count;
    uint32_t table;           /* number in the plan of sthi_rows_ram */
    sthi_access *files;       /* of the checkpoint, by number */
    uint64_t part_offsets[STH_ROWS_PARTS_MAX];
} sthi_rows_file;

/* Slots of host memory, each for one row. A slot has room for a block of the disk round each part, so that direct reads
 * need no second copy. */
typedef struct sthi_rows_ram {
    sthi_rows plan;           /* which row is in which slot; no slots: there is no memory yet */
    sth_arena *arena;
    uint8_t **memory;         /* [slots] */
    uint8_t **at;             /* [slots][parts] where the bytes of the part begin */
    uint64_t *copied;         /* [slots] number in sth_rows.fills behind which its last copy to the device stands */
    uint64_t group_bytes;     /* of rows that are read at once, while the ones before are copied */
    uint64_t slot_bytes, part_room[STH_ROWS_PARTS_MAX];
    sthi_opened opened;       /* files of the tables */
    sthi_rows_scratch scratch;
    sthi_fetcher *fetcher;
    uint64_t read_bytes;
} sthi_rows_ram;

struct sth_rows;
void sthi_rows_ram_init(sthi_rows_ram *ram);
/* Nothing reads or copies any more. */
void sthi_rows_ram_fini(sthi_rows_ram *ram);
/* A table of `rows` rows, each byte of which must be in a range. The ranges are copied to *out, which
 * sthi_rows_file_free ends. Memory that there is goes: the next sthi_rows_ram_open makes it anew.
 * INVALID_ARGUMENT, OUT_OF_HOST_MEMORY. */
sth_status sthi_rows_file_add(struct sth_rows *rows, const char *name, uint32_t count, sth_checkpoint *checkpoint,
                              const sth_file_range *ranges, uint32_t range_count, const uint64_t *part_offsets,
                              sthi_rows_file **out);
void sthi_rows_file_free(sthi_rows_file *file);
/* Memory for rows of files, where there are any and it is not there: options.ram_bytes, and no less than lets the disk
 * and the link work at once. OUT_OF_HOST_MEMORY. */
sth_status sthi_rows_ram_open(struct sth_rows *rows);
/* Rows that are brought at once. */
uint32_t sthi_rows_ram_group(const sthi_rows_ram *ram);
/* The rows in `loads`, ascending and no more than a group, are in slots of host memory, which are leased until
 * sthi_rows_ram_end. Row loads[k].row was used uses[k] times by `tokens` tokens. Blocks: for the disk. */
sth_status sthi_rows_ram_read(struct sth_rows *rows, uint32_t table, const sthi_rows_load *loads,
                              const uint32_t *uses, uint32_t count, uint32_t tokens);
/* Where part `part` of a row lies that is leased. */
const uint8_t *sthi_rows_ram_part(const struct sth_rows *rows, uint32_t table, uint32_t row, uint32_t part);
/* Copies out of the slots end with `number` of the fills. */
void sthi_rows_ram_end(struct sth_rows *rows, uint32_t table, const sthi_rows_load *loads, uint32_t count,
                       uint64_t number);
#endif
