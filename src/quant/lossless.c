/* Packs and unpacks floating-point values without loss; docs/lossless.md is the layout. An element is taken apart into
 * its exponent and the rest; chunks of 128 elements into bytes of the rest and words of bits, one bit for each of 32
 * lanes, where lane i has the elements 4 i to 4 i + 3.
 *
 * The same source is compiled for wider vectors (lossless_kernel.h); only how chunks of symbols become words, and the
 * way back, is written for each. All have the same bytes. Unpacking trusts no byte: an escape that lies outside is
 * read as exponent 0. Pure; no locks. */
#include "quant/lossless.h"

#include <string.h>

#include "base/arith.h"
#include "base/processor.h"
#include "store/dtype.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") /* else it leaves loops over chunks without vectors: a third of the rate */
#endif

enum { CHUNK = 128, CHUNKS = STHI_TILE_ELEMENTS / CHUNK, LANES_OF_4 = 4, CODE_PLANES = 3, VERSION_AT = 8 };
enum { SAMPLES = 64 }; /* tiles of an estimate */

typedef uint16_t half_bits __attribute__((aligned(1), may_alias));
typedef uint32_t word_bits __attribute__((aligned(1), may_alias));

/* Elements of a chunk without their whole bytes. */
typedef struct chunk {
    uint8_t symbols[CHUNK]; /* exponents */
    uint8_t raw[CHUNK];     /* bits of sign and mantissa that are no whole byte */
} __attribute__((aligned(64))) chunk;

typedef struct packer {
    const uint8_t *table;
    uint8_t code_of[256];
} packer;

typedef struct escapes {
    uint8_t *at;
    uint32_t count; /* never more than were counted before */
} escapes;

typedef struct unpacker {
    const uint8_t *table, *escapes;
    uint64_t escape_count;
} unpacker;

static uint8_t escape_at(const unpacker *u, uint32_t i) { return i < u->escape_count ? u->escapes[i] : 0; }

/* ---- planes: symbols to words and back */

static void planes_of_plain(const packer *p, const chunk *c, uint32_t planes, uint8_t *out, escapes *e) {
    for (uint32_t j = 0; j < LANES_OF_4; j++) {
        uint32_t words[6] = {0};
        for (uint32_t lane = 0; lane < 32; lane++) {
            uint8_t symbol = c->symbols[4 * lane + j], code = p->code_of[symbol];
            uint32_t bits = planes > CODE_PLANES ? code | (uint32_t)c->raw[4 * lane + j] << CODE_PLANES : code;
            for (uint32_t k = 0; k < planes; k++) words[k] |= (bits >> k & 1) << lane;
            if (code == STHI_ESCAPE) e->at[e->count++] = symbol;
        }
        memcpy(out + j * planes * 4, words, planes * 4);
    }
}

