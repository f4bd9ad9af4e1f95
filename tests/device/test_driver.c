/* What only back ends over a driver have: finding it, other libraries that make their own device current, a driver that
 * fails at any call or has shut down. Run with the back end's name, on its stand-in, which the environment names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/device.h"
#include "device/fake_driver.h"
#include "host/arena.h"
#include "quant/four_world.h"
#include "stagehand/download.h"
#include "stagehand/transfer.h"
#include "support/check.h"

enum { ROOM = 65536 };
static const struct words {
    const char *backend, *second, *third, *variable, *compiler, *first_symbol, *no_device, *no_memory;
    int version;
} all_words[] = {{"cuda", "cuda:1", "cuda:2", "STAGEHAND_CUDA_LIBRARY", "STAGEHAND_NVRTC_LIBRARY", "cuInit",
                  "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_OUT_OF_MEMORY (out of memory)", 12040},
                 {"hip", "hip:1", "hip:2", "STAGEHAND_HIP_LIBRARY", "STAGEHAND_HIPRTC_LIBRARY", "hipInit",
                  "hipErrorNoDevice", "hipErrorOutOfMemory (out of memory)", 60443482}},
  *words;
static char path[4096];
static unsigned char host[2 * ROOM];

static const fake_controls *fake;

/* The nth driver call from now on fails with `code`; 0: none does. */
static void fail_call(long n, int code) { fake->plan(&(fake_plan){.nth = n, .code = code, .ends_anyway = true}); }

static void refused(const char *library, const char *must_say) {
    sth_device *d = NULL;
    setenv(words->variable, library, 1);
    sth_status status = sth_device_open(words->backend, NULL, &d);
    int count = sth_device_count(words->backend);
    setenv(words->variable, path, 1);
    assert_int_equal(status, STH_BACKEND_UNAVAILABLE);
    assert_int_equal(count, 0);
    assert_null(d);
    assert_int_equal(sth_last_error()->status, STH_BACKEND_UNAVAILABLE);
    assert_string_equal(sth_last_error()->domain, words->backend);
    if (!strstr(sth_last_error()->message, must_say)) fail_msg("%s", sth_last_error()->message);
}

/* These come first: once a driver is loaded it stays. */
static void a_driver_that_is_missing_or_is_none(void **state) {
    (void)state;
    Dl_info cmocka;
    refused("/nowhere/libdriver.so.1", "/nowhere/libdriver.so.1");
    refused("libdriver.so.1", "absolute path");
    refused("./libdriver.so.1", "absolute path");
    void *function = NULL;
    *(void (**)(void)) & function = (void (*)(void))_cmocka_run_group_tests;
    assert_true(dladdr(function, &cmocka) && cmocka.dli_fname[0] == '/');
    refused(cmocka.dli_fname, words->first_symbol);
}

static void no_card(void **state) {
    (void)state;
    sth_device *d = NULL;
    setenv("FAKE_DRIVER_DEVICES", "0", 1);
    assert_int_equal(sth_device_count(words->backend), 0);
    assert_non_null(strstr(sth_last_error()->message, words->no_device));
    assert_status(sth_device_open(words->backend, NULL, &d), STH_BACKEND_UNAVAILABLE);
    assert_int_equal(sth_last_error()->native_code, 100);
    setenv("FAKE_DRIVER_DEVICES", "2", 1);
    assert_int_equal(sth_device_count(words->backend), 2);
    assert_ok(sth_device_open(words->second, NULL, &d));
    sth_device_info info;
    assert_ok(sth_device_info_get(d, &info));
    assert_int_equal(info.index, 1);
    assert_int_equal(info.driver_version, words->version);
    assert_non_null(strstr(info.name, "stand-in"));
    sth_device_close(d);
    assert_status(sth_device_open(words->third, NULL, &d), STH_BACKEND_UNAVAILABLE);
    assert_non_null(strstr(sth_last_error()->message, "number 2"));
    unsetenv("FAKE_DRIVER_DEVICES");
}

