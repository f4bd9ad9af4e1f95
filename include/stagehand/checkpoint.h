/* stagehand/checkpoint.h - model files: what is in them and where, checked before anything is read.
 *
 * Life: sth_checkpoint_open() -> look at tensors, read bytes -> sth_checkpoint_close().
 * PATH may be
 *  - a safetensors file, of any name that does not end in .json;
 *  - an index of safetensors shards, {"weight_map": {tensor: file}};
 *  - a layer index: a list of {layer_id, name, path, offset, nbytes, optional dtype, shape, scale}, or an
 *    object that holds it as "layers" or "entries". Without dtype a tensor is U8 of [nbytes];
 *  - a folder: its diffusion_pytorch_model.safetensors.index.json, else its model.safetensors.index.json,
 *    else its only .safetensors file.
 * A safetensors file is what the format's own reader takes: its tensors follow one another without a gap, from the
 * first byte of data to the last of the file.
 * Only files that the index names are opened, and only inside the index's own folder. Headers are treated
 * as hostile: anything that does not add up is CORRUPT_DATA with the file, the tensor and the byte.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_CHECKPOINT_H
#define STAGEHAND_CHECKPOINT_H
#include <stdint.h>

#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, safetensors spelling, bits per element) */
#define STH_DTYPE_LIST(X)     \
    X(BOOL, "BOOL", 8)        \
    X(U8, "U8", 8)            \
    X(I8, "I8", 8)            \
    X(F8_E4M3, "F8_E4M3", 8)  \
    X(F8_E5M2, "F8_E5M2", 8)  \
    X(F8_E8M0, "F8_E8M0", 8)  \
    X(F8_E4M3FNUZ, "F8_E4M3FNUZ", 8) \
    X(F8_E5M2FNUZ, "F8_E5M2FNUZ", 8) \
    X(I16, "I16", 16)         \
    X(U16, "U16", 16)         \
    X(F16, "F16", 16)         \
    X(BF16, "BF16", 16)       \
    X(I32, "I32", 32)         \
    X(U32, "U32", 32)         \
    X(F32, "F32", 32)         \
    X(I64, "I64", 64)         \
    X(U64, "U64", 64)         \
    X(F64, "F64", 64)         \
    X(C64, "C64", 64)

typedef enum sth_dtype {
#define STH_DTYPE_ENUM(name, text, bits) STH_DTYPE_##name,
    STH_DTYPE_LIST(STH_DTYPE_ENUM)
#undef STH_DTYPE_ENUM
        STH_DTYPE_COUNT,
    STH_DTYPE_OTHER = STH_DTYPE_COUNT /* of a tensor: none of the list. It can be read as bytes, and as nothing else */
} sth_dtype;

STH_API const char *sth_dtype_name(sth_dtype dtype);  /* "BF16"; "?" out of range */
STH_API uint32_t sth_dtype_bits(sth_dtype dtype);     /* bits per element; 0 out of range */

#define STH_MAX_RANK 16

typedef struct sth_checkpoint sth_checkpoint;

/* One tensor of a checkpoint. Pointers live as long as the checkpoint. */
typedef struct sth_tensor_info {
    const char *name;
    sth_dtype dtype;
    const char *spelling; /* of the dtype, as the file has it, also where it is STH_DTYPE_OTHER */
    int rank;
    uint64_t shape[STH_MAX_RANK];
    uint32_t file;       /* index for sth_checkpoint_file_path */
    uint64_t offset;     /* first byte within that file */
    uint64_t bytes;      /* length in that file */
    /* layer index only: a value is the stored number times this; 1 elsewhere */
    double scale;
} sth_tensor_info;

/* Opens and checks. The files stay open (read only) until close.
 * Returns NOT_FOUND, IO, CORRUPT_DATA (also where a tensor was never written: a hole in the file),
 * UNSUPPORTED (unknown format, several files and no index), OUT_OF_HOST_MEMORY.
 * Threads: any. Blocks: for reading headers. Allocates: in proportion to the headers. */
STH_API sth_status sth_checkpoint_open(const char *path, sth_checkpoint **out_checkpoint);
/* NULL is fine. Threads: one, the last user. */
STH_API void sth_checkpoint_close(sth_checkpoint *checkpoint);

STH_API uint64_t sth_checkpoint_tensor_count(const sth_checkpoint *checkpoint);
/* Tensors are ordered by file, then by offset: the order on disk. NULL past the end. */
STH_API const sth_tensor_info *sth_checkpoint_tensor(const sth_checkpoint *checkpoint, uint64_t i);
STH_API const sth_tensor_info *sth_checkpoint_find(const sth_checkpoint *checkpoint,
                                                   const char *name);
