/* A user's store: some layers of two tensors in memory, every call of its table counted and its rules checked. */
#ifndef TESTS_STORE_OWN_STORE_H
#define TESTS_STORE_OWN_STORE_H
#include <stdatomic.h>

#include "stagehand/store.h"

enum { OWN_MOST = 10, OWN_A = 900, OWN_B = 124, OWN_LAYER = 1100 /* a gap between a and b, and one behind b */ };
enum { OWN_FAILS_REQUEST = 1, OWN_FAILS_WAIT, OWN_GIVES_NULL };

typedef struct own_store {
    uint32_t count;
    sth_store_layer layers[OWN_MOST];
    sth_store_tensor tensors[OWN_MOST][2];
    char names[OWN_MOST][8];
    unsigned char bytes[OWN_MOST][OWN_LAYER];
    atomic_int inside[OWN_MOST], requests[OWN_MOST], releases[OWN_MOST], state[OWN_MOST];
    atomic_int held, held_most, overlaps, closed, reads;
    atomic_int fails; /* OWN_...: from now on */
} own_store;

void own_store_init(own_store *o, uint32_t layers);
sth_store_ops own_store_ops(int with_read);
unsigned char own_byte(uint32_t layer, uint64_t at);
#endif