typedef struct belongings {
    sth_device *d;
    sth_devptr memory, ring;
    uint64_t ring_bytes;
    sth_stream stream;
    sth_event *events[2];
    bool pinned;
} belongings;

static sth_status use_everything(belongings *b) {
    STHI_TRY(sth_device_open(words->backend, NULL, &b->d));
    const sth_backend_ops *o = b->d->ops;
    sth_device_info info;
    sth_devptr alias;
    int64_t ns;
    bool done;
    STHI_TRY(sth_device_info_get(b->d, &info));
    STHI_TRY(o->alloc(b->d->self, ROOM, &b->memory));
    b->ring_bytes = o->ring_granularity(b->d->self);
    if (b->ring_bytes) STHI_TRY(o->ring_alloc(b->d->self, b->ring_bytes, &b->ring));
    STHI_TRY(o->host_register(b->d->self, host, sizeof host, &alias));
    b->pinned = true;
    STHI_TRY(o->stream_create(b->d->self, 0, &b->stream));
    for (int i = 0; i < 2; i++) STHI_TRY(o->event_create(b->d->self, true, &b->events[i]));
    STHI_TRY(o->event_record(b->d->self, b->events[0], b->stream));
    STHI_TRY(o->stream_wait(b->d->self, 0, b->events[0]));
    STHI_TRY(o->copy_h2d(b->d->self, b->memory, host, ROOM, b->stream));
    if (b->ring) STHI_TRY(o->copy_h2d(b->d->self, b->ring + b->ring_bytes - 8, host, 16, b->stream));
    STHI_TRY(o->copy_d2h(b->d->self, host + ROOM, b->memory, ROOM, b->stream));
    STHI_TRY(o->event_record(b->d->self, b->events[1], b->stream));
    STHI_TRY(o->event_query(b->d->self, b->events[1], &done));
    STHI_TRY(o->event_synchronize(b->d->self, b->events[1]));
    STHI_TRY(o->stream_synchronize(b->d->self, b->stream));
    return o->event_elapsed_ns(b->d->self, b->events[0], b->events[1], &ns);
}

static void give_up(belongings *b) {
    if (!b->d) return;
    const sth_backend_ops *o = b->d->ops;
    for (int i = 0; i < 2; i++) o->event_destroy(b->d->self, b->events[i]);
    if (b->stream) o->stream_destroy(b->d->self, b->stream);
    if (b->pinned) o->host_unregister(b->d->self, host, sizeof host);
    if (b->ring) o->ring_free(b->d->self, b->ring, b->ring_bytes);
    o->free(b->d->self, b->memory, ROOM);
    sth_device_close(b->d);
}

static void any_driver_call_may_fail(void **state) {
    (void)state;
    static const int codes[] = {2, 700, 999};
    for (size_t c = 0; c < sizeof codes / sizeof *codes; c++) {
        long last = 1, failures = 0, host_before = sthi_alloc_live();
        for (long n = 1; n <= last; n++) {
            belongings b = {0};
            fail_call(n, codes[c]);
            sth_status status = use_everything(&b);
            long calls = fake->calls(NULL);
            fail_call(0, 0);
            if (status != STH_OK) {
                failures++;
                if (sth_last_error()->native_code != codes[c])
                    fail_msg("call %ld: %s", n, sth_last_error()->message);
            }
            give_up(&b);
            assert_int_equal(fake->live(), 0);
            assert_int_equal(sthi_alloc_live(), host_before);
            if (calls >= n) last = n + 1;
        }
        assert_true(failures >= 25); /* all but questions about what the card can do, and for the current context */
    }
}

static void cleaning_up_may_fail_too(void **state) {
    (void)state;
    long host_before = sthi_alloc_live();
    for (long n = 1; n < 40; n++) {
        belongings b = {0};
        assert_ok(use_everything(&b));
        fail_call(n, 700);
        give_up(&b);
        fail_call(0, 0);
        assert_true(fake->live() <= 3); /* what the one call was to end; a ring is three objects */
        fake->reset();
        assert_int_equal(sthi_alloc_live(), host_before);
    }
}

