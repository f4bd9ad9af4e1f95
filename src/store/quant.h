/* A slab inside the library: a checkpoint, the layers made of its tensors, and what its readers share. */
#ifndef STHI_STORE_QUANT_H
#define STHI_STORE_QUANT_H
#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "stagehand/quant.h"
#include "store/checkpoint.h"
#include "store/zip.h"

/* Losslessly packed files: a file that was packed, as its header describes it. */
typedef struct sthi_original {
    const char *name;              /* within its folder; NULL where the packed file stands for one file */
    const sth_tensor_info *header; /* the container's tensor that holds the header with its length, byte by byte */
    sthi_tensors tensors;          /* in the order on disk, with places in the original */
} sthi_original;

typedef struct sthi_originals {
    sthi_original *items;
    uint32_t count;
    const char *index_name;       /* NULL where the packed file stands for one file */
    const sth_tensor_info *index; /* the text of the index */
    const sth_tensor_info *sums;  /* XXH3-128, big-endian: of each tensor's bytes, each header, the index */
    const sth_tensor_info *sizes; /* `lengths` in the file */
    uint32_t *lengths;            /* of all pieces of all packed tensors */
} sthi_originals;

struct sth_quant {
    char *path; /* of the file or folder that says what the layers are, as errors name it */
    sth_quant_format format;
    bool no_slab; /* opening failed because there is nothing of a slab */
    sth_checkpoint *checkpoint;
    sth_quant_layer *layers; /* names are owned */
    uint64_t count, capacity;
    uint32_t *by_name;                 /* indexes of layers, by name */
    const sth_tensor_info **plain;     /* the tensors that no layer has */
    uint64_t plain_count;
    sthi_zip zip;       /* v1: the members, for their checksums */
    json_t *description; /* the manifest or plan that describes the layers; NULL for v1 and where there is none */
    sthi_originals originals; /* LOSSLESS alone */
};

/* quant_open.c */
sth_status sthi_quant_open(const char *path, sth_quant **out);
/* The same, but *out is NULL for a path that is no slab at all (it may be a checkpoint, or missing). */
sth_status sthi_quant_open_if_slab(const char *path, sth_quant **out);

/* quant.c */
void sthi_quant_close(sth_quant *slab);
const sth_quant_layer *sthi_quant_find(const sth_quant *slab, const char *name);
/* True when `layer` is one of this slab's. */
bool sthi_quant_has(const sth_quant *slab, const sth_quant_layer *layer);

/* quant_names.c; "?" out of range */
const char *sthi_quant_format_name(sth_quant_format format);
const char *sthi_encoding_name(sth_encoding encoding);
const char *sthi_quant_part_name(sth_quant_part part);

/* ---- for the readers of the formats ---- */

/* Appends a layer with a copy of its name; its parts point into the slab's checkpoint. Extents are at least 1. */
sth_status sthi_quant_add(sth_quant *slab, const sth_quant_layer *layer);
/* Finds the tensor `name` and checks that it is of this dtype and shape. */
typedef struct sthi_quant_want {
    sth_quant_part part;
    sth_dtype dtype;
    int rank;
    uint64_t shape[2];
} sthi_quant_want;
sth_status sthi_quant_take(const sth_quant *slab, const char *name, const sthi_quant_want *want,
                           sth_quant_layer *layer);
/* The same for `base` followed by `suffix`. */
sth_status sthi_quant_take_suffixed(const sth_quant *slab, const char *base, const char *suffix,
                                   const sthi_quant_want *want, sth_quant_layer *layer);
/* *out: the tensor named `base` followed by `suffix`, or NULL. */
sth_status sthi_quant_find_suffixed(const sth_quant *slab, const char *base, const char *suffix,
                                    const sth_tensor_info **out);
/* UNSUPPORTED: nothing of a slab is here. `why` may be NULL. */
sth_status sthi_quant_no_slab(sth_quant *slab, const char *path, const char *why);
/* CORRUPT_DATA about the manifest or a layer of it. */
sth_status sthi_quant_corrupt(const sth_quant *slab, const char *layer, const char *what);

/* ---- the formats ---- */

/* Each fills *slab from what was found to be such a file; sthi_quant_open then checks it as a whole. */
sth_status sthi_quant_open_v1(sth_quant *slab, const char *path);
sth_status sthi_quant_open_manifest(sth_quant *slab, const char *model_path, const char *manifest_path);
/* Sets *out_found and opens where the model's own header says what it holds: a manifest, as SVDQuant's does, or that
 * it is losslessly packed. */
sth_status sthi_quant_open_embedded(sth_quant *slab, const char *model_path, bool *out_found);
/* slab->description is what a losslessly packed file says of itself, slab->checkpoint the file. */
#define STHI_LOSSLESS_KEY "stagehand_lossless"
#define STHI_LOSSLESS_PREFIX "__stagehand_lossless__."
sth_status sthi_quant_open_lossless(sth_quant *slab);
/* Whether a file of a result may be called so: a plain name without folders, and none that the work itself uses. */
bool sthi_original_name_is_fine(const char *name);
/* `index`: the file that describes the folder's shards. */
sth_status sthi_quant_open_v3(sth_quant *slab, const char *index);
#endif