static uint32_t symbols_of_plain(const unpacker *u, const uint8_t *in, uint32_t planes, uint32_t start, chunk *out) {
    for (uint32_t j = 0; j < LANES_OF_4; j++) {
        uint32_t words[6];
        memcpy(words, in + j * planes * 4, planes * 4);
        for (uint32_t lane = 0; lane < 32; lane++) {
            uint32_t bits = 0;
            for (uint32_t k = 0; k < planes; k++) bits |= (words[k] >> lane & 1) << k;
            uint32_t code = bits & 7;
            out->symbols[4 * lane + j] = code == STHI_ESCAPE ? escape_at(u, start++) : u->table[code];
            if (planes > CODE_PLANES) out->raw[4 * lane + j] = (uint8_t)(bits >> CODE_PLANES);
        }
    }
    return start;
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,bmi")))
typedef __m256i four_vectors[LANES_OF_4];

/* 128 bytes in their order: vector j gets byte j of each word. */
AVX2 static inline __attribute__((always_inline)) void to_lanes(const uint8_t *from, four_vectors v) {
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5,
                                             9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i together = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i t[4];
    for (int k = 0; k < 4; k++) {
        t[k] = _mm256_shuffle_epi8(_mm256_load_si256((const __m256i *)from + k), by_byte);
        t[k] = _mm256_permutevar8x32_epi32(t[k], together); /* quarter j is byte j of 8 words */
    }
    __m256i a = _mm256_unpacklo_epi64(t[0], t[1]), b = _mm256_unpackhi_epi64(t[0], t[1]);
    __m256i c = _mm256_unpacklo_epi64(t[2], t[3]), d = _mm256_unpackhi_epi64(t[2], t[3]);
    v[0] = _mm256_permute2x128_si256(a, c, 0x20);
    v[1] = _mm256_permute2x128_si256(b, d, 0x20);
    v[2] = _mm256_permute2x128_si256(a, c, 0x31);
    v[3] = _mm256_permute2x128_si256(b, d, 0x31);
}

/* The way back. */
AVX2 static inline __attribute__((always_inline)) void of_lanes(const four_vectors v, uint8_t *to) {
    __m256i a = _mm256_unpacklo_epi8(v[0], v[1]), b = _mm256_unpackhi_epi8(v[0], v[1]);
    __m256i c = _mm256_unpacklo_epi8(v[2], v[3]), d = _mm256_unpackhi_epi8(v[2], v[3]);
    __m256i w0 = _mm256_unpacklo_epi16(a, c), w1 = _mm256_unpackhi_epi16(a, c);
    __m256i w2 = _mm256_unpacklo_epi16(b, d), w3 = _mm256_unpackhi_epi16(b, d);
    _mm256_store_si256((__m256i *)to, _mm256_permute2x128_si256(w0, w1, 0x20));
    _mm256_store_si256((__m256i *)to + 1, _mm256_permute2x128_si256(w2, w3, 0x20));
    _mm256_store_si256((__m256i *)to + 2, _mm256_permute2x128_si256(w0, w1, 0x31));
    _mm256_store_si256((__m256i *)to + 3, _mm256_permute2x128_si256(w2, w3, 0x31));
}

AVX2 static inline uint32_t plane(__m256i v, int bit) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(v, _mm_cvtsi32_si128(7 - bit)));
}

AVX2 static inline __attribute__((always_inline)) void planes_of_avx2(const packer *p, const chunk *c, uint32_t planes,
                                                                      uint8_t *out, escapes *e) {
    four_vectors symbols, raw;
    to_lanes(c->symbols, symbols);
    if (planes > CODE_PLANES) to_lanes(c->raw, raw);
    for (int j = 0; j < LANES_OF_4; j++) {
        __m256i code = _mm256_set1_epi8(STHI_ESCAPE);
        uint32_t words[6];
        for (int k = STHI_EXPONENTS - 1; k >= 0; k--) {
            __m256i equal = _mm256_cmpeq_epi8(symbols[j], _mm256_set1_epi8((char)p->table[k]));
            code = _mm256_blendv_epi8(code, _mm256_set1_epi8((char)k), equal);
        }
        for (uint32_t k = 0; k < planes; k++)
            words[k] = k < CODE_PLANES ? plane(code, (int)k) : plane(raw[j], (int)k - CODE_PLANES);
        memcpy(out + (uint32_t)j * planes * 4, words, planes * 4);
        uint32_t out_of_table = words[0] & words[1] & words[2];
        if (!out_of_table) continue;
        uint8_t lanes[32] __attribute__((aligned(32)));
        _mm256_store_si256((__m256i *)lanes, symbols[j]);
        for (; out_of_table; out_of_table &= out_of_table - 1)
            e->at[e->count++] = lanes[__builtin_ctz(out_of_table)];
    }
}

/* Byte i is `value` where bit i is set. */
AVX2 static inline __m256i bytes_of(uint32_t word, char value) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2,
                                            3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i each = _mm256_set1_epi64x((long long)0x8040201008040201u);
    __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)word), spread), each);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bits, each), _mm256_set1_epi8(value));
}