static void failures_carry_the_drivers_words(void **state) {
    (void)state;
    belongings b = {0};
    assert_ok(use_everything(&b));
    sth_devptr p;
    assert_status(b.d->ops->alloc(b.d->self, (uint64_t)1 << 40, &p), STH_OUT_OF_DEVICE_MEMORY);
    const sth_error *e = sth_last_error();
    assert_int_equal(e->native_code, 2);
    assert_string_equal(e->domain, words->backend);
    assert_non_null(strstr(e->message, "1099511627776 bytes"));
    assert_non_null(strstr(e->message, words->no_memory));
    assert_status(b.d->ops->copy_h2d(b.d->self, b.memory + ROOM, host, 1, 0), STH_INVALID_ARGUMENT);
    assert_status(sth_sim_compute(b.d, 0, 1), STH_UNSUPPORTED);
    give_up(&b);
}

/* Also to devices of their own: each call leaves current what it has found. */
static void another_library_may_switch_contexts(void **state) {
    (void)state;
    for (int found = 0; found < 2; found++) {
        belongings b = {0};
        if (found) fake->switch_context();
        assert_ok(use_everything(&b));
        assert_int_equal(fake->is_switched(), found);
        fake->switch_context();
        assert_ok(b.d->ops->copy_h2d(b.d->self, b.memory, host, ROOM, b.stream));
        assert_ok(b.d->ops->event_record(b.d->self, b.events[0], b.stream));
        assert_ok(b.d->ops->stream_wait(b.d->self, b.stream, b.events[0]));
        assert_ok(b.d->ops->expand_ready(b.d->self));
        assert_true(fake->is_switched());
        assert_int_equal(b.d->ops->alloc(b.d->self, 0, &b.memory), STH_INVALID_ARGUMENT);
        assert_true(fake->is_switched());
        give_up(&b);
        assert_true(fake->is_switched());
        assert_int_equal(fake->live(), 0);
    }
}

/* WSL2 pins 0.5 to 1 GiB of a process, and a refusal fails the call behind it as well. */
static void a_wall_of_pinned_memory_leaves_room_for_the_slabs(void **state) {
    (void)state;
    enum { MIB = 1 << 20, WINDOW = 256 * MIB };
    for (uint64_t wall = 300; wall <= 1000; wall += 100) {
        char text[24];
        sth_device *d = NULL;
        sth_arena *weights = NULL, *slabs = NULL;
        sth_devptr memory = 0;
        void *p;
        snprintf(text, sizeof text, "%llu", (unsigned long long)wall * MIB);
        setenv("FAKE_DRIVER_PIN_LIMIT", text, 1);
        setenv("FAKE_DRIVER_STICKY", "1", 1);
        sthi_memory_assume(UINT64_C(64000000000));
        assert_ok(sth_device_open(words->backend, NULL, &d));
        assert_ok(d->ops->alloc(d->self, ROOM, &memory));
        assert_ok(sthi_arena_create(d, (uint64_t)8 * WINDOW, &weights));
        for (int i = 0; i < 8; i++) assert_ok(sthi_arena_reserve(weights, WINDOW, &p));
        assert_ok(sthi_arena_finish(weights));
        assert_ok(d->ops->copy_h2d(d->self, memory, host, ROOM, 0)); /* the refusal has been told of */
        uint64_t taken = wall / 256, left = wall - 256 * taken;
        assert_int_equal(sthi_arena_pinned_bytes(weights), (taken - (left < 128)) * WINDOW);
        assert_non_null(strstr(sthi_arena_pin_error(weights), words->no_memory));
        assert_ok(sthi_arena_create(d, 64 * MIB, &slabs));
        assert_ok(sthi_arena_reserve(slabs, 64 * MIB, &p));
        assert_ok(sthi_arena_finish(slabs));
        assert_int_equal(sthi_arena_pinned_bytes(slabs), 64 * MIB);
        sthi_memory_assume(0);
        sthi_arena_release(slabs);
        sthi_arena_release(weights);
        d->ops->free(d->self, memory, ROOM);
        sth_device_close(d);
        assert_int_equal(fake->live(), 0);
    }
    unsetenv("FAKE_DRIVER_STICKY");
    unsetenv("FAKE_DRIVER_PIN_LIMIT");
}

