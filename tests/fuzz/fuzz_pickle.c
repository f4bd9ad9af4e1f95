/* Fuzz target for the pickle parser. Input: the pickle.
 *
 * Property: a tree or a refusal that names path and byte; memory stays within a fixed multiple of the input; every dict
 * has texts for keys; nothing is left allocated. */
#include <string.h>

#include "base/memory.h"
#include "fuzz/files.h"
#include "store/pickle.h"

#define STEPS 100000 /* trees may hold themselves: the walk is cut */

static void walk(const sthi_pickle_node *n, int *steps, int depth) {
    if (--*steps < 0 || depth > 100) return;
    switch (n->kind) {
    case STHI_PICKLE_TEXT:
        CHECK(strlen(n->text) < 1u << 24);
        break;
    case STHI_PICKLE_LIST:
    case STHI_PICKLE_TUPLE:
    case STHI_PICKLE_DICT: {
        uint32_t count = 0;
        for (const sthi_pickle_cell *c = n->items.first; c && *steps > 0; c = c->next) {
            if (n->kind == STHI_PICKLE_DICT && count % 2 == 0) CHECK(c->value->kind == STHI_PICKLE_TEXT);
            walk(c->value, steps, depth + 1);
            count++;
        }
        CHECK(*steps <= 0 || count == n->items.count);
        if (sthi_pickle_is_record(n)) (void)sthi_pickle_get(n, "layers");
        break;
    }
    case STHI_PICKLE_TENSOR:
        CHECK(n->tensor.storage->kind == STHI_PICKLE_STORAGE && n->tensor.size->kind == STHI_PICKLE_TUPLE);
        CHECK(n->tensor.stride->kind == STHI_PICKLE_TUPLE);
        walk(n->tensor.size, steps, depth + 1);
        break;
    default:
        CHECK(n->kind <= STHI_PICKLE_TENSOR);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    long live = sthi_alloc_live();
    size_t heap = fuzz_heap_bytes();
    sthi_pickle pickle;
    sth_status status = sthi_pickle_parse("a file", 1000, data, size, &pickle);
    if (status == STH_OK) {
        int steps = STEPS;
        CHECK(fuzz_heap_bytes() <= heap + 100 * size + 2 * 65536 + 4096);
        walk(pickle.root, &steps, 0);
        sthi_pickle_fini(&pickle);
    } else {
        CHECK(status == STH_CORRUPT_DATA && strstr(sth_last_error()->message, "a file: byte "));
    }
    CHECK(sthi_alloc_live() == live);
    return 0;
}
