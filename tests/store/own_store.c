/* See own_store.h. */
#include "store/own_store.h"

#include <stdio.h>
#include <string.h>

unsigned char own_byte(uint32_t layer, uint64_t at) { return (unsigned char)(layer * 37 + at * 11 + (at >> 7) + 3); }

void own_store_init(own_store *o, uint32_t layers) {
    memset(o, 0, sizeof *o);
    o->count = layers;
    for (uint32_t i = 0; i < layers; i++) {
        snprintf(o->names[i], sizeof o->names[i], "own.%u", i % 100);
        o->tensors[i][0] = (sth_store_tensor){"a", STH_DTYPE_F32, 2, {5, OWN_A / 20}, 0, OWN_A, 0};
        o->tensors[i][1] = (sth_store_tensor){"b", STH_DTYPE_U8, 1, {OWN_B}, OWN_A + 40, OWN_B, 0};
        o->layers[i] = (sth_store_layer){o->names[i], OWN_LAYER, o->tensors[i], 2};
        for (uint64_t k = 0; k < OWN_LAYER; k++) o->bytes[i][k] = own_byte(i, k);
    }
}

static void enter(own_store *o, uint32_t layer) {
    if (atomic_fetch_add(&o->inside[layer], 1)) o->overlaps++;
}

static void leave(own_store *o, uint32_t layer) { o->inside[layer]--; }

/* States: 0 nothing, 1 requested, 2 there. */
static void move(own_store *o, uint32_t layer, int from, int to) {
    if (atomic_exchange(&o->state[layer], to) != from) o->overlaps++;
}

static uint32_t layer_count(void *self) { return ((own_store *)self)->count; }

static sth_status layer(void *self, uint32_t i, sth_store_layer *out) {
    *out = ((own_store *)self)->layers[i];
    return STH_OK;
}

static sth_status request(void *self, uint32_t i) {
    own_store *o = self;
    if (o->fails == OWN_FAILS_REQUEST) return sth_error_set(STH_IO, "test", 0, "own", "no line");
    enter(o, i);
    move(o, i, 0, 1);
    o->requests[i]++;
    int held = ++o->held, most = o->held_most;
    while (held > most && !atomic_compare_exchange_weak(&o->held_most, &most, held)) continue;
    leave(o, i);
    return STH_OK;
}

static sth_status wait_for(void *self, uint32_t i) {
    own_store *o = self;
    if (o->fails == OWN_FAILS_WAIT) return sth_error_set(STH_IO, "test", 0, "own", "the line broke");
    enter(o, i);
    move(o, i, 1, 2);
    leave(o, i);
    return STH_OK;
}

static const void *get(void *self, uint32_t i) {
    own_store *o = self;
    if (o->state[i] != 2) o->overlaps++;
    return o->fails == OWN_GIVES_NULL ? NULL : o->bytes[i];
}

static void release(void *self, uint32_t i) {
    own_store *o = self;
    enter(o, i);
    if (!atomic_exchange(&o->state[i], 0)) o->overlaps++;
    o->releases[i]++;
    o->held--;
    leave(o, i);
}

static sth_status read_part(void *self, uint32_t i, uint64_t offset, uint64_t bytes, void *to) {
    own_store *o = self;
    o->reads++;
    if (o->fails) return sth_error_set(STH_IO, "test", 0, "own", "the line broke");
    memcpy(to, o->bytes[i] + offset, bytes);
    return STH_OK;
}

static void end(void *self) { ((own_store *)self)->closed++; }

sth_store_ops own_store_ops(int with_read) {
    return (sth_store_ops){.struct_size = sizeof(sth_store_ops), .version = STH_STORE_VERSION, .kind = "own",
                           .layer_count = layer_count, .layer = layer, .request = request, .wait = wait_for,
                           .get = get, .release = release, .read = with_read ? read_part : NULL, .close = end};
}