AVX2 static inline __attribute__((always_inline)) uint32_t symbols_of_avx2(const unpacker *u, const uint8_t *in,
                                                                           uint32_t planes, uint32_t start,
                                                                           chunk *out) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)u->table));
    four_vectors symbols, raw;
    for (int j = 0; j < LANES_OF_4; j++) {
        uint32_t words[6];
        memcpy(words, in + (uint32_t)j * planes * 4, planes * 4);
        __m256i code = _mm256_or_si256(_mm256_or_si256(bytes_of(words[0], 1), bytes_of(words[1], 2)),
                                       bytes_of(words[2], 4));
        symbols[j] = _mm256_shuffle_epi8(table, code);
        if (planes > CODE_PLANES)
            raw[j] = _mm256_or_si256(_mm256_or_si256(bytes_of(words[3], 1), bytes_of(words[4], 2)),
                                     bytes_of(words[5], 4));
        uint32_t escaped = words[0] & words[1] & words[2];
        if (!escaped) continue;
        uint8_t lanes[32] __attribute__((aligned(32)));
        _mm256_store_si256((__m256i *)lanes, symbols[j]);
        for (; escaped; escaped &= escaped - 1) lanes[__builtin_ctz(escaped)] = escape_at(u, start++);
        symbols[j] = _mm256_load_si256((const __m256i *)lanes);
    }
    of_lanes(symbols, out->symbols);
    if (planes > CODE_PLANES) of_lanes(raw, out->raw);
    return start;
}
#endif

/* ---- tiles */

#define NAME(part) part##_plain
#define TARGET
#include "quant/lossless_kernel.h"
#if defined(__x86_64__)
#define NAME(part) part##_avx2
#define TARGET AVX2
#include "quant/lossless_kernel.h"
#endif

typedef struct kernels {
    void (*pack)(int dtype, const packer *p, const uint8_t *from, uint8_t *record, escapes *e);
    void (*unpack)(int dtype, const unpacker *u, const uint8_t *record, uint32_t start, uint8_t *to);
} kernels;

static const kernels *choose(void) {
    static const kernels all[] = {{pack_plain, unpack_plain},
#if defined(__x86_64__)
                                  {pack_avx2, unpack_avx2},
#endif
    };
    return &all[sthi_processor_variant(sizeof all / sizeof *all - 1)];
}

/* ---- exponents */

static uint32_t exponent_of(sth_dtype dtype, const uint8_t *values, uint64_t i) {
    if (dtype == STH_DTYPE_F32) return ((const word_bits *)values)[i] >> 23 & 255;
    uint32_t h = ((const half_bits *)values)[i];
    return dtype == STH_DTYPE_BF16 ? h >> 7 & 255 : h >> 10 & 31;
}

/* Next to each other lie equal exponents: counts of four neighbors do not wait for each other. */
static inline __attribute__((always_inline)) void count_as(sth_dtype dtype, const uint8_t *values, uint64_t elements,
                                                           uint32_t counts[4][256]) {
    uint64_t i = 0;
    for (; i + 4 <= elements; i += 4)
        for (uint32_t k = 0; k < 4; k++) counts[k][exponent_of(dtype, values, i + k)]++;
    for (; i < elements; i++) counts[0][exponent_of(dtype, values, i)]++;
}

void sthi_exponents_count(sth_dtype dtype, const void *values, uint64_t elements, sthi_exponents *out) {
    uint32_t counts[4][256] = {{0}};
    if (dtype == STH_DTYPE_BF16) count_as(STH_DTYPE_BF16, values, elements, counts);
    else if (dtype == STH_DTYPE_F16) count_as(STH_DTYPE_F16, values, elements, counts);
    else count_as(STH_DTYPE_F32, values, elements, counts);
    for (uint32_t s = 0; s < 256; s++) out->count[s] = counts[0][s] + counts[1][s] + counts[2][s] + counts[3][s];
}

