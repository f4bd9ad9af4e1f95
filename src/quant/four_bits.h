/* Segments of what files hold in 4 bits, with a Hadamard matrix and low-rank factors. */
#ifndef STHI_QUANT_FOUR_BITS_H
#define STHI_QUANT_FOUR_BITS_H
#include "device/four_bits.h"
#include "quant/segment.h"

/* The bytes of its parts, or what is wrong with its sizes. */
const char *sthi_four_wrong(const sth_segment *s, sthi_four_bytes *out);

/* Elements [begin, end) of the segment, as its dtype. Allocates nothing; takes 110 KiB of stack. */
void sthi_four_decode(const sth_segment *s, const sthi_segment_parts *parts, uint64_t begin, uint64_t end,
                      uint8_t *out);
#endif