/* At exit the driver may be gone before Python lets go of us. */
static void a_driver_that_has_shut_down_is_quiet(void **state) {
    (void)state;
    long host_before = sthi_alloc_live();
    belongings b = {0};
    sth_event *e;
    assert_ok(use_everything(&b));
    assert_ok(b.d->ops->event_create(b.d->self, false, &e));
    fake->shut_down(1);
    assert_status(b.d->ops->event_record(b.d->self, e, 0), STH_SHUT_DOWN);
    sthi_fail(STH_OK, NULL, 0, NULL, "nothing yet");
    b.d->ops->event_destroy(b.d->self, e);
    give_up(&b);
    assert_int_equal(sth_last_error()->status, STH_OK);
    fake->shut_down(0);
    fake->reset();
    assert_int_equal(sthi_alloc_live(), host_before);
}

/* A gradient's way over the driver, chunks and all. */
static sth_status bring_home(sth_device *d, sth_download **out, sth_block **out_block, sth_devptr memory) {
    sth_download_options o;
    sth_ticket t = 0;
    sth_download_options_init(&o);
    o.region_bytes = o.chunk_bytes = 16384;
    STHI_TRY(sth_download_create(d, &o, out));
    STHI_TRY(sth_download_take(*out, ROOM, out_block));
    memset(sth_block_address(*out_block), 1, ROOM);
    STHI_TRY(sth_download_copy(*out, *out_block, 0, memory, ROOM, 0, &t));
    sth_status rc = sth_download_wait(*out, t);
    if (rc != STH_OK) sth_download_forget(*out, t);
    return rc;
}

static void downloads_survive_any_driver_call_that_fails(void **state) {
    (void)state;
    long last = 1, failures = 0, host_before = sthi_alloc_live();
    for (long n = 1; n <= last; n++) {
        sth_device *d;
        sth_devptr memory;
        sth_download *down = NULL;
        sth_block *block = NULL;
        assert_ok(sth_device_open(words->backend, NULL, &d));
        assert_ok(d->ops->alloc(d->self, ROOM, &memory));
        for (int i = 0; i < ROOM; i++) host[i] = (unsigned char)(i * 5 + i / 256);
        assert_ok(d->ops->copy_h2d(d->self, memory, host, ROOM, 0));
        fail_call(n, 700);
        sth_status rc = bring_home(d, &down, &block, memory);
        long calls = fake->calls(NULL);
        fail_call(0, 0);
        if (rc != STH_OK) {
            failures++;
            assert_int_equal(rc, STH_DEVICE_ERROR);
            assert_int_equal(sth_last_error()->native_code, 700);
        } else {
            assert_memory_equal(sth_block_address(block), host, ROOM);
        }
        sth_block_release(block);
        sth_download_destroy(down);
        d->ops->free(d->self, memory, ROOM);
        sth_device_close(d);
        assert_int_equal(fake->live(), 0);
        assert_int_equal(sthi_alloc_live(), host_before);
        if (calls >= n) last = n + 1;
    }
    assert_true(failures >= 10);
}

/* ---- expansion: the stand-ins for compiler and driver run the kernels' text */

static sth_devptr at(sth_devptr stage, uint64_t offset) { return offset == STH_TRANSFER_NONE ? 0 : stage + offset; }

