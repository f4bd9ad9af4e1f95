/* Stores: tables that are refused, layers that contradict themselves, what is held and let go of, files in layers. */
#include "support/check.h"

#include <stdio.h>
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "stagehand/stagehand.h"
#include "store/own_store.h"
#include "store/tempfiles.h"

static void a_table_is_checked_before_use(void **state) {
    (void)state;
    static const char *const entries[] = {"kind", "layer_count", "layer", "request", "wait", "get", "release"};
    for (int i = 0; i < 9; i++) {
        own_store o;
        own_store_init(&o, 3);
        sth_store_ops ops = own_store_ops(false);
        if (i == 0) ops.kind = NULL;
        if (i == 1) ops.layer_count = NULL;
        if (i == 2) ops.layer = NULL;
        if (i == 3) ops.request = NULL;
        if (i == 4) ops.wait = NULL;
        if (i == 5) ops.get = NULL;
        if (i == 6) ops.release = NULL;
        if (i == 7) ops.struct_size -= 8;
        if (i == 8) ops.version++;
        sth_store *s = NULL;
        assert_int_equal(sth_store_create(&ops, &o, &s), STH_INVALID_ARGUMENT);
        assert_null(s);
        assert_non_null(strstr(sth_last_error()->message, i < 7 ? entries[i] : i == 7 ? "struct_size" : "version"));
        assert_int_equal(o.closed, 0);
    }
}

static void layers_that_contradict_themselves_are_refused(void **state) {
    (void)state;
    for (int i = 0; i < 9; i++) {
        own_store o;
        own_store_init(&o, 3);
        sth_store_tensor *t = &o.tensors[1][1];
        const char *word = "tensor 'b'";
        if (i == 0) t->bytes++;
        if (i == 1) t->offset = o.layers[1].bytes - 1;
        if (i == 2) t->offset = o.tensors[1][0].offset;
        if (i == 3) t->name = "a", word = "this name";
        if (i == 4) t->rank = 17;
        if (i == 5) t->rank = 2, t->shape[0] = t->shape[1] = UINT64_MAX / 2, word = "overflows";
        if (i == 6) t->dtype = STH_DTYPE_COUNT;
        if (i == 7) o.layers[1].name = o.layers[0].name, word = "both called";
        if (i == 8) o.layers[1].tensor_count = 0, word = "no tensors";
        sth_store_ops ops = own_store_ops(false);
        sth_store *s = NULL;
        assert_int_equal(sth_store_create(&ops, &o, &s), STH_CORRUPT_DATA);
        assert_non_null(strstr(sth_last_error()->message, word));
        assert_null(s);
    }
}

static void what_is_said_once_counts(void **state) {
    (void)state;
    own_store o;
        own_store_init(&o, 2);
    sth_store_ops ops = own_store_ops(false);
    sth_store *s;
    assert_ok(sth_store_create(&ops, &o, &s));
    o.layers[0].bytes = 1 << 20;
    o.tensors[0][0].name = "other";
    assert_int_equal(sth_store_layer_at(s, 0)->bytes, OWN_LAYER);
    assert_string_equal(sth_store_layer_at(s, 0)->tensors[0].name, "a");
    assert_true(sth_store_layer_at(s, 0)->tensors[0].scale == 1);
    assert_null(sth_store_layer_at(s, 2));
    sth_store_close(s);
    assert_int_equal(o.closed, 1);
}