uint64_t sthi_exponents_choose(const sthi_exponents *e, uint8_t table[STHI_TABLE_BYTES]) {
    uint64_t rest = 0;
    bool chosen[256] = {false};
    memset(table, 0, STHI_TABLE_BYTES);
    table[VERSION_AT] = STHI_LOSSLESS_VERSION;
    for (uint32_t k = 0; k < STHI_EXPONENTS; k++) {
        int best = -1;
        for (int s = 0; s < 256; s++)
            if (!chosen[s] && (best < 0 || e->count[s] > e->count[best])) best = s;
        chosen[best] = true;
        table[k] = (uint8_t)best;
    }
    for (uint32_t s = 0; s < 256; s++) rest += chosen[s] ? 0 : e->count[s];
    return rest;
}

static uint64_t each_of(sthi_lossless_form form) { return form.bits / 8; }

uint64_t sthi_lossless_estimate(sth_dtype dtype, const void *values, uint64_t elements) {
    const sthi_lossless_form form = sthi_lossless_form_of((int)dtype);
    uint64_t plain = elements * sthi_dtype_bits(dtype) / 8, tiles = elements / STHI_TILE_ELEMENTS;
    uint64_t samples = sthi_min_u64(tiles, SAMPLES);
    if (!form.bits || !samples) return plain;
    sthi_exponents all = {{0}}, some;
    for (uint64_t i = 0; i < samples; i++) {
        uint64_t tile = samples == 1 ? 0 : (tiles - 1) / (samples - 1) * i;
        sthi_exponents_count(dtype, (const uint8_t *)values + tile * STHI_TILE_ELEMENTS * each_of(form),
                             STHI_TILE_ELEMENTS, &some);
        for (uint32_t s = 0; s < 256; s++) all.count[s] += some.count[s];
    }
    uint8_t table[STHI_TABLE_BYTES];
    double share = (double)sthi_exponents_choose(&all, table) / (double)(samples * STHI_TILE_ELEMENTS);
    uint64_t packed = sthi_lossless_roomy((int)dtype, elements, (uint64_t)(share * (double)elements));
    return sthi_lossless_pays(packed, plain) ? packed : plain;
}

uint64_t sthi_lossless_usual(sth_dtype dtype, uint64_t elements) {
    uint64_t plain = elements * sthi_dtype_bits(dtype) / 8;
    switch ((int)dtype) {
    case STH_DTYPE_BF16: return (uint64_t)((double)plain * 0.71);
    case STH_DTYPE_F16: return (uint64_t)((double)plain * 0.9);
    case STH_DTYPE_F32: return (uint64_t)((double)plain * 0.86);
    default: return plain;
    }
}

/* ---- whole arrays */

/* Behind the last element stand elements of the first exponent of the table, which is never an escape. */
static void pad(sth_dtype dtype, uint8_t exponent, uint8_t *tile, uint64_t from) {
    for (uint64_t i = from; i < STHI_TILE_ELEMENTS; i++)
        if (dtype == STH_DTYPE_F32) ((word_bits *)tile)[i] = (uint32_t)exponent << 23;
        else ((half_bits *)tile)[i] = (uint16_t)(exponent << (dtype == STH_DTYPE_BF16 ? 7 : 10));
}

