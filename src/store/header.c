/* Headers of some hundred thousand tensors are read at each start of a program, and a tree of them takes ten times the
 * memory and most of the time. This reads the one shape that writers give a header: an object of {dtype, shape,
 * data_offsets}, plain names, whole numbers of up to 18 digits. All else is odd and left to json.c, which has the rules
 * and the errors; so nothing here fails, and nothing here is accepted that is refused there. No locks, no I/O. */
#include "store/header.h"

#include <string.h>

#include "store/dtype.h"
#include "store/json.h"
#include "store/utf8.h"

#define MOST_DIGITS 18 /* of a number: fits into 63 bits */
#define METADATA "__metadata__"

typedef struct piece {
    const char *at;
    size_t bytes;
} piece;

void sthi_header_begin(sthi_header *h, const char *text, size_t bytes, char *room) {
    *h = (sthi_header){.text = text, .end = text + bytes, .room = room};
}

static void skip_space(sthi_header *h) {
    while (h->text < h->end && (*h->text == ' ' || *h->text == '\n' || *h->text == '\t' || *h->text == '\r')) h->text++;
}

/* Whether `c` comes next; it is read then. */
static bool take(sthi_header *h, char c) {
    skip_space(h);
    if (h->text == h->end || *h->text != c) return false;
    h->text++;
    return true;
}

/* A text without escapes. */
static bool take_text(sthi_header *h, piece *out) {
    bool plain = true;
    if (!take(h, '"')) return false;
    out->at = h->text;
    for (; h->text < h->end && *h->text != '"'; h->text++) {
        unsigned char c = (unsigned char)*h->text;
        if (c < 0x20 || c == '\\') return false;
        if (c >= 0x80) plain = false;
    }
    if (h->text == h->end) return false;
    out->bytes = (size_t)(h->text++ - out->at);
    return plain || sthi_utf8_is_text(out->at, out->bytes);
}

static bool is(piece text, const char *word) {
    return text.bytes == strlen(word) && memcmp(text.at, word, text.bytes) == 0;
}

static bool take_number(sthi_header *h, uint64_t *out) {
    uint64_t n = 0;
    skip_space(h);
    const char *first = h->text;
    while (h->text < h->end && *h->text >= '0' && *h->text <= '9' && h->text - first <= MOST_DIGITS)
        n = n * 10 + (uint64_t)(*h->text++ - '0');
    *out = n;
    long digits = h->text - first;
    return digits > 0 && digits <= MOST_DIGITS && (digits == 1 || *first != '0');
}

/* A list of up to `most` numbers. */
static bool take_list(sthi_header *h, uint64_t *numbers, int most, int *out_count) {
    int count = 0;
    if (!take(h, '[')) return false;
    if (!take(h, ']')) {
        do
            if (count == most || !take_number(h, &numbers[count++])) return false;
        while (take(h, ','));
        if (!take(h, ']')) return false;
    }
    *out_count = count;
    return true;
}

/* Behind the key of __metadata__: its extent alone. Strings may hold brackets. */
static bool take_metadata(sthi_header *h) {
    bool inside = false;
    skip_space(h);
    if (h->metadata || h->text == h->end || *h->text != '{') return false;
    const char *at = h->text;
    for (int depth = 0; at < h->end; at++) {
        if (inside) {
            if (*at == '\\') at++;
            else if (*at == '"') inside = false;
        } else if (*at == '"') {
            inside = true;
        } else if (*at == '{') {
            depth++;
        } else if (*at == '}' && --depth == 0) {
            h->metadata = h->text;
            h->metadata_bytes = (size_t)(at + 1 - h->text);
            h->text = at + 1;
            return true;
        }
    }
    return false;
}

enum { NONE = 0, DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = DTYPE | SHAPE | OFFSETS };

static unsigned field_of(piece key) {
    if (is(key, "dtype")) return DTYPE;
    if (is(key, "shape")) return SHAPE;
    return is(key, "data_offsets") ? OFFSETS : NONE;
}

/* Each of the three, once. */
static bool take_entry(sthi_header *h, piece *dtype, sth_tensor_info *t) {
    uint64_t offsets[2];
    int count = 0;
    unsigned seen = 0;
    piece key;
    if (!take(h, '{')) return false;
    do {
        if (!take_text(h, &key) || !take(h, ':')) return false;
        unsigned field = field_of(key);
        bool read = false;
        if (field == DTYPE) read = take_text(h, dtype);
        else if (field == SHAPE) read = take_list(h, t->shape, STH_MAX_RANK, &t->rank);
        else if (field == OFFSETS) read = take_list(h, offsets, 2, &count) && count == 2 && offsets[1] >= offsets[0];
        if (!read || seen & field) return false;
        seen |= field;
    } while (take(h, ','));
    if (seen != ALL || !take(h, '}')) return false;
    t->offset = offsets[0];
    t->bytes = offsets[1] - offsets[0];
    return true;
}

/* Into the room, which holds all that stands between quotation marks, with an end each. */
static const char *copy(char **room, piece text) {
    char *copied = *room;
    memcpy(copied, text.at, text.bytes);
    copied[text.bytes] = 0;
    *room += text.bytes + 1;
    return copied;
}

static bool take_tensor(sthi_header *h, piece name, sth_tensor_info *t) {
    piece dtype = {NULL, 0};
    char *room = h->room;
    if (!take_entry(h, &dtype, t)) return false;
    t->name = copy(&room, name);
    t->spelling = copy(&room, dtype);
    if (!sthi_dtype_find(t->spelling, &t->dtype)) t->dtype = STH_DTYPE_OTHER;
    return sthi_json_size_fits(t);
}

/* Whether another member of the header's object follows. */
static bool follows(sthi_header *h) {
    bool first = !h->begun;
    h->begun = true;
    if (first && !take(h, '{')) h->odd = true;
    if (h->odd || (!first && take(h, ','))) return !h->odd;
    if (!take(h, '}')) {
        h->odd = !first;
        return first;
    }
    skip_space(h);
    h->odd = h->text != h->end;
    return false;
}

bool sthi_header_next(sthi_header *h, sth_tensor_info *out) {
    piece name;
    while (!h->odd && follows(h)) {
        *out = (sth_tensor_info){.scale = 1};
        if (!take_text(h, &name) || !take(h, ':')) h->odd = true;
        else if (is(name, METADATA)) h->odd = !take_metadata(h);
        else if (take_tensor(h, name, out)) return true;
        else h->odd = true;
    }
    return false;
}