static void each_request_is_released_once(void **state) {
    (void)state;
    for (int how = 0; how < 3; how++) { /* whole; parts; parts that are given up */
        own_store o;
        own_store_init(&o, OWN_MOST);
        sth_store_ops ops = own_store_ops(false);
        sth_store *s;
        uint8_t to[OWN_LAYER];
        assert_ok(sth_store_create(&ops, &o, &s));
        for (uint32_t i = 0; i < OWN_MOST; i++) {
            uint64_t step = how ? 100 : OWN_LAYER, end = how == 2 ? 300 : OWN_LAYER;
            for (uint64_t at = 0; at < end; at += step)
                assert_ok(sth_store_read(s, i, at, at + step > end ? end - at : step, to + at));
            for (uint64_t k = 0; k < end; k++) assert_int_equal(to[k], own_byte(i, k));
            assert_true(o.held_most <= STH_STORE_HELD);
            assert_int_equal(o.requests[i], 1);
        }
        assert_int_equal(o.held, how == 2 ? STH_STORE_HELD : 0);
        assert_int_equal(sth_store_read(s, 0, OWN_LAYER - 1, 2, to), STH_INVALID_ARGUMENT);
        assert_int_equal(sth_store_read(s, OWN_MOST, 0, 1, to), STH_INVALID_ARGUMENT);
        sth_store_close(s);
        assert_int_equal(o.held, 0);
        for (uint32_t i = 0; i < OWN_MOST; i++) assert_int_equal(o.requests[i], o.releases[i]);
        assert_int_equal(o.overlaps, 0);
    }
}

static void a_failure_names_the_layer_and_passes(void **state) {
    (void)state;
    for (int what = OWN_FAILS_REQUEST; what <= OWN_GIVES_NULL; what++) {
        own_store o;
        own_store_init(&o, 3);
        sth_store_ops ops = own_store_ops(false);
        sth_store *s;
        uint8_t to[8];
        assert_ok(sth_store_create(&ops, &o, &s));
        o.fails = what;
        assert_int_equal(sth_store_read(s, 1, 0, 8, to), what == OWN_GIVES_NULL ? STH_INTERNAL : STH_IO);
        assert_non_null(strstr(sth_last_error()->message, "layer 'own.1'"));
        assert_int_equal(o.held, 0);
        o.fails = 0;
        assert_ok(sth_store_read(s, 1, 0, 8, to));
        sth_store_close(s);
        assert_int_equal(o.held, 0);
    }
}

typedef struct reader {
    sth_store *store;
    uint32_t seed;
    sthi_thread thread;
    int wrong;
} reader;

static void *read_about(void *arg) {
    reader *r = arg;
    uint8_t to[64];
    for (uint32_t n = 0; n < 400; n++) {
        uint32_t layer = (n / 7 + r->seed * 3) % OWN_MOST;
        uint64_t at = (n * 64) % (OWN_LAYER - 64);
        if (sth_store_read(r->store, layer, at, 64, to) != STH_OK) r->wrong++;
        for (uint64_t k = 0; k < 64; k++) r->wrong += to[k] != own_byte(layer, at + k);
    }
    return NULL;
}

static void more_threads_than_held_layers_take_turns(void **state) {
    (void)state;
    own_store o;
        own_store_init(&o, OWN_MOST);
    sth_store_ops ops = own_store_ops(false);
    sth_store *s;
    reader r[7];
    assert_ok(sth_store_create(&ops, &o, &s));
    for (uint32_t i = 0; i < 7; i++) r[i] = (reader){.store = s, .seed = i};
    for (uint32_t i = 0; i < 7; i++) assert_ok(sthi_thread_start(&r[i].thread, "reader", read_about, &r[i]));
    for (uint32_t i = 0; i < 7; i++) sthi_thread_join(r[i].thread);
    for (uint32_t i = 0; i < 7; i++) assert_int_equal(r[i].wrong, 0);
    sth_store_close(s);
    assert_int_equal(o.held, 0);
    assert_int_equal(o.overlaps, 0);
    assert_true(o.held_most <= STH_STORE_HELD);
}

static void layers_in_memory(void **state) {
    (void)state;
    own_store o;
        own_store_init(&o, 2);
    const void *data[2] = {o.bytes[0], NULL};
    sth_store *s = NULL;
    assert_int_equal(sth_store_memory_create(o.layers, data, 2, &s), STH_INVALID_ARGUMENT);
    data[1] = o.bytes[1];
    assert_int_equal(sth_store_memory_create(o.layers, data, 0, &s), STH_CORRUPT_DATA);
    assert_ok(sth_store_memory_create(o.layers, data, 2, &s));
    data[0] = data[1] = NULL; /* the list was copied */
    uint8_t to[20];
    assert_ok(sth_store_read(s, 1, 30, 20, to));
    assert_memory_equal(to, o.bytes[1] + 30, 20);
    sth_store_close(s);
}

