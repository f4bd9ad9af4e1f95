/* Losslessly packed files, with each allocation, read, write and thread failing in turn: nothing leaks, no result
 * appears unless it is whole. That they come back and stream is tests/python/test_lossless_files.py. */
#define _GNU_SOURCE
#include "support/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/random.h"
#include "pack/models.h"
#include "stagehand/pack.h"
#include "stagehand/quant.h"
#include "store/tempfiles.h"

enum { LARGE = (1 << 20) + 5000, SMALL = 4100, ELEMENTS = LARGE + SMALL }; /* BF16; the first has two pieces */

#define T(name, dtype, count, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" #count "],\"data_offsets\":[" #begin "," #end "]}"
static const char header[] =
    "{" T("a", "BF16", 1053576, 0, 2107152) "," T("b", "F16", 4100, 2107152, 2115352) ","
    T("c", "U8", 3, 2115352, 2115355) "}";

static uint16_t value(uint64_t i) {
    uint32_t r = (uint32_t)sthi_random64(3, i);
    return (uint16_t)((r & 0x807f) | (r >> 16) % 9 << 7 | 0x3c00);
}

static const char *write_model(const char *folder) {
    const char *path = temp_path(folder, "model.safetensors");
    size_t text = sizeof header - 1, bytes = 8 + text + 2 * ELEMENTS + 3;
    unsigned char *file = calloc(1, bytes);
    file[0] = (unsigned char)text;
    memcpy(file + 8, header, text);
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        uint16_t v = value(i);
        memcpy(file + 8 + text + 2 * i, &v, sizeof v);
    }
    write_bytes(path, file, bytes);
    free(file);
    return path;
}

typedef struct paths {
    char model[512], packed[512], back[512];
} paths;

static void prepare(void **state, paths *p) {
    assert_true(sizeof header - 1 < 256 && 2 * ELEMENTS == 2115352);
    snprintf(p->model, sizeof p->model, "%s", write_model(*state));
    snprintf(p->packed, sizeof p->packed, "%s/p.safetensors", (char *)*state);
    snprintf(p->back, sizeof p->back, "%s/back.safetensors", (char *)*state);
}

static void remove_with_partial(const char *path) {
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s.partial'", path);
    unlink(path);
    assert_int_equal(system(command), 0);
}

static sth_status unpack(const paths *p) {
    sth_pack_options options = model_options(STH_PACK_LOSSLESS);
    return sth_unpack(p->packed, p->back, &options);
}

static sth_status pack(const paths *p) { return model_pack(p->model, p->packed, STH_PACK_LOSSLESS); }

/* Opens, decodes and describes the first tensor. */
static sth_status use(const paths *p) {
    static uint16_t out[LARGE];
    sth_quant *slab = NULL;
    uint32_t segments = 0, ranges = 0;
    uint64_t end;
    sth_status status = sth_quant_open(p->packed, &slab);
    const sth_quant_layer *l = sth_quant_get_layer(slab, 0);
    if (status == STH_OK) status = sth_quant_decode(slab, l, STH_DTYPE_BF16, out, 2);
    for (uint64_t i = 0; status == STH_OK && i < LARGE; i += 997) assert_int_equal(out[i], value(i));
    if (status == STH_OK)
        status = sth_quant_segments(slab, l, STH_DTYPE_BF16, 0, 0, 512, NULL, &segments, NULL, &ranges, &end);
    if (status == STH_OK) assert_true(segments == 2 && ranges == 1);
    sth_quant_close(slab);
    return status;
}

static sth_status verify(const paths *p) {
    sth_verify_result r;
    sth_pack_options options = model_options(STH_PACK_LOSSLESS);
    sth_status status = sth_verify(p->packed, p->model, &options, NULL, &r);
    if (status == STH_OK)
        assert_true(r.tensors == 4 && !r.checksums_wrong && !r.checksums_missing && !r.missing && !r.stored_differ);
    return status;
}

/* result: the file that the call makes; NULL: none. */
static void fail_each(const paths *p, sth_status (*call)(const paths *), const char *result, int least) {
    static const sthi_fault_kind kinds[] = {STHI_FAULT_ALLOC, STHI_FAULT_READ, STHI_FAULT_WRITE, STHI_FAULT_THREAD};
    int failed = 0, step = (int)few_under_tsan(15, 1);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (uint64_t n = 1, more = 1; more; n += (uint64_t)step) {
            long live = sthi_alloc_live();
            int open = open_descriptors();
            sthi_fault_arm(kinds[k], n, false);
            sth_status status = call(p);
            more = sthi_fault_seen(kinds[k]) >= n;
            sthi_fault_disarm_all();
            assert_true(more || status == STH_OK);
            assert_int_equal(sthi_alloc_live(), live);
            assert_int_equal(open_descriptors(), open);
            failed += status != STH_OK;
            if (status != STH_OK) assert_true(*sth_last_error()->message);
            if (result && status == STH_OK) assert_true(model_is_there(result));
            if (result && status != STH_OK && !model_is_there(result)) assert_ok(call(p)); /* on, or anew */
            if (result) remove_with_partial(result);
        }
    assert_true(failed >= least / step);
}

static void every_call_fails_at_every_point(void **state) {
    paths p;
    prepare(state, &p);
    fail_each(&p, pack, p.packed, 60);
    assert_ok(pack(&p));
    fail_each(&p, unpack, p.back, 40);
    fail_each(&p, verify, NULL, 20);
    fail_each(&p, use, NULL, 15);
    assert_ok(unpack(&p));
    assert_true(model_same(p.model, p.back));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_call_fails_at_every_point, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