bool sthi_lossless_pack(sth_dtype dtype, const void *values, uint64_t elements, uint8_t *packed, uint64_t bytes) {
    const sthi_lossless_form form = sthi_lossless_form_of((int)dtype);
    const kernels *with = choose();
    uint64_t tiles = sthi_lossless_tiles(elements), record = sthi_lossless_record(form);
    uint64_t fixed = sthi_lossless_fixed(form, elements);
    uint8_t *table = packed + tiles * record, *starts = table + STHI_TABLE_BYTES, last[STHI_TILE_ELEMENTS * 4];
    sthi_exponents found;
    sthi_exponents_count(dtype, values, elements, &found);
    if (sthi_exponents_choose(&found, table) > bytes - fixed) return false;
    packer p = {.table = table};
    memset(p.code_of, STHI_ESCAPE, sizeof p.code_of);
    for (int k = STHI_EXPONENTS - 1; k >= 0; k--) p.code_of[table[k]] = (uint8_t)k;
    escapes e = {.at = packed + fixed};
    for (uint64_t t = 0; t < tiles; t++) {
        const uint8_t *from = (const uint8_t *)values + t * STHI_TILE_ELEMENTS * each_of(form);
        uint64_t there = sthi_min_u64(STHI_TILE_ELEMENTS, elements - t * STHI_TILE_ELEMENTS);
        if (there < STHI_TILE_ELEMENTS) {
            memcpy(last, from, there * each_of(form));
            pad(dtype, table[0], last, there);
            from = last;
        }
        memcpy(starts + 4 * t, &e.count, 4);
        with->pack((int)dtype, &p, from, packed + t * record, &e);
    }
    memset(starts + 4 * tiles, 0, fixed - (uint64_t)(starts + 4 * tiles - packed));
    memset(e.at + e.count, 0, bytes - fixed - e.count);
    return true;
}

void sthi_lossless_unpack(sth_dtype dtype, const uint8_t *packed, uint64_t bytes, uint64_t elements, uint64_t begin,
                          uint64_t end, void *out) {
    const sthi_lossless_form form = sthi_lossless_form_of((int)dtype);
    const kernels *with = choose();
    uint64_t tiles = sthi_lossless_tiles(elements), record = sthi_lossless_record(form), each = each_of(form);
    uint64_t fixed = sthi_lossless_fixed(form, elements);
    const uint8_t *table = packed + tiles * record;
    unpacker u = {.table = table, .escapes = packed + fixed, .escape_count = bytes - fixed};
    uint8_t some[STHI_TILE_ELEMENTS * 4], *to = out;
    for (uint64_t at = begin, stop; at < end; to += (stop - at) * each, at = stop) {
        uint64_t t = at / STHI_TILE_ELEMENTS, first = t * STHI_TILE_ELEMENTS;
        uint32_t start;
        memcpy(&start, table + STHI_TABLE_BYTES + 4 * t, sizeof start);
        stop = sthi_min_u64(end, first + STHI_TILE_ELEMENTS);
        bool whole = stop - at == STHI_TILE_ELEMENTS;
        with->unpack((int)dtype, &u, packed + t * record, start, whole ? to : some);
        if (!whole) memcpy(to, some + (at - first) * each, (stop - at) * each);
    }
}

/* Escapes of a tile, by its words. */
static uint32_t escapes_in(sthi_lossless_form form, const uint8_t *record) {
    const uint8_t *words = record + STHI_TILE_ELEMENTS * form.bytes;
    uint32_t sum = 0, w[CODE_PLANES];
    for (uint32_t i = 0; i < CHUNKS * LANES_OF_4; i++) {
        memcpy(w, words + i * form.planes * 4, sizeof w);
        sum += (uint32_t)__builtin_popcount(w[0] & w[1] & w[2]);
    }
    return sum;
}

/* Whether the elements of the last tile from `from` on have any bit: they are there to fill it. *out_at: in the tile.
 * */
