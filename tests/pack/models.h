/* Checkpoints to pack, and what can be seen of the results. */
#ifndef TESTS_PACK_MODELS_H
#define TESTS_PACK_MODELS_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/pack.h"

enum { MODEL_DATA = 600 };

/* folder/model.safetensors: a.weight F32 [8, 16], a.bias BF16 [8], b.weight BF16 [4, 4], c U8
 * [40]; all floats finite. The path lives until the 8th next call of temp_path(). */
const char *model_write(const char *folder);
unsigned char *model_bytes(const char *tensor); /* of the data that model_write() writes: tests may change it before */
void model_reset(void);                         /* undoes such changes */

/* Packs with one thread. */
sth_status model_pack(const char *in, const char *out, sth_pack_format format);
sth_pack_options model_options(sth_pack_format format);
bool model_is_there(const char *path);
/* Number of entries of a folder whose names do not begin with a dot. */
int model_entries(const char *folder);
/* Whether two files have the same bytes. */
bool model_same(const char *a, const char *b);
#endif
