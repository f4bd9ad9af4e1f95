/* The header of one safetensors file. */
#ifndef STHI_STORE_SAFETENSORS_H
#define STHI_STORE_SAFETENSORS_H
#include <jansson.h>

#include "store/tensors.h"

/* Appends every tensor of the file to *list with file number `index`, in the order on disk, after all
 * checks have passed; on failure the list may hold some of them. */
sth_status sthi_safetensors_parse(const sthi_file *file, uint32_t index, sthi_tensors *list);
/* out: the JSON that stands as text under the first of `count` keys that the header's __metadata__ has, *out_key:
 * which one; NULL where it has none. The caller lets it go. */
sth_status sthi_safetensors_metadata(const sthi_file *file, const char *const *keys, int count, json_t **out,
                                     int *out_key);
/* The same for the header (with its length in front) of another file, of `whole` bytes, that is a tensor of this one:
 * `bytes` from byte `at` on. Errors call the other file `path`. */
sth_status sthi_safetensors_parse_inner(const sthi_file *file, uint64_t at, uint64_t bytes, const char *path,
                                        uint64_t whole, uint32_t index, sthi_tensors *list);
/* True when the first bytes could be a safetensors header: a length, then '{'. */
sth_status sthi_safetensors_probe(const sthi_file *file, int *out_yes);
#endif
