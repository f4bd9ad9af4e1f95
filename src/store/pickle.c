/* The pickle machine, cut down to what torch.save needs for dicts of tensors: a stack of values, marks, a memo. A
 * "call" makes one of two plain values (an empty dict, a tensor's description) and a persistent id makes a third (a
 * storage's); no name from the file is looked up anywhere but in the table below.
 *
 * Everything lives in blocks that go together at the end, so that a value may be referred to twice, or hold itself,
 * without harm. Each byte of the pickle makes at most one node and one cell, which bounds memory; the memo takes
 * numbers in their order only, as every pickler gives them. No locks. */
#include "store/pickle.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "store/utf8.h"

#define BLOCK_BYTES 65536u
#define RECORD_ENTRIES 16u

typedef unsigned long long ull;
typedef sthi_pickle_node node;

enum { MAKE_TENSOR, MAKE_DICT, STORAGE };

static const struct {
    const char *module, *name;
    int makes;
    sth_dtype dtype;
} callables[] = {
    {"torch._utils", "_rebuild_tensor_v2", MAKE_TENSOR, 0},
    {"collections", "OrderedDict", MAKE_DICT, 0},
    {"torch", "CharStorage", STORAGE, STH_DTYPE_I8},
    {"torch", "ByteStorage", STORAGE, STH_DTYPE_U8},
    {"torch", "ShortStorage", STORAGE, STH_DTYPE_I16},
    {"torch", "IntStorage", STORAGE, STH_DTYPE_I32},
    {"torch", "LongStorage", STORAGE, STH_DTYPE_I64},
    {"torch", "HalfStorage", STORAGE, STH_DTYPE_F16},
    {"torch", "BFloat16Storage", STORAGE, STH_DTYPE_BF16},
    {"torch", "FloatStorage", STORAGE, STH_DTYPE_F32},
    {"torch", "DoubleStorage", STORAGE, STH_DTYPE_F64},
};

typedef struct block {
    struct block *next;
    size_t used, room;
    max_align_t data[];
} block;

/* A growing array of nodes: the stack (NULL is a mark) or the memo. */
typedef struct pile {
    node **items;
    size_t count, capacity;
} pile;

typedef struct machine {
    const char *path;
    uint64_t origin;
    const unsigned char *bytes;
    size_t count, at, start; /* start: of the operation under way */
    pile stack, memo;
    block *blocks;
} machine;

static sth_status corrupt(const machine *m, const char *what) {
    return sthi_fail(STH_CORRUPT_DATA, "pickle", 0, m->path, "%.300s: byte %llu: pickle: %s", m->path,
                     (ull)(m->origin + m->start), what);
}
static sth_status out_of_memory(const machine *m) {
    return sthi_no_memory(m->path, "the pickle in %.300s", m->path);
}

/* ---- memory ---- */

static void *take(machine *m, size_t bytes) {
    bytes = (bytes + sizeof(void *) - 1) / sizeof(void *) * sizeof(void *);
    if (!m->blocks || m->blocks->room - m->blocks->used < bytes) {
        size_t room = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
        block *b = sthi_alloc(sizeof *b + room);
        if (!b) return NULL;
        *b = (block){.next = m->blocks, .room = room};
        m->blocks = b;
    }
    void *p = (char *)m->blocks->data + m->blocks->used;
    m->blocks->used += bytes;
    return p;
}

static sth_status pile_add(machine *m, pile *p, node *n) {
    if (p->count == p->capacity) {
        size_t capacity = p->capacity ? p->capacity * 2 : 64;
        node **items = sthi_realloc(p->items, capacity, sizeof *items);
        if (!items) return out_of_memory(m);
        p->items = items;
        p->capacity = capacity;
    }
    p->items[p->count++] = n;
    return STH_OK;
}

static sth_status push(machine *m, const node *value) {
    node *n = take(m, sizeof *n);
    if (!n) return out_of_memory(m);
    *n = *value;
    n->at = (uint32_t)m->start;
    return pile_add(m, &m->stack, n);
}

static sth_status add_item(machine *m, node *container, const node *value) {
    sthi_pickle_cell *cell = take(m, sizeof *cell);
    if (!cell) return out_of_memory(m);
    *cell = (sthi_pickle_cell){.value = value};
    if (container->items.last) container->items.last->next = cell;
    else container->items.first = cell;
    container->items.last = cell;
    container->items.count++;
    return STH_OK;
}

/* ---- the stack ---- */

/* The value `depth` below the top; NULL for a mark or where there is none. */
static node *peek(const machine *m, size_t depth) {
    return depth < m->stack.count ? m->stack.items[m->stack.count - 1 - depth] : NULL;
}

