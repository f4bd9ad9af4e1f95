/* A pickle as a tree of plain values. Nothing is executed: what is not listed here is refused. */
#ifndef STHI_STORE_PICKLE_H
#define STHI_STORE_PICKLE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"

#define STHI_PICKLE_MAX_BYTES (16u << 20)

typedef enum sthi_pickle_kind {
    STHI_PICKLE_NONE,
    STHI_PICKLE_BOOL,
    STHI_PICKLE_INT,
    STHI_PICKLE_TEXT,
    STHI_PICKLE_LIST,
    STHI_PICKLE_TUPLE,
    STHI_PICKLE_DICT, /* keys are text; items: key, value, key, value ... */
    STHI_PICKLE_CALLABLE,
    STHI_PICKLE_STORAGE,
    STHI_PICKLE_TENSOR
} sthi_pickle_kind;

typedef struct sthi_pickle_node sthi_pickle_node;
typedef struct sthi_pickle_cell sthi_pickle_cell;

/* One item of a list, a tuple or a dict. */
struct sthi_pickle_cell {
    const sthi_pickle_node *value;
    const sthi_pickle_cell *next;
};

struct sthi_pickle_node {
    sthi_pickle_kind kind;
    uint32_t at; /* byte of the pickle at which it was made */
    union {
        int64_t integer; /* BOOL: 0 or 1 */
        const char *text;
        struct {
            sthi_pickle_cell *first, *last;
            uint32_t count; /* cells: a dict has two for each entry */
        } items;
        struct {
            const char *key;
            sth_dtype dtype;
            uint64_t count; /* elements */
        } storage;
        struct {
            const sthi_pickle_node *storage, *size, *stride; /* the last two: tuples */
            int64_t offset;
        } tensor;
        int callable; /* row in the parser's table */
    };
};

typedef struct sthi_pickle {
    const sthi_pickle_node *root;
    void *blocks; /* the memory of all nodes and texts */
} sthi_pickle;

/* Parses protocol 2 as torch.save writes it. `path` is named in errors, with the byte counted from `origin`.
 * Memory: at most about 100 bytes for each byte of the pickle. */
sth_status sthi_pickle_parse(const char *path, uint64_t origin, const unsigned char *bytes, size_t count,
                             sthi_pickle *out);
void sthi_pickle_fini(sthi_pickle *pickle);

/* True for a dict of at most 16 entries with distinct keys: what sthi_pickle_get may be asked about. The limit keeps
 * a pickle that refers to one dict a million times from costing more than its size. */
bool sthi_pickle_is_record(const sthi_pickle_node *node);
/* The value of a record's key, or NULL. */
const sthi_pickle_node *sthi_pickle_get(const sthi_pickle_node *dict, const char *key);
#endif
