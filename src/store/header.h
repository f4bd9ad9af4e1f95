/* The usual text of a safetensors header, read without a tree. */
#ifndef STHI_STORE_HEADER_H
#define STHI_STORE_HEADER_H
#include <stdbool.h>
#include <stddef.h>

#include "stagehand/checkpoint.h"

typedef struct sthi_header {
    const char *text, *end; /* what is still to be read */
    const char *metadata;   /* the value of __metadata__ in the text, NULL: none so far */
    size_t metadata_bytes;
    bool begun, odd;
    char *room; /* for a name and a dtype */
} sthi_header;

/* text: all of the header. room: as many bytes, the caller's. */
void sthi_header_begin(sthi_header *header, const char *text, size_t bytes, char *room);

/* The next tensor, with its name, dtype and shape, its offset from the start of the data, and its bytes. Its texts live
 * until the next call. False at the end, and where the text is `odd`: not wrong perhaps, but to be read by a parser
 * that knows all of JSON, from its start. A text that is not odd to its end is right, but for names that come twice and
 * the value of the metadata, which are left to the caller. */
bool sthi_header_next(sthi_header *header, sth_tensor_info *out);
#endif