/* Index of the topmost mark; the stack's size where there is none. */
static size_t top_mark(const machine *m) {
    for (size_t i = m->stack.count; i-- > 0;)
        if (!m->stack.items[i]) return i;
    return m->stack.count;
}

static sth_status read_bytes(machine *m, size_t count, const unsigned char **out) {
    if (count > m->count - m->at) return corrupt(m, "it ends in the middle of a value");
    *out = m->bytes + m->at;
    m->at += count;
    return STH_OK;
}

static sth_status read_little(machine *m, size_t count, uint64_t *out) {
    const unsigned char *p = NULL;
    STHI_TRY(read_bytes(m, count, &p));
    uint64_t value = 0;
    for (size_t i = count; i-- > 0;) value = value << 8 | p[i];
    *out = value;
    return STH_OK;
}

/* ---- operations ---- */

static sth_status push_int(machine *m, size_t bytes, bool is_signed) {
    uint64_t value = 0;
    STHI_TRY(read_little(m, bytes, &value));
    int64_t integer = (int64_t)value;
    if (is_signed && bytes < 8 && bytes > 0 && value >> (bytes * 8 - 1))
        integer = (int64_t)(value | UINT64_MAX << (bytes * 8));
    return push(m, &(node){.kind = STHI_PICKLE_INT, .integer = integer});
}

static sth_status push_long(machine *m) {
    uint64_t bytes = 0;
    STHI_TRY(read_little(m, 1, &bytes));
    return bytes <= 8 ? push_int(m, (size_t)bytes, true) : corrupt(m, "an integer of more than 64 bits");
}

static sth_status push_text(machine *m) {
    uint64_t length = 0;
    const unsigned char *p = NULL;
    STHI_TRY(read_little(m, 4, &length));
    STHI_TRY(read_bytes(m, (size_t)length, &p));
    if (!sthi_utf8_is_text((const char *)p, (size_t)length)) return corrupt(m, "a text is not UTF-8, or holds a 0");
    char *text = take(m, (size_t)length + 1);
    if (!text) return out_of_memory(m);
    memcpy(text, p, (size_t)length);
    text[length] = '\0';
    return push(m, &(node){.kind = STHI_PICKLE_TEXT, .text = text});
}

static bool line_is(const unsigned char *line, size_t length, const char *text) {
    return strlen(text) == length && memcmp(line, text, length) == 0;
}

static sth_status read_line(machine *m, const unsigned char **out, size_t *out_length) {
    const unsigned char *line = m->bytes + m->at, *end = memchr(line, '\n', m->count - m->at);
    if (!end) return corrupt(m, "it ends in the middle of a name");
    *out = line;
    *out_length = (size_t)(end - line);
    m->at += *out_length + 1;
    return STH_OK;
}

static sth_status push_callable(machine *m) {
    const unsigned char *module, *name;
    size_t module_bytes, name_bytes;
    STHI_TRY(read_line(m, &module, &module_bytes));
    STHI_TRY(read_line(m, &name, &name_bytes));
    for (size_t i = 0; i < sizeof callables / sizeof *callables; i++)
        if (line_is(module, module_bytes, callables[i].module) && line_is(name, name_bytes, callables[i].name))
            return push(m, &(node){.kind = STHI_PICKLE_CALLABLE, .callable = (int)i});
    return sthi_fail(STH_CORRUPT_DATA, "pickle", 0, m->path,
                     "%.300s: byte %llu: pickle: it asks for '%.*s.%.*s', which is no part of this format and is not "
                     "executed",
                     m->path, (ull)(m->origin + m->start), (int)(module_bytes < 80 ? module_bytes : 80), module,
                     (int)(name_bytes < 80 ? name_bytes : 80), name);
}

static sth_status make_tuple(machine *m, size_t first) {
    node tuple = {.kind = STHI_PICKLE_TUPLE};
    for (size_t i = first; i < m->stack.count; i++) {
        if (!m->stack.items[i]) return corrupt(m, "a mark where a value is expected");
        STHI_TRY(add_item(m, &tuple, m->stack.items[i]));
    }
    m->stack.count = first;
    return push(m, &tuple);
}

static sth_status tuple_of(machine *m, size_t count) {
    return count <= m->stack.count ? make_tuple(m, m->stack.count - count) : corrupt(m, "the stack is empty");
}

static sth_status tuple_to_mark(machine *m) {
    size_t mark = top_mark(m);
    if (mark == m->stack.count) return corrupt(m, "a mark is missing");
    memmove(&m->stack.items[mark], &m->stack.items[mark + 1],
            (m->stack.count - mark - 1) * sizeof *m->stack.items);
    m->stack.count--;
    return make_tuple(m, mark);
}

