/* Fuzz target for what pack and verify read besides model files. Input: a byte that says what the rest is, then that:
 *   0 state.json of a folder in which packing as v2 was stopped, 1 the same for a layer index; "@" is the work's
 *     identity
 *   2 a layer index that is verified, 3 the manifest of a v2 file that is verified against its original
 *
 * Property: a call that goes on from a state, whatever that says, ends with a whole result or with a message, and
 * touches nothing but its own files; bytes of the result are those of an undisturbed call where the
 * state did not call them made; verifying ends with counts that fit together or with a message;
 * nothing is left allocated. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/memory.h"
#include "fuzz/files.h"
#include "stagehand/pack.h"

#define MOST 16384
#define T(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static const char model_header[] =
    "{" T("a.weight", "F32", "[4,8]", 0, 128) "," T("a.bias", "BF16", "[4]", 128, 136) ","
    T("b.weight", "BF16", "[2,4]", 136, 152) "," T("c", "U8", "[8]", 152, 160) "}";

typedef struct contents {
    char bytes[MOST];
    size_t size;
} contents;

/* One format: its two files, what they hold after an undisturbed call, and what a stopped one leaves. */
typedef struct work {
    const char *out, *second;
    sth_pack_format format;
    contents whole, whole_second, data;
    const char *data_name; /* in the folder */
    char identity[33];
} work;

static const char *model, *outsider;
static work works[2] = {{.format = STH_PACK_V2, .data_name = "p.safetensors"},
                        {.format = STH_PACK_LAYER_INDEX, .data_name = "p.bin"}};

static void load(const char *path, contents *out) {
    FILE *f = fopen(path, "rb");
    CHECK(f);
    out->size = fread(out->bytes, 1, MOST, f);
    CHECK(out->size < MOST);
    fclose(f);
}

static bool is_there(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

static const char *partial(const work *w, const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s.partial%s%s", w->out, name ? "/" : "", name ? name : "");
    return path;
}

static void remove_partial(const work *w) {
    DIR *dir = opendir(partial(w, NULL));
    for (struct dirent *e; dir && (e = readdir(dir));) unlink(partial(w, e->d_name));
    if (dir) closedir(dir);
    rmdir(partial(w, NULL));
}

/* Stops when `context` counts down to 0; NULL: never. */
static bool progress(void *context, const char *tensor, uint64_t done, uint64_t total) {
    int *left = context;
    CHECK(*tensor && done <= total);
    return !left || (*left)-- > 0;
}

static sth_status pack(const work *w, int *left) {
    sth_pack_options options;
    sth_pack_options_init(&options);
    options.format = w->format;
    options.threads = 1;
    options.progress = progress;
    options.context = left;
    return sth_pack(model, w->out, &options);
}

static void learn(work *w) {
    int left = 1;
    contents state;
    CHECK(pack(w, NULL) == STH_OK);
    load(w->out, &w->whole);
    load(w->second, &w->whole_second);
    unlink(w->out), unlink(w->second);
    CHECK(pack(w, &left) == STH_SHUT_DOWN);
    load(partial(w, w->data_name), &w->data);
    load(partial(w, "state.json"), &state);
    const char *at = memmem(state.bytes, state.size, "\"identity\":\"", 12);
    CHECK(at);
    memcpy(w->identity, at + 12, 32);
    remove_partial(w);
}

static void prepare(void) {
    if (model) return;
    model = fuzz_path("model.safetensors");
    outsider = fuzz_path("outsider");
    works[0].out = fuzz_path("p.safetensors"), works[0].second = fuzz_path("p.manifest.json");
    works[1].out = fuzz_path("p.json"), works[1].second = fuzz_path("p.bin");
    fuzz_write_safetensors(model, model_header, 160, 0x3c);
    fuzz_write(outsider, "here", 4);
    for (int i = 0; i < 2; i++) learn(&works[i]);
}

/* ---- going on ---- */

/* An old time, as fuzz_write gives: the reader waits a moment for what was written just now. */
static void age(const char *path) {
    const struct timespec old[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    CHECK(utimensat(AT_FDCWD, path, old, 0) == 0);
}

static void write_state(const work *w, const uint8_t *text, size_t size) {
    FILE *f = fopen(partial(w, "state.json"), "wb");
    CHECK(f);
    for (size_t i = 0; i < size; i++)
        if (text[i] == '@') fputs(w->identity, f);
        else fputc(text[i], f);
    CHECK(fclose(f) == 0);
    age(partial(w, "state.json"));
}

/* What the state says is made is taken as it is in the folder, whatever was there; all else is made. */
static void check_result(const work *w) {
    static contents got;
    const contents *data = w->format == STH_PACK_V2 ? &w->whole : &w->whole_second;
    load(w->format == STH_PACK_V2 ? w->out : w->second, &got);
    CHECK(got.size == data->size);
    for (size_t i = 0; i < got.size; i++) CHECK(got.bytes[i] == data->bytes[i] || got.bytes[i] == w->data.bytes[i]);
    age(w->out), age(w->second);
    sth_verify_result result;
    sth_status status = sth_verify(w->out, model, NULL, NULL, &result);
    CHECK(status == STH_OK && result.tensors && !result.missing && !result.checksums_missing);
}

static void go_on(const work *w, const uint8_t *text, size_t size) {
    CHECK(mkdir(partial(w, NULL), 0700) == 0);
    fuzz_write(partial(w, w->data_name), w->data.bytes, w->data.size);
    write_state(w, text, size);
    sth_status status = pack(w, NULL);
    CHECK(is_there(outsider) && is_there(model));
    if (status == STH_OK) check_result(w);
    else CHECK(sth_last_error()->status == status && *sth_last_error()->message);
    if (status == STH_OK) CHECK(!is_there(partial(w, NULL)));
    unlink(w->out), unlink(w->second);
    remove_partial(w);
}

/* ---- verifying ---- */

static void count_tensor(void *context, const sth_verified *tensor) {
    CHECK(tensor->name && *tensor->encoding && tensor->checksum >= -1 && tensor->checksum <= 1);
    ++*(uint64_t *)context;
}

static void verify(const work *w, const uint8_t *text, size_t size) {
    bool index = w->format == STH_PACK_LAYER_INDEX;
    uint64_t told = 0;
    sth_verify_result r;
    sth_pack_options options;
    sth_pack_options_init(&options);
    options.threads = 1;
    options.context = &told;
    const contents *data = index ? &w->whole_second : &w->whole;
    fuzz_write(index ? w->second : w->out, data->bytes, data->size);
    fuzz_write(index ? w->out : w->second, text, size);
    sth_status status = sth_verify(w->out, model, &options, count_tensor, &r);
    if (status == STH_OK) {
        CHECK(told >= r.tensors && r.checksums_wrong + r.checksums_missing <= r.tensors);
        CHECK(r.missing <= told && r.stored_differ <= r.tensors);
    } else CHECK(sth_last_error()->status == status && strstr(sth_last_error()->message, fuzz_folder()));
    unlink(w->out), unlink(w->second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size || size > MOST / 2) return 0;
    prepare();
    long live = sthi_alloc_live();
    unsigned which = data[0] % 4;
    if (which < 2) go_on(&works[which], data + 1, size - 1);
    else verify(&works[which == 2], data + 1, size - 1);
    CHECK(sthi_alloc_live() == live);
    CHECK(fuzz_json_bytes == 0);
    return 0;
}
