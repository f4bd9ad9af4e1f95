/* The tiles of lossless.c for one width of vectors; included once for each, with
 *   NAME(part)  what they are called, planes_of and symbols_of among them, which the includer defines
 *   TARGET      the attribute that lets the compiler use such vectors
 * and forgets these. No include guard. */
#define INLINE TARGET static inline __attribute__((always_inline))

/* A chunk's elements, taken apart. */
INLINE void NAME(split)(int dtype, const uint8_t *from, chunk *c, uint8_t *rest) {
    const half_bits *h = (const half_bits *)from;
    const word_bits *w = (const word_bits *)from;
    if (dtype == STH_DTYPE_BF16) {
        for (uint32_t i = 0; i < CHUNK; i++) c->symbols[i] = (uint8_t)(h[i] >> 7);
        for (uint32_t i = 0; i < CHUNK; i++) rest[i] = (uint8_t)((h[i] >> 8 & 0x80) | (h[i] & 0x7f));
    } else if (dtype == STH_DTYPE_F16) {
        for (uint32_t i = 0; i < CHUNK; i++) c->symbols[i] = (uint8_t)(h[i] >> 10 & 31);
        for (uint32_t i = 0; i < CHUNK; i++) rest[i] = (uint8_t)h[i];
        for (uint32_t i = 0; i < CHUNK; i++) c->raw[i] = (uint8_t)((h[i] >> 8 & 3) | (h[i] >> 13 & 4));
    } else {
        for (uint32_t i = 0; i < CHUNK; i++) c->symbols[i] = (uint8_t)(w[i] >> 23);
        for (uint32_t i = 0; i < CHUNK; i++) rest[i] = (uint8_t)w[i];
        for (uint32_t i = 0; i < CHUNK; i++) rest[CHUNK + i] = (uint8_t)(w[i] >> 8);
        for (uint32_t i = 0; i < CHUNK; i++) rest[2 * CHUNK + i] = (uint8_t)((w[i] >> 24 & 0x80) | (w[i] >> 16 & 0x7f));
    }
}

INLINE void NAME(merge)(int dtype, const chunk *c, const uint8_t *rest, uint8_t *to) {
    half_bits *h = (half_bits *)to;
    word_bits *w = (word_bits *)to;
    if (dtype == STH_DTYPE_BF16) {
        for (uint32_t i = 0; i < CHUNK; i++)
            h[i] = (uint16_t)((rest[i] & 0x80) << 8 | c->symbols[i] << 7 | (rest[i] & 0x7f));
    } else if (dtype == STH_DTYPE_F16) {
        for (uint32_t i = 0; i < CHUNK; i++)
            h[i] = (uint16_t)((c->raw[i] & 4) << 13 | (c->symbols[i] & 31) << 10 | (c->raw[i] & 3) << 8 | rest[i]);
    } else {
        for (uint32_t i = 0; i < CHUNK; i++)
            w[i] = (uint32_t)(rest[2 * CHUNK + i] & 0x80) << 24 | (uint32_t)c->symbols[i] << 23 |
                   (uint32_t)(rest[2 * CHUNK + i] & 0x7f) << 16 | (uint32_t)rest[CHUNK + i] << 8 | rest[i];
    }
}

INLINE void NAME(pack_as)(int dtype, const packer *p, const uint8_t *from, uint8_t *record, escapes *e) {
    const sthi_lossless_form form = sthi_lossless_form_of(dtype);
    uint8_t *words = record + STHI_TILE_ELEMENTS * form.bytes;
    chunk c;
    for (uint32_t i = 0; i < CHUNKS; i++) {
        NAME(split)(dtype, from + i * CHUNK * form.bits / 8, &c, record + i * CHUNK * form.bytes);
        NAME(planes_of)(p, &c, form.planes, words + i * LANES_OF_4 * form.planes * 4, e);
    }
}

INLINE void NAME(unpack_as)(int dtype, const unpacker *u, const uint8_t *record, uint32_t start, uint8_t *to) {
    const sthi_lossless_form form = sthi_lossless_form_of(dtype);
    const uint8_t *words = record + STHI_TILE_ELEMENTS * form.bytes;
    chunk c;
    for (uint32_t i = 0; i < CHUNKS; i++) {
        start = NAME(symbols_of)(u, words + i * LANES_OF_4 * form.planes * 4, form.planes, start, &c);
        NAME(merge)(dtype, &c, record + i * CHUNK * form.bytes, to + i * CHUNK * form.bits / 8);
    }
}

TARGET static void NAME(pack)(int dtype, const packer *p, const uint8_t *from, uint8_t *record, escapes *e) {
    if (dtype == STH_DTYPE_BF16) NAME(pack_as)(STH_DTYPE_BF16, p, from, record, e);
    else if (dtype == STH_DTYPE_F16) NAME(pack_as)(STH_DTYPE_F16, p, from, record, e);
    else NAME(pack_as)(STH_DTYPE_F32, p, from, record, e);
}

TARGET static void NAME(unpack)(int dtype, const unpacker *u, const uint8_t *record, uint32_t start, uint8_t *to) {
    if (dtype == STH_DTYPE_BF16) NAME(unpack_as)(STH_DTYPE_BF16, u, record, start, to);
    else if (dtype == STH_DTYPE_F16) NAME(unpack_as)(STH_DTYPE_F16, u, record, start, to);
    else NAME(unpack_as)(STH_DTYPE_F32, u, record, start, to);
}

#undef INLINE
#undef NAME
#undef TARGET