/* Moves the values from `first` on into the container below them (and the mark, if there is one). */
static sth_status fill(machine *m, size_t first, size_t below, sthi_pickle_kind kind) {
    node *container = below > 0 ? m->stack.items[below - 1] : NULL;
    bool dict = kind == STHI_PICKLE_DICT;
    if (!container || container->kind != kind) return corrupt(m, dict ? "no dict to fill" : "no list to fill");
    if (dict && (m->stack.count - first) % 2) return corrupt(m, "a key without a value");
    for (size_t i = first; i < m->stack.count; i++) {
        const node *value = m->stack.items[i];
        if (!value) return corrupt(m, "a mark where a value is expected");
        if (dict && (i - first) % 2 == 0 && value->kind != STHI_PICKLE_TEXT)
            return corrupt(m, "a dict's key is not text");
        STHI_TRY(add_item(m, container, value));
    }
    m->stack.count = below;
    return STH_OK;
}

static sth_status fill_with(machine *m, size_t count, sthi_pickle_kind kind) {
    if (m->stack.count <= count) return corrupt(m, "the stack is empty");
    return fill(m, m->stack.count - count, m->stack.count - count, kind);
}

static sth_status fill_to_mark(machine *m, sthi_pickle_kind kind) {
    size_t mark = top_mark(m);
    if (mark == m->stack.count) return corrupt(m, "a mark is missing");
    return fill(m, mark + 1, mark, kind);
}

static sth_status remember(machine *m, size_t bytes) {
    uint64_t place = 0;
    STHI_TRY(read_little(m, bytes, &place));
    node *top = peek(m, 0);
    if (!top) return corrupt(m, "nothing to remember");
    if (place < m->memo.count) m->memo.items[place] = top;
    else if (place == m->memo.count) return pile_add(m, &m->memo, top);
    else return corrupt(m, "numbers of the memo are left out");
    return STH_OK;
}

static sth_status recall(machine *m, size_t bytes) {
    uint64_t place = 0;
    STHI_TRY(read_little(m, bytes, &place));
    if (place >= m->memo.count) return corrupt(m, "a number that the memo does not have");
    return pile_add(m, &m->stack, m->memo.items[place]);
}

/* Item i of a tuple if it is of this kind, else NULL. */
static const node *item(const node *tuple, uint32_t i, sthi_pickle_kind kind) {
    const sthi_pickle_cell *cell = tuple->items.first;
    for (; cell && i > 0; i--) cell = cell->next;
    return cell && cell->value->kind == kind ? cell->value : NULL;
}

/* ("storage", class, key, device, elements) */
static sth_status make_storage(machine *m) {
    const node *id = peek(m, 0);
    if (!id || id->kind != STHI_PICKLE_TUPLE || id->items.count != 5)
        return corrupt(m, "a persistent id is not a tuple of five");
    const node *word = item(id, 0, STHI_PICKLE_TEXT), *type = item(id, 1, STHI_PICKLE_CALLABLE),
               *key = item(id, 2, STHI_PICKLE_TEXT), *device = item(id, 3, STHI_PICKLE_TEXT),
               *count = item(id, 4, STHI_PICKLE_INT);
    if (!word || strcmp(word->text, "storage") != 0 || !type || callables[type->callable].makes != STORAGE || !key ||
        !device || !count || count->integer < 0)
        return corrupt(m, "a persistent id is not a storage's");
    m->stack.count--;
    return push(m, &(node){.kind = STHI_PICKLE_STORAGE,
                           .storage = {.key = key->text,
                                       .dtype = callables[type->callable].dtype,
                                       .count = (uint64_t)count->integer}});
}

/* (storage, offset, size, stride, requires_grad, hooks) */
static sth_status make_tensor(machine *m, const node *args) {
    const node *storage = item(args, 0, STHI_PICKLE_STORAGE), *offset = item(args, 1, STHI_PICKLE_INT),
               *size = item(args, 2, STHI_PICKLE_TUPLE), *stride = item(args, 3, STHI_PICKLE_TUPLE),
               *grad = item(args, 4, STHI_PICKLE_BOOL), *hooks = item(args, 5, STHI_PICKLE_DICT);
    if (args->items.count != 6 || !storage || !offset || !size || !stride || !grad || !hooks || hooks->items.count)
        return corrupt(m, "a tensor's description is not (storage, offset, size, stride, bool, {})");
    return push(m, &(node){.kind = STHI_PICKLE_TENSOR,
                           .tensor = {.storage = storage, .size = size, .stride = stride, .offset = offset->integer}});
}

static sth_status reduce(machine *m) {
    const node *args = peek(m, 0), *callable = peek(m, 1);
    if (!args || args->kind != STHI_PICKLE_TUPLE || !callable || callable->kind != STHI_PICKLE_CALLABLE)
        return corrupt(m, "a call needs a name and a tuple");
    m->stack.count -= 2;
    switch (callables[callable->callable].makes) {
    case MAKE_TENSOR:
        return make_tensor(m, args);
    case MAKE_DICT:
        if (!args->items.count) return push(m, &(node){.kind = STHI_PICKLE_DICT});
        break;
    default:
        break;
    }
    return corrupt(m, "a call that is no part of this format");
}

