/* Names of a slab's formats, encodings and parts, from the lists of stagehand/quant.h. */
#include "store/quant.h"

#define STHI_TEXT(name, text) text,
static const char *const formats[] = {STH_QUANT_FORMAT_LIST(STHI_TEXT)};
static const char *const encodings[] = {STH_ENCODING_LIST(STHI_TEXT)};
static const char *const parts[] = {STH_QUANT_PART_LIST(STHI_TEXT)};
#undef STHI_TEXT

const char *sthi_quant_format_name(sth_quant_format format) {
    return (unsigned)format < STH_QUANT_FORMAT_COUNT ? formats[format] : "?";
}

const char *sthi_encoding_name(sth_encoding encoding) {
    return (unsigned)encoding < STH_ENCODING_COUNT ? encodings[encoding] : "?";
}

const char *sthi_quant_part_name(sth_quant_part part) {
    return (unsigned)part < STH_QUANT_PART_COUNT ? parts[part] : "?";
}
