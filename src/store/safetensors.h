/* The header of one safetensors file. */
#ifndef STHI_STORE_SAFETENSORS_H
#define STHI_STORE_SAFETENSORS_H
#include <jansson.h>

#include "store/tensors.h"

/* Appends every tensor of the file to *list with file number `index`, in the order on disk, after all
 * checks have passed; on failure the list may hold some of them. */
sth_status sthi_safetensors_parse(const sthi_file *file, uint32_t index, sthi_tensors *list);
/* *out: the JSON that stands as text under `key` of the header's __metadata__; NULL where there is no such key. The
 * caller lets it go. */
sth_status sthi_safetensors_metadata(const sthi_file *file, const char *key, json_t **out);
/* True when the first bytes could be a safetensors header: a length, then '{'. */
sth_status sthi_safetensors_probe(const sthi_file *file, int *out_yes);
#endif