static sth_status read_protocol(machine *m) {
    uint64_t version = 0;
    STHI_TRY(read_little(m, 1, &version));
    return version == 2 && m->start == 0 ? STH_OK : corrupt(m, "only protocol 2 is read");
}

static sth_status unknown(const machine *m, unsigned char code) {
    return sthi_fail(STH_CORRUPT_DATA, "pickle", code, m->path,
                     "%.300s: byte %llu: pickle: operation 0x%02x is no part of this format", m->path,
                     (ull)(m->origin + m->start), code);
}

static sth_status step(machine *m, unsigned char code) {
    switch (code) {
    case 0x80:
        return read_protocol(m);
    case '(':
        return pile_add(m, &m->stack, NULL);
    case '}':
        return push(m, &(node){.kind = STHI_PICKLE_DICT});
    case ']':
        return push(m, &(node){.kind = STHI_PICKLE_LIST});
    case ')':
        return push(m, &(node){.kind = STHI_PICKLE_TUPLE});
    case 't':
        return tuple_to_mark(m);
    case 0x85:
    case 0x86:
    case 0x87:
        return tuple_of(m, code - 0x84u);
    case 's':
        return fill_with(m, 2, STHI_PICKLE_DICT);
    case 'u':
        return fill_to_mark(m, STHI_PICKLE_DICT);
    case 'a':
        return fill_with(m, 1, STHI_PICKLE_LIST);
    case 'e':
        return fill_to_mark(m, STHI_PICKLE_LIST);
    case 'X':
        return push_text(m);
    case 'J':
        return push_int(m, 4, true);
    case 'K':
        return push_int(m, 1, false);
    case 'M':
        return push_int(m, 2, false);
    case 0x8a:
        return push_long(m);
    case 'N':
        return push(m, &(node){.kind = STHI_PICKLE_NONE});
    case 0x88:
    case 0x89:
        return push(m, &(node){.kind = STHI_PICKLE_BOOL, .integer = code == 0x88});
    case 'q':
        return remember(m, 1);
    case 'r':
        return remember(m, 4);
    case 'h':
        return recall(m, 1);
    case 'j':
        return recall(m, 4);
    case 'c':
        return push_callable(m);
    case 'R':
        return reduce(m);
    case 'Q':
        return make_storage(m);
    default:
        return unknown(m, code);
    }
}

static sth_status run(machine *m) {
    while (m->at < m->count) {
        m->start = m->at;
        unsigned char code = m->bytes[m->at++];
        if (code != '.') {
            STHI_TRY(step(m, code));
            continue;
        }
        if (m->stack.count != 1 || !m->stack.items[0]) return corrupt(m, "it ends with more or less than one value");
        return m->at == m->count ? STH_OK : corrupt(m, "bytes follow its end");
    }
    m->start = m->at;
    return corrupt(m, "its end is missing");
}

sth_status sthi_pickle_parse(const char *path, uint64_t origin, const unsigned char *bytes, size_t count,
                             sthi_pickle *out) {
    machine m = {.path = path, .origin = origin, .bytes = bytes, .count = count};
    sth_status status = count <= STHI_PICKLE_MAX_BYTES ? run(&m) : corrupt(&m, "larger than 16 MiB");
    if (status == STH_OK) *out = (sthi_pickle){.root = m.stack.items[0], .blocks = m.blocks};
    else sthi_pickle_fini(&(sthi_pickle){.blocks = m.blocks});
    sthi_free(m.stack.items);
    sthi_free(m.memo.items);
    return status;
}

void sthi_pickle_fini(sthi_pickle *pickle) {
    for (block *b = pickle->blocks; b;) {
        block *next = b->next;
        sthi_free(b);
        b = next;
    }
    *pickle = (sthi_pickle){0};
}

bool sthi_pickle_is_record(const sthi_pickle_node *n) {
    if (n->kind != STHI_PICKLE_DICT || n->items.count > 2 * RECORD_ENTRIES) return false;
    for (const sthi_pickle_cell *a = n->items.first; a; a = a->next->next)
        for (const sthi_pickle_cell *b = a->next->next; b; b = b->next->next)
            if (strcmp(a->value->text, b->value->text) == 0) return false;
    return true;
}

const sthi_pickle_node *sthi_pickle_get(const sthi_pickle_node *dict, const char *key) {
    for (const sthi_pickle_cell *cell = dict->items.first; cell; cell = cell->next->next)
        if (strcmp(cell->value->text, key) == 0) return cell->next->value;
    return NULL;
}