/* Expands a packed image on the device. */
static sth_status expand_image(sth_device *d, const sth_segment *s, const void *packed, uint64_t bytes, void *got) {
    uint64_t size = sthi_segment_place_bytes(s);
    sth_devptr stage = 0, to = 0;
    sth_status rc = d->ops->alloc(d->self, bytes, &stage);
    if (rc == STH_OK) rc = d->ops->alloc(d->self, size, &to);
    if (rc == STH_OK) rc = d->ops->copy_h2d(d->self, stage, packed, bytes, 0);
    sth_expand e = {.encoding = (int)s->encoding, .dtype = (int)s->dtype, .rows = s->rows, .cols = s->cols,
                    .stride = s->stride, .codes = stage + s->codes, .scales = at(stage, s->scales),
                    .zeros = at(stage, s->zeros), .place = to, .place_bytes = size, .pitch = s->pitch, .rank = s->rank,
                    .group = s->group, .hadamard = s->hadamard, .factor = s->factor};
    if (sthi_is_four_bits(e.encoding)) {
        e.up = at(stage, s->up);
        e.down = at(stage, s->down);
        e.smooth = at(stage, s->smooth);
    }
    if (rc == STH_OK) rc = d->ops->expand_ready(d->self);
    if (rc == STH_OK) rc = d->ops->expand(d->self, &e, 0);
    if (rc == STH_OK) rc = d->ops->copy_d2h(d->self, got, to, size, 0);
    if (rc == STH_OK) rc = d->ops->stream_synchronize(d->self, 0);
    if (to) d->ops->free(d->self, to, size);
    if (stage) d->ops->free(d->self, stage, bytes);
    return rc;
}

static sth_status expand_on(sth_device *d, sth_transfer encoding, sth_dtype dtype, uint64_t cols, bool *out_same) {
    enum { ROWS = 9 };
    static unsigned char place[ROWS * 200 * 4], packed[16384], got[sizeof place], want[sizeof place];
    sth_segment tensor = {.encoding = encoding, .dtype = dtype, .rows = encoding ? ROWS : 1, .cols = cols}, s;
    uint32_t count;
    uint64_t bytes;
    for (size_t i = 0; i < sizeof place; i++) place[i] = (unsigned char)(i * 7 % 60); /* small, finite in every dtype */
    assert_ok(sth_transfer_layout(&tensor, 1, 1 << 20, &s, 1, &count, &bytes));
    assert_ok(sth_transfer_encode(&s, 1, place, packed, 1, NULL));
    assert_ok(sth_transfer_decode(&s, 1, packed, want));
    sth_status rc = expand_image(d, &s, packed, bytes, got);
    *out_same = rc == STH_OK && memcmp(got, want, sthi_segment_place_bytes(&s)) == 0;
    return rc;
}

static void packed_bytes_expand_to_the_reference(void **state) {
    (void)state;
    sth_device *d = NULL;
    bool same;
    assert_ok(sth_device_open(words->backend, NULL, &d));
    for (int e = 0; e <= STH_TRANSFER_INT4; e++)
        for (size_t t = 0; t < 3; t++)
            for (uint64_t cols = 63; cols < 200; cols += 65) { /* 63, 128, 193 */
                assert_ok(expand_on(d, (sth_transfer)e, four_dtypes[t], cols, &same));
                assert_true(same);
            }
    sth_device_close(d);
    assert_int_equal(fake->live(), 0);
}

static void four_bits_of_files_expand_to_the_reference(void **state) {
    (void)state;
    static four_world w;
    static unsigned char got[1 << 19], want[1 << 19];
    sth_device *d = NULL;
    assert_ok(sth_device_open(words->backend, NULL, &d));
    for (int i = 0; i < FOUR_SHAPES; i++) {
        sth_segment shape = four_shapes[i];
        shape.dtype = four_dtypes[i % 3];
        four_make(&w, shape, i % 2);
        assert_true(sthi_segment_place_bytes(&w.whole) <= sizeof got);
        assert_ok(sth_transfer_decode(&w.whole, 1, w.packed, want));
        assert_ok(expand_image(d, &w.whole, w.packed, w.bytes, got));
        if (memcmp(got, want, sthi_segment_place_bytes(&w.whole))) fail_msg("shape %d", i);
    }
    sth_device_close(d);
    assert_int_equal(fake->live(), 0);
}

