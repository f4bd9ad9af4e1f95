/* Floating-point values packed without loss, from the inside; docs/lossless.md has the layout. Pure; no locks. */
#ifndef STHI_QUANT_LOSSLESS_H
#define STHI_QUANT_LOSSLESS_H
#include "device/lossless.h"
#include "stagehand/status.h"

enum { STHI_EXPONENTS = 7, STHI_ESCAPE = 7 };

/* How often each exponent occurs. `elements`: at most UINT32_MAX, as everywhere. */
typedef struct sthi_exponents {
    uint32_t count[256];
} sthi_exponents;
void sthi_exponents_count(sth_dtype dtype, const void *values, uint64_t elements, sthi_exponents *out);
/* The 7 that occur most, the smaller one first where two occur as often; the rest of the table; and how many elements
 * have none of them. */
uint64_t sthi_exponents_choose(const sthi_exponents *e, uint8_t table[STHI_TABLE_BYTES]);

/* Bytes that so many values take in segments, from samples; their own where it does not pay. */
uint64_t sthi_lossless_estimate(sth_dtype dtype, const void *values, uint64_t elements);
/* The same of values that are not known: what weights usually take. */
uint64_t sthi_lossless_usual(sth_dtype dtype, uint64_t elements);

/* Packs into `bytes` bytes at `packed` (sthi_lossless_has_size()). False where there are
 * more escapes than have room; `packed` is then of no use. */
bool sthi_lossless_pack(sth_dtype dtype, const void *values, uint64_t elements, uint8_t *packed, uint64_t bytes);
/* Elements [begin, end) of `elements`. Reads `bytes` bytes at `packed` and nothing else, whatever they are. */
void sthi_lossless_unpack(sth_dtype dtype, const uint8_t *packed, uint64_t bytes, uint64_t elements, uint64_t begin,
                          uint64_t end, void *out);
/* NULL, or what is wrong with packed bytes that nobody vouches for; *out_at: the byte. */
const char *sthi_lossless_wrong(sth_dtype dtype, const uint8_t *packed, uint64_t bytes, uint64_t elements,
                                uint64_t *out_at);

/* The same of the table and the starts alone, which `table` points to: that they are no table, or lead outside. */
const char *sthi_lossless_wrong_table(sth_dtype dtype, const uint8_t *table, uint64_t bytes, uint64_t elements,
                                      uint64_t *out_at);
#endif
