/* Arguments of the fuzz target `calls`, and its check of statuses. */
#include "fuzz/calls.h"

#include <float.h>
#include <math.h>

const uint8_t calls_images[CALLS_MEMORY];
uint8_t calls_memory[CALLS_MEMORY];

uint8_t calls_byte(calls *c) { return c->at < c->end ? *c->at++ : 0; }

bool calls_once_in(calls *c, uint32_t n) { return calls_byte(c) % n == n - 1; }

uint64_t calls_extreme(calls *c) {
    static const uint64_t ends[] = {
        0, 1, 2, 511, 512, 513, 4095, UINT64_C(1) << 20, UINT32_MAX, UINT64_C(1) << 32, INT64_MAX, UINT64_C(1) << 63,
        UINT64_MAX - 511, UINT64_MAX - 1, UINT64_MAX};
    uint8_t which = calls_byte(c);
    if (which < 8 * sizeof ends / sizeof *ends) return ends[which / 8];
    uint64_t raw = 0;
    for (int i = 0; i < 8; i++) raw = raw << 8 | calls_byte(c);
    return raw;
}

uint64_t calls_bytes(calls *c, uint64_t most) {
    static const uint64_t nobody_has[] = {UINT64_MAX, UINT64_MAX - 511, INT64_MAX, UINT64_C(1) << 63,
                                          UINT64_C(1) << 60};
    uint8_t which = calls_byte(c);
    if (which < 8) return nobody_has[which % 5];
    if (which < 16) return which % 2;
    uint64_t n = which < 64 ? calls_byte(c) : 512 * (1 + (uint64_t)calls_byte(c));
    return n <= most ? n : most;
}

uint32_t calls_number(calls *c, uint32_t most) {
    if (calls_once_in(c, 16)) return (uint32_t)calls_extreme(c);
    return most ? calls_byte(c) % most : 0;
}

int calls_choice(calls *c, int count) {
    static const int none[] = {-1, INT32_MAX, INT32_MIN, 1000};
    if (calls_once_in(c, 24)) return calls_byte(c) % 2 ? count : none[calls_byte(c) % 4];
    return calls_byte(c) % count;
}

double calls_real(calls *c) {
    static const double ends[] = {0, -1, 1e-300, NAN, INFINITY, -INFINITY, DBL_MAX, -DBL_MAX, 1e18, 0.5};
    uint8_t which = calls_byte(c);
    return which < 60 ? ends[which % 10] : (double)calls_byte(c) * (which % 2 ? 0.01 : 1e6);
}

const char *calls_text(calls *c) {
    static char longer[3000];
    static const char *const names[] = {"a", "b", "layer.0", "layer.1", "layer.2", "weight", "layer.0.weight",
                                        "%s%n", "\xff\xfe", ""};
    if (!*longer) memset(longer, 'x', sizeof longer - 1);
    uint8_t which = calls_byte(c);
    return which < 4 ? longer : names[which % (sizeof names / sizeof *names)];
}

const char *calls_file(calls *c) {
    uint8_t which = calls_byte(c);
    switch (which % 12) {
    case 0: return fuzz_path("slab.safetensors");
    case 1: return fuzz_path("slab.manifest.json");
    case 2: return fuzz_path("index.json");
    case 3: return fuzz_folder();
    case 4: return fuzz_path("nothing");
    case 5: return which < 128 ? "" : "/dev/null";
    case 6: return calls_text(c);
    default: return fuzz_path("model.safetensors");
    }
}

sth_stream calls_stream(calls *c) { return calls_once_in(c, 24) ? calls_extreme(c) : 0; }

void *calls_or_null(calls *c, void *pointer) { return calls_once_in(c, 40) ? NULL : pointer; }
const void *calls_or_null_const(calls *c, const void *pointer) { return calls_once_in(c, 40) ? NULL : pointer; }

void calls_begin(void) { sth_error_set(STH_OK, NULL, 0, NULL, NULL); }

sth_status calls_said(sth_status rc, const char *call) {
    const sth_error *error = sth_last_error();
    bool known = strcmp(sth_status_name(rc), "UNKNOWN") != 0 && rc != STH_INTERNAL;
    bool told = rc == STH_OK || (error->status == rc && *error->message && error->object && error->domain);
    if (!known || !told)
        fprintf(stderr, "%s: %s, and the record says %s '%s'\n", call, sth_status_name(rc),
                sth_status_name(error->status), error->message);
    CHECK(known);
    CHECK(told);
    return rc;
}