/* Sizes that do not agree, or that no launch can have, reach no kernel. */
static void impossible_expansions_are_refused(void **state) {
    (void)state;
    sth_device *d = NULL;
    sth_devptr p = 0;
    bool same;
    assert_ok(sth_device_open(words->backend, NULL, &d));
    assert_ok(expand_on(d, STH_TRANSFER_INT8, STH_DTYPE_F32, 128, &same)); /* the kernels are there */
    assert_ok(d->ops->alloc(d->self, 4096, &p));
    sth_expand e = {.encoding = STH_TRANSFER_INT8, .dtype = STH_DTYPE_F32, .rows = 2, .cols = 32, .stride = 32,
                    .codes = p, .scales = p + 512, .place = p + 1024, .place_bytes = 256};
    assert_ok(d->ops->expand(d->self, &e, 0));
    sth_expand bad[] = {e, e, e, e, e, e};
    bad[0].rows = (UINT64_C(1) << 57) + 2; /* times 128 bytes a row: 256 when it wraps */
    bad[1].cols += UINT64_C(1) << 32;
    bad[2].encoding = STH_TRANSFER_COUNT;
    bad[3].dtype = STH_DTYPE_U8;
    bad[4].stride = 16;
    bad[5].scales = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (d->ops->expand(d->self, &bad[i], 0) != STH_INVALID_ARGUMENT) fail_msg("expansion %zu is taken", i);
    e.rows = UINT64_C(1) << 31; /* 4 steps a row */
    e.place_bytes = e.rows * 128;
    assert_status(d->ops->expand(d->self, &e, 0), STH_UNSUPPORTED);
    sth_expand four = {.encoding = STH_TRANSFER_FILE_INT4, .dtype = STH_DTYPE_F32, .rows = 2, .cols = 32, .stride = 16,
                       .codes = p, .scales = p + 512, .place = p + 1024, .place_bytes = 256, .pitch = 4, .group = 16,
                       .factor = 1};
    assert_ok(d->ops->expand(d->self, &four, 0));
    sth_expand wrong[] = {four, four, four, four, four, four, four};
    wrong[0].rank = 8; /* and no factors */
    wrong[1].hadamard = 64;
    wrong[2].pitch = 2;
    wrong[3].group = 8;
    wrong[4].smooth = p + 8;
    wrong[5].zeros = p;
    wrong[6].stride = 8;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (d->ops->expand(d->self, &wrong[i], 0) != STH_INVALID_ARGUMENT) fail_msg("4 bits %zu are taken", i);
    four.rows = UINT64_C(1) << 31;
    four.pitch = 2 * four.rows;
    four.place_bytes = four.rows * 128;
    assert_status(d->ops->expand(d->self, &four, 0), STH_UNSUPPORTED);
    d->ops->free(d->self, p, 4096);
    sth_device_close(d);
    assert_int_equal(fake->live(), 0);
}

static void expansion_survives_any_driver_call_that_fails(void **state) {
    (void)state;
    for (long n = 1;; n++) {
        sth_device *d = NULL;
        bool same;
        assert_ok(sth_device_open(words->backend, NULL, &d));
        fail_call(n, 999);
        sth_status rc = expand_on(d, STH_TRANSFER_INT8, STH_DTYPE_BF16, 128, &same);
        bool met = fake->calls(NULL) >= n;
        fail_call(0, 0);
        assert_true(met ? rc == STH_DEVICE_ERROR || rc == STH_OK : rc == STH_OK);
        assert_ok(expand_on(d, STH_TRANSFER_INT8, STH_DTYPE_BF16, 128, &same)); /* and then it works */
        assert_true(same);
        sth_device_close(d);
        fake->reset();
        if (!met) break;
    }
}