static bool has_filling(sthi_lossless_form form, const uint8_t *record, uint32_t from, uint64_t *out_at) {
    const uint8_t *words = record + STHI_TILE_ELEMENTS * form.bytes;
    for (uint32_t e = from; e < STHI_TILE_ELEMENTS; e++) {
        uint32_t c = e / CHUNK, i = e % CHUNK, lane = i / LANES_OF_4;
        for (uint32_t b = 0; b < form.bytes; b++) {
            *out_at = (c * form.bytes + b) * CHUNK + i;
            if (record[*out_at]) return true;
        }
        for (uint32_t k = 0; k < form.planes; k++) {
            uint64_t in_words = ((c * LANES_OF_4 + i % LANES_OF_4) * form.planes + k) * 4 + lane / 8;
            *out_at = STHI_TILE_ELEMENTS * form.bytes + in_words;
            if (words[in_words] >> lane % 8 & 1) return true;
        }
    }
    return false;
}

static const char *wrong_exponents(sth_dtype dtype, const uint8_t *table, uint64_t *out_at) {
    *out_at = VERSION_AT;
    if (table[VERSION_AT] != STHI_LOSSLESS_VERSION) return "is of a version that is not known";
    for (uint64_t k = 0; k < STHI_TABLE_BYTES; k++) {
        *out_at = k;
        bool more = k >= STHI_EXPONENTS && k != VERSION_AT && table[k];
        if (more || (k < STHI_EXPONENTS && dtype == STH_DTYPE_F16 && table[k] > 31)) return "has a table that is none";
    }
    return NULL;
}

static uint32_t start_at(const uint8_t *table, uint64_t tile, uint64_t *out_at) {
    uint32_t start;
    *out_at = STHI_TABLE_BYTES + 4 * tile;
    memcpy(&start, table + *out_at, sizeof start);
    return start;
}

const char *sthi_lossless_wrong_table(sth_dtype dtype, const uint8_t *table, uint64_t bytes, uint64_t elements,
                                      uint64_t *out_at) {
    uint64_t room = bytes - sthi_lossless_fixed(sthi_lossless_form_of((int)dtype), elements), last = 0;
    const char *wrong = wrong_exponents(dtype, table, out_at);
    if (wrong) return wrong;
    for (uint64_t t = 0; t < sthi_lossless_tiles(elements); t++) {
        uint64_t start = start_at(table, t, out_at);
        if (start < last || start > room || start - last > STHI_TILE_ELEMENTS)
            return "has a tile whose escapes begin elsewhere than they should";
        last = start;
    }
    return NULL;
}

const char *sthi_lossless_wrong(sth_dtype dtype, const uint8_t *packed, uint64_t bytes, uint64_t elements,
                                uint64_t *out_at) {
    const sthi_lossless_form form = sthi_lossless_form_of((int)dtype);
    uint64_t tiles = sthi_lossless_tiles(elements), record = sthi_lossless_record(form);
    uint64_t fixed = sthi_lossless_fixed(form, elements), sum = 0, at = tiles * record;
    const uint8_t *table = packed + at;
    const char *wrong = wrong_exponents(dtype, table, out_at);
    *out_at += at;
    if (wrong) return wrong;
    for (uint64_t t = 0; t < tiles; t++) {
        uint32_t start = start_at(table, t, out_at);
        *out_at += at;
        if (start != sum) return "has a tile whose escapes begin elsewhere than they should";
        sum += escapes_in(form, packed + t * record);
    }
    uint32_t filled = (uint32_t)(elements % STHI_TILE_ELEMENTS);
    bool more = filled && has_filling(form, packed + (tiles - 1) * record, filled, out_at);
    *out_at += (tiles - 1) * record;
    if (more) return "has something behind its values";
    for (*out_at = at + STHI_TABLE_BYTES + 4 * tiles; *out_at < fixed; ++*out_at)
        if (packed[*out_at]) return "has something behind its starts";
    *out_at = fixed;
    if (sum > bytes - fixed) return "has more escapes than bytes for them";
    for (; *out_at < fixed + sum; ++*out_at)
        if (dtype == STH_DTYPE_F16 && packed[*out_at] > 31) return "has an escape that is no exponent";
    for (; *out_at < bytes; ++*out_at)
        if (packed[*out_at]) return "has something behind its escapes";
    return NULL;
}