/* ---- files */

static const char HEADER[] = "{\"m.norm.weight\":{\"dtype\":\"U8\",\"shape\":[10],\"data_offsets\":[0,10]},"
                             "\"m.layers.10.b\":{\"dtype\":\"U8\",\"shape\":[7],\"data_offsets\":[10,17]},"
                             "\"m.layers.2.w.1\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[17,41]},"
                             "\"m.norm.sub.x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[41,42]},"
                             "\"m.layers.2.a\":{\"dtype\":\"U8\",\"shape\":[600],\"data_offsets\":[42,642]},"
                             "\"empty\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[642,642]},"
                             "\"m.norm.bias\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[642,645]}}";

static sth_status open_files(const char *folder, const char *const *layers, uint32_t count, sth_store **out) {
    const char *path = temp_path(folder, "l.safetensors");
    write_safetensors(path, HEADER, 645);
    return sth_store_files_open(path, layers, count, out);
}

static void tensors_become_layers_by_their_names(void **state) {
    sth_store *s;
    assert_ok(open_files(*state, NULL, 0, &s));
    static const char *const names[] = {"m.layers.2", "m.layers.10", "m.norm", "m.norm.sub"};
    assert_int_equal(sth_store_layer_count(s), 4);
    for (uint32_t i = 0; i < 4; i++) assert_string_equal(sth_store_layer_at(s, i)->name, names[i]);
    const sth_store_layer *l = sth_store_layer_at(s, 0);
    assert_int_equal(l->tensor_count, 2);
    assert_string_equal(l->tensors[0].name, "a");
    assert_string_equal(l->tensors[1].name, "w.1");
    assert_int_equal(l->tensors[1].rank, 2);
    assert_int_equal(l->tensors[1].offset, 1024);
    assert_int_equal(l->bytes, 1536);
    uint8_t to[1536];
    assert_ok(sth_store_read(s, 0, 0, 1536, to));
    for (uint64_t i = 0; i < 1536; i++) {
        bool a = i < 600, w = i >= 1024 && i < 1048;
        assert_int_equal(to[i], a ? pattern_byte(42 + i) : w ? pattern_byte(17 + i - 1024) : 0);
    }
    assert_int_equal(sth_store_layer_at(s, 2)->tensor_count, 2);
    sth_store_close(s);
}

static void layers_that_are_named_come_in_that_order(void **state) {
    static const char *const names[] = {"m.norm", "m.layers.10"}, *const absent[] = {"m.norm", "m.lay"};
    sth_store *s = NULL;
    assert_ok(open_files(*state, names, 2, &s));
    assert_int_equal(sth_store_layer_count(s), 2);
    assert_int_equal(sth_store_layer_at(s, 0)->tensor_count, 3);
    assert_string_equal(sth_store_layer_at(s, 0)->tensors[1].name, "sub.x");
    assert_string_equal(sth_store_layer_at(s, 1)->name, "m.layers.10");
    sth_store_close(s);
    assert_int_equal(open_files(*state, absent, 2, &s), STH_NOT_FOUND);
    assert_non_null(strstr(sth_last_error()->message, "'m.lay'"));
}