static void without_a_compiler_there_are_reasons(void **state) {
    (void)state;
    const char *was = getenv(words->compiler);
    char *compiler = strdup(was ? was : "");
    static const char *const bad[] = {"libcompiler.so.12", "/nowhere/libcompiler.so.12"};
    static const char *const says[] = {"absolute", "nowhere"};
    sth_device *d = NULL;
    assert_ok(sth_device_open(words->backend, NULL, &d));
    for (int i = 0; i < 2; i++) {
        setenv(words->compiler, bad[i], 1);
        assert_status(d->ops->expand_ready(d->self), STH_BACKEND_UNAVAILABLE);
        if (!strstr(sth_last_error()->object, says[i]) && !strstr(sth_last_error()->message, says[i]))
            fail_msg("%s", sth_last_error()->message);
    }
    setenv(words->compiler, compiler, 1);
    setenv("FAKE_COMPILER_REFUSES", "1", 1);
    assert_status(d->ops->expand_ready(d->self), STH_BACKEND_UNAVAILABLE);
    assert_non_null(strstr(sth_last_error()->message, "on purpose"));
    unsetenv("FAKE_COMPILER_REFUSES");
    assert_ok(d->ops->expand_ready(d->self));
    sth_device_close(d);
    free(compiler);
}

/* Where the second mapping fails, or a word does not come back, there are no rings, and all else goes on. */
static void a_vendor_that_proves_its_rings(void **state) {
    (void)state;
    if (strcmp(words->backend, "hip")) skip_because("rings are tried at opening on HIP alone");
    static const char *const functions[] = {"hipMemMap", "hipMemSetAccess", "hipMemCreate", "hipMemcpyHtoDAsync",
                                            "hipMemcpyDtoHAsync", "hipDeviceSynchronize"};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        belongings b = {0};
        fake->plan(&(fake_plan){.function = functions[i], .nth = 1, .code = 801});
        assert_ok(use_everything(&b));
        fake->plan(NULL);
        assert_int_equal(b.d->capabilities & STH_CAP_RING, 0);
        assert_int_equal(b.ring_bytes, 0);
        give_up(&b);
        assert_int_equal(fake->live(), 0);
    }
    belongings b = {0};
    assert_ok(use_everything(&b));
    assert_true(b.d->capabilities & STH_CAP_RING);
    give_up(&b);
}

int main(int argc, char **argv) {
    for (size_t i = 0; argc > 1 && i < sizeof all_words / sizeof *all_words; i++)
        if (!strcmp(argv[1], all_words[i].backend)) words = &all_words[i];
    if (!words) {
        fprintf(stderr, "give a back end\n");
        return 1;
    }
    const char *named = getenv(words->variable);
    void *library = named ? dlopen(named, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        fprintf(stderr, "%s must name the stand-in for the driver\n", words->variable);
        return 1;
    }
    snprintf(path, sizeof path, "%s", named);
    fake = dlsym(library, FAKE_CONTROLS);
    if (!fake) abort();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_driver_that_is_missing_or_is_none),
        cmocka_unit_test(no_card),
        cmocka_unit_test(any_driver_call_may_fail),
        cmocka_unit_test(cleaning_up_may_fail_too),
        cmocka_unit_test(failures_carry_the_drivers_words),
        cmocka_unit_test(another_library_may_switch_contexts),
        cmocka_unit_test(a_wall_of_pinned_memory_leaves_room_for_the_slabs),
        cmocka_unit_test(a_driver_that_has_shut_down_is_quiet),
        cmocka_unit_test(downloads_survive_any_driver_call_that_fails),
        cmocka_unit_test(packed_bytes_expand_to_the_reference),
        cmocka_unit_test(four_bits_of_files_expand_to_the_reference),
        cmocka_unit_test(impossible_expansions_are_refused),
        cmocka_unit_test(expansion_survives_any_driver_call_that_fails),
        cmocka_unit_test(without_a_compiler_there_are_reasons),
        cmocka_unit_test(a_vendor_that_proves_its_rings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