STH_API uint32_t sth_checkpoint_file_count(const sth_checkpoint *checkpoint);
STH_API const char *sth_checkpoint_file_path(const sth_checkpoint *checkpoint, uint32_t file);
/* The descriptor that the file is read through, for a mapping of the same file whatever its path
 * leads to by now; -1 past the end. The checkpoint's: not to be closed. */
STH_API int sth_checkpoint_file_descriptor(const sth_checkpoint *checkpoint, uint32_t file);
/* Bytes of file `file` that no tensor covers, which a layer index may leave. */
STH_API uint64_t sth_checkpoint_hole_bytes(const sth_checkpoint *checkpoint, uint32_t file);

/* Reads [offset, offset+bytes) of a file into `buffer`. A short read is IO, never zeros; a file
 * that was truncated or written to since open (size or time of change) is CHANGED_DATA. A file
 * that was deleted or replaced by another of its name still gives its old bytes. A range past
 * the end is INVALID_ARGUMENT. Threads: any, at once. Blocks: for the disk. Allocates: no. */
STH_API sth_status sth_checkpoint_read(sth_checkpoint *checkpoint, uint32_t file, uint64_t offset,
                                       uint64_t bytes, void *buffer);

/* The names under which checkpoints may hold a parameter of a model. Other code may have written the
 * checkpoint: a wrapper's component may be missing, attention and feed-forward parts may be called
 * otherwise, and everything may lie under a root. They come by rank: 0 the name itself, 1 the name
 * without wrappers under any root, 2 its aliases. A hit in one rank hides the later ones; two hits in
 * one rank are ambiguous, where the tensors differ. `name` is valid during the call alone. */
typedef void sth_name_visit(void *context, uint32_t rank, const char *name);
/* Calls `visit` with each of them, ranks ascending. Returns INVALID_ARGUMENT for a name with more than
 * 4096 of them, before any call; OUT_OF_HOST_MEMORY. Threads: any, at once. Blocks: no. Allocates:
 * scratch. */
STH_API sth_status sth_checkpoint_names(const char *name, sth_name_visit *visit, void *context);

/* A byte range of a checkpoint file, or of a store's layer, and where it goes in a unit's place
 * (runtime.h). */
typedef struct sth_file_range {
    uint32_t file;         /* index within the checkpoint; with a store, of the layer */
    uint64_t file_offset;  /* bytes; with a store, from the start of the layer */
    uint64_t bytes;
    /* bytes from the start of the place, or of the packed image; multiple of 512 */
    uint64_t place_offset;
} sth_file_range;

/* How a file's bytes are brought into memory while its units stream. X(name, text) */
#define STH_READ_WAY_LIST(X)      \
    X(URING, "io_uring")          \
    X(DIRECT, "direct")           \
    X(CACHED, "page cache")       \
    X(BUFFERED, "buffered")

typedef enum sth_read_way {
#define STH_READ_WAY_ENUM(name, text) STH_READ_##name,
    STH_READ_WAY_LIST(STH_READ_WAY_ENUM)
#undef STH_READ_WAY_ENUM
        STH_READ_WAY_COUNT
} sth_read_way;

STH_API const char *sth_read_way_name(sth_read_way way); /* "io_uring"; "?" out of range */

/* The way that was chosen for one file, and what was read. URING and DIRECT go around the page
 * cache (O_DIRECT), with several requests of one thread under way or with several threads;
 * CACHED takes what is in the page cache there and the rest around it; BUFFERED goes through it. */
typedef struct sth_file_way {
    sth_read_way way;
    const char *path;      /* lives as long as the checkpoint */
    char why[128];         /* why this one */
    /* bytes: offset, length and address of direct reads; 1 where there are none */
    uint32_t align;
    uint64_t read_bytes;   /* by the runtime asked */
    uint64_t cached_bytes; /* of them, found in the page cache (CACHED only) */
} sth_file_way;

/* Finds, by trying, the way in which a runtime would read the file now: it is opened for direct
 * reads, one block is read, and the page cache is sampled. Returns INVALID_ARGUMENT. Threads: any,
 * at once. Blocks: for one block of the disk. Allocates: no. */
STH_API sth_status sth_checkpoint_file_way(sth_checkpoint *checkpoint, uint32_t file,
                                           sth_file_way *out_way);

#ifdef __cplusplus
}
#endif
#endif