static void the_longest_name_wins_and_none_comes_twice(void **state) {
    static const char *const nested[] = {"m.norm", "m.norm.sub", "m"};
    static const char *const twice[] = {"m.norm", "m.layers.2", "m.norm"};
    static const char *const none_left[] = {"m.layers", "m.layers.2", "m.layers.10"};
    sth_store *s = NULL;
    assert_ok(open_files(*state, nested, 3, &s));
    assert_int_equal(sth_store_layer_at(s, 0)->tensor_count, 2);
    assert_int_equal(sth_store_layer_at(s, 1)->tensor_count, 1);
    assert_string_equal(sth_store_layer_at(s, 1)->tensors[0].name, "x");
    assert_int_equal(sth_store_layer_at(s, 2)->tensor_count, 3);
    assert_string_equal(sth_store_layer_at(s, 2)->name, "m");
    sth_store_close(s);
    assert_int_equal(open_files(*state, twice, 3, &s), STH_INVALID_ARGUMENT);
    assert_non_null(strstr(sth_last_error()->message, "'m.norm' is named twice"));
    assert_int_equal(open_files(*state, none_left, 3, &s), STH_NOT_FOUND);
    assert_non_null(strstr(sth_last_error()->message, "'m.layers' has no tensors"));
}

static void layers_may_lie_in_several_shards(void **state) {
    static const char *const header = "{\"l.%d.w\":{\"dtype\":\"U8\",\"shape\":[700],\"data_offsets\":[0,700]},"
                                      "\"l.%d.b\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[700,709]}}";
    char text[512], first[512];
    sth_store *s;
    uint8_t to[1536];
    for (int shard = 0; shard < 2; shard++) { /* each layer has its weight in one file and its bias in the other */
        snprintf(text, sizeof text, header, shard, 1 - shard);
        write_safetensors(temp_path(*state, shard ? "b.safetensors" : "a.safetensors"), text, 709);
    }
    snprintf(first, sizeof first, "%s", temp_path(*state, "model.safetensors.index.json"));
    write_text(first, "{\"weight_map\":{\"l.0.w\":\"a.safetensors\",\"l.1.b\":\"a.safetensors\","
                      "\"l.1.w\":\"b.safetensors\",\"l.0.b\":\"b.safetensors\"}}");
    assert_ok(sth_store_files_open(*state, NULL, 0, &s));
    assert_int_equal(sth_store_layer_count(s), 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(sth_store_layer_at(s, i)->bytes, 512 + 1024);
        assert_ok(sth_store_read(s, i, 0, 1536, to));
        for (uint64_t k = 0; k < 9; k++) assert_int_equal(to[k], pattern_byte(700 + k));
        for (uint64_t k = 0; k < 700; k++) assert_int_equal(to[512 + k], pattern_byte(k));
    }
    sth_store_close(s);
}

static void any_allocation_may_fail(void **state) {
    for (uint64_t n = 1;; n++) {
        sth_store *s = NULL;
        uint8_t to[32];
        long live = sthi_alloc_live();
        sthi_fault_arm(STHI_FAULT_ALLOC, n, n % 2);
        sth_status rc = open_files(*state, NULL, 0, &s);
        if (rc == STH_OK) rc = sth_store_read(s, 0, 0, 32, to);
        bool met = sthi_fault_seen(STHI_FAULT_ALLOC) >= n;
        sthi_fault_disarm_all();
        assert_true(rc == STH_OK || rc == STH_OUT_OF_HOST_MEMORY);
        sth_store_close(s);
        assert_int_equal(sthi_alloc_live(), live);
        if (!met) break;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_table_is_checked_before_use),
        cmocka_unit_test(layers_that_contradict_themselves_are_refused),
        cmocka_unit_test(what_is_said_once_counts),
        cmocka_unit_test(each_request_is_released_once),
        cmocka_unit_test(a_failure_names_the_layer_and_passes),
        cmocka_unit_test(more_threads_than_held_layers_take_turns),
        cmocka_unit_test(layers_in_memory),
        cmocka_unit_test_setup_teardown(tensors_become_layers_by_their_names, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(the_longest_name_wins_and_none_comes_twice, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(layers_that_are_named_come_in_that_order, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(layers_may_lie_in_several_shards, temp_setup, temp_teardown),
        cmocka_unit_test_setup_teardown(any_allocation_may_fail, temp_setup, temp_teardown),
    };
    return cmocka_run_group_tests_name("store", tests, NULL, NULL);
}
