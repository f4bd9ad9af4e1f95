/* Test support: failures here end the test, since it cannot go on without its files. */
#define _GNU_SOURCE
#include "support/check.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

#include "base/fault.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/random.h"
#include "store/slabs.h"
#include "store/tempfiles.h"

/* ---- parts ---- */

static uint32_t roll(const slab_files *f, uint64_t at) { return (uint32_t)(sthi_random64(7 + f->format, at) >> 32); }

/* A number of either sign with a few digits, so that sums of some hundred are exact in float64. */
static float number(const slab_files *f, uint64_t at) {
    uint32_t r = roll(f, at);
    float x = (float)(8 + r % 8) / (float)(8u << (r >> 8) % 4);
    return r >> 16 & 1 ? -x : x;
}

static void fill(slab_files *f, const slab_part *p) {
    unsigned char *to = f->data + p->at;
    uint16_t half;
    for (uint64_t i = 0; i < p->bytes; i++) to[i] = (unsigned char)roll(f, p->at + i);
    for (uint64_t i = 0; strcmp(p->dtype, "BF16") == 0 && i < p->bytes / 2; i++) {
        half = sthi_to_bf16(number(f, p->at + i));
        memcpy(to + 2 * i, &half, sizeof half);
    }
    for (uint64_t i = 0; strcmp(p->dtype, "F32") == 0 && i < p->bytes / 4; i++) {
        float x = number(f, p->at + i);
        memcpy(to + 4 * i, &x, sizeof x);
    }
    for (uint64_t i = 0; strstr(p->name, ".nvs") && i < p->bytes; i++) /* scales of which readers are sure */
        to[i] = (unsigned char)(8 + roll(f, p->at + i) % 0x77);
}

static void add(slab_files *f, const char *name, const char *dtype, uint64_t rows, uint64_t columns) {
    assert_true(f->count < SLAB_PARTS);
    slab_part *p = &f->parts[f->count++];
    uint64_t each = strcmp(dtype, "F32") == 0 ? 4 : strcmp(dtype, "BF16") == 0 ? 2 : 1;
    *p = (slab_part){.dtype = dtype, .rank = columns ? 2 : 1, .shape = {rows, columns}, .at = f->data_bytes};
    snprintf(p->name, sizeof p->name, "%s", name);
    p->bytes = each * rows * (columns ? columns : 1);
    f->data_bytes += p->bytes;
    assert_true(f->data_bytes <= SLAB_DATA);
    fill(f, p);
}

const slab_part *slab_find(const slab_files *f, const char *name) {
    for (size_t i = 0; i < f->count; i++)
        if (strcmp(f->parts[i].name, name) == 0) return &f->parts[i];
    fail_msg("no part '%s'", name);
    return NULL;
}

unsigned char *slab_bytes(slab_files *f, const char *name) { return f->data + slab_find(f, name)->at; }

float slab_f32(slab_files *f, const char *name, uint64_t i) {
    float x;
    memcpy(&x, slab_bytes(f, name) + 4 * i, sizeof x);
    return x;
}

float slab_bf16(slab_files *f, const char *name, uint64_t i) {
    uint16_t half;
    memcpy(&half, slab_bytes(f, name) + 2 * i, sizeof half);
    return sthi_from_bf16(half);
}

/* ---- texts ---- */

static void put(slab_text *t, const void *bytes, size_t count) {
    assert_true(t->count + count < SLAB_TEXT);
    memcpy(t->bytes + t->count, bytes, count);
    t->bytes[t->count += count] = '\0';
}

static void write_out(slab_text *t, const char *text) { put(t, text, strlen(text)); }

static void make_header(slab_files *f) {
    char entry[200], shape[48];
    for (size_t i = 0; i < f->count; i++) {
        const slab_part *p = &f->parts[i];
        snprintf(shape, sizeof shape, p->rank == 2 ? "%llu,%llu" : "%llu", (unsigned long long)p->shape[0],
                 (unsigned long long)p->shape[1]);
        snprintf(entry, sizeof entry, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%llu,%llu]}",
                 i ? "," : "{", p->name, p->dtype, shape, (unsigned long long)p->at,
                 (unsigned long long)(p->at + p->bytes));
        write_out(&f->header, entry);
    }
    write_out(&f->header, "}");
}

static bool splice(slab_text *t, const char *from, const char *to) {
    size_t old = strlen(from), new = strlen(to);
    char *at = memmem(t->bytes, t->count, from, old);
    if (!at) return false;
    assert_true(t->count + new - old < SLAB_TEXT);
    memmove(at + new, at + old, t->count - (size_t)(at - t->bytes) - old + 1);
    memcpy(at, to, new);
    t->count += new - old;
    return true;
}

void slab_edit(slab_files *f, const char *from, const char *to) {
    if (!splice(&f->header, from, to) && !splice(&f->beside, from, to)) fail_msg("no text \"%s\" to edit", from);
}

/* ---- the pickle of v1, operation by operation ---- */

static void put_text(slab_text *t, const char *text) {
    unsigned char head[5] = {'X', (unsigned char)strlen(text)};
    put(t, head, sizeof head);
    write_out(t, text);
}

static void put_number(slab_text *t, uint64_t n) {
    put(t, (unsigned char[]){'M', (unsigned char)n, (unsigned char)(n >> 8)}, 3);
}

/* Part i as a tensor over a storage of its own. */
static void put_tensor(slab_text *t, const slab_part *p, size_t i) {
    char key[8];
    snprintf(key, sizeof key, "%zu", i);
    write_out(t, "ctorch._utils\n_rebuild_tensor_v2\n((");
    put_text(t, "storage");
    write_out(t, strcmp(p->dtype, "I8") == 0 ? "ctorch\nCharStorage\n" : "ctorch\nFloatStorage\n");
    put_text(t, key);
    put_text(t, "cpu");
    put_number(t, p->shape[0] * (p->rank == 2 ? p->shape[1] : 1));
    write_out(t, "tQ");
    put_number(t, 0);
    put_number(t, p->shape[0]);
    if (p->rank == 2) put_number(t, p->shape[1]);
    write_out(t, p->rank == 2 ? "\x86" : "\x85");
    if (p->rank == 2) put_number(t, p->shape[1]);
    put_number(t, 1);
    write_out(t, p->rank == 2 ? "\x86\x89" : "\x85\x89");
    write_out(t, "ccollections\nOrderedDict\n)RtR");
}

static void put_entry(slab_text *t, const char *name, uint64_t out, uint64_t in, bool bias) {
    write_out(t, "}(");
    put_text(t, "name");
    put_text(t, name);
    put_text(t, "out");
    put_number(t, out);
    put_text(t, "inp");
    put_number(t, in);
    put_text(t, "padded_in");
    put_number(t, 64);
    put_text(t, "has_bias");
    write_out(t, bias ? "\x88u" : "\x89u");
}

static void make_pickle(slab_files *f) {
    slab_text *t = &f->header;
    write_out(t, "\x80\x02}(");
    put_text(t, "manifest");
    write_out(t, "}(");
    put_text(t, "quant_version");
    put_text(t, "bp8");
    put_text(t, "layers");
    write_out(t, "](");
    put_entry(t, "a", 3, 10, true);
    put_entry(t, "b", 2, 64, false);
    write_out(t, "eu");
    put_text(t, "layers");
    write_out(t, "}(");
    for (size_t i = 0; i < f->count; i++) {
        const char *key = f->parts[i].name + 2; /* behind "a." */
        if (strcmp(key, "qweight") == 0) {
            put_text(t, f->parts[i].name[0] == 'a' ? "a" : "b");
            write_out(t, "}(");
        }
        put_text(t, key);
        put_tensor(t, &f->parts[i], i);
        if (i + 1 == f->count || strcmp(f->parts[i + 1].name + 2, "qweight") == 0) write_out(t, "u");
    }
    write_out(t, "uu.");
}

/* ---- formats ---- */

static void make_int8(slab_files *f) {
    add(f, "a.qweight", "I8", 3, 64);
    add(f, "a.scale", "F32", 3, 0);
    add(f, "a.zero_point", "F32", 3, 0);
    add(f, "a.bias", "F32", 3, 0);
    add(f, "b.qweight", "I8", 2, 64);
    add(f, "b.scale", "F32", 2, 0);
    add(f, "b.zero_point", "F32", 2, 0);
}

static void describe_v2(slab_text *t) {
    write_out(t, "{\"quant_version\":\"squareq_bp8_v2\",\"kernel_abi_version\":1,\"model_signature\":\"s\","
                 "\"layer_count\":2,\"total_qweight_bytes\":320,\"layers\":[");
    write_out(t, "{\"canonical_name\":\"a\",\"orig_shape\":[3,10],\"packed_shape\":[3,64],\"pad_k\":64,"
                 "\"quant_bits\":8,\"quant_axis\":0,\"quant_scheme\":\"per_row_symmetric\","
                 "\"dtype_qweight\":\"int8\",\"dtype_scale\":\"float32\",\"dtype_zero_point\":\"float32\","
                 "\"qweight_key\":\"a.qweight\",\"scale_key\":\"a.scale\",\"zero_point_key\":\"a.zero_point\","
                 "\"bias_key\":\"a.bias\"},");
    write_out(t, "{\"canonical_name\":\"b\",\"orig_shape\":[2,64],\"packed_shape\":[2,64],\"pad_k\":64,"
                 "\"quant_bits\":8,\"quant_axis\":0,\"quant_scheme\":\"per_row_symmetric\","
                 "\"dtype_qweight\":\"int8\",\"dtype_scale\":\"float32\",\"dtype_zero_point\":\"float32\","
                 "\"qweight_key\":\"b.qweight\",\"scale_key\":\"b.scale\",\"zero_point_key\":\"b.zero_point\","
                 "\"bias_key\":null}]}");
}

static void make_svdquant(slab_files *f, bool hybrid) {
    add(f, "a.qweight", "I8", 24, 16);
    add(f, "a.wscales", "BF16", 2, 24);
    add(f, "a.lora_down", "BF16", 32, 5);
    add(f, "a.lora_up", "BF16", 24, 5);
    add(f, "a.smooth", "BF16", 32, 0);
    add(f, "a.bias", "BF16", 24, 0);
    if (!hybrid) {
        write_out(&f->beside, "{\"method\":\"svdquant_int4\",\"group\":16,\"quant_bits\":4,\"quantized\":"
                              "{\"a.weight\":{\"out\":24,\"in\":32,\"rank\":5}},\"passthrough\":[\"norm\"]}");
        return;
    }
    add(f, "b.qweight", "I8", 2, 8);
    add(f, "b.wscale", "BF16", 2, 0);
    add(f, "b.lora_down", "BF16", 16, 1);
    add(f, "b.lora_up", "BF16", 2, 1);
    write_out(&f->beside, "{\"method\":\"svdquant_w4a4_hybrid\",\"group\":16,\"hadamard\":\"sylvester\",\"layers\":"
                          "{\"a.weight\":{\"kind\":\"w4a16\",\"out\":24,\"in\":32,\"rank\":5},"
                          "\"b.weight\":{\"kind\":\"w4a4\",\"out\":2,\"in\":16,\"rank\":1}},"
                          "\"passthrough\":[\"norm\"]}");
}

static void make_v3(slab_files *f, bool nvfp4) {
    if (nvfp4) {
        add(f, "a.nvq", "U8", 24, 128);
        add(f, "a.nvs", "U8", 128, 16);
        add(f, "a.nvg", "F32", 1, 0);
    } else {
        add(f, "a.qweight", "U8", 3, 128);
        add(f, "a.wscales", "BF16", 4, 3);
    }
    add(f, "a.lora_down", "BF16", 256, 2);
    add(f, "a.lora_up", "BF16", nvfp4 ? 24 : 3, 2);
    write_out(&f->beside, "{\"plan_version\":1,\"layers\":{\"a.weight\":{\"in\":256,\"rank\":2,\"out\":");
    write_out(&f->beside, nvfp4 ? "24,\"format\":\"" : "3,\"format\":\"");
    write_out(&f->beside, nvfp4 ? "squareq_nvfp4_v1\"}}}" : "squareq_w4_v1\"}}}");
}

void slab_make(slab_files *f, sth_quant_format format) {
    memset(f, 0, sizeof *f);
    f->format = format;
    if (format <= STH_QUANT_V2) make_int8(f);
    else if (format <= STH_QUANT_SVDQUANT_HYBRID) make_svdquant(f, format == STH_QUANT_SVDQUANT_HYBRID);
    else make_v3(f, format == STH_QUANT_V3_NVFP4);
    if (format == STH_QUANT_V2) describe_v2(&f->beside);
    if (format == STH_QUANT_V1) {
        make_pickle(f);
        return;
    }
    add(f, "norm", "F32", 4, 0);
    make_header(f);
}

/* ---- writing ---- */

static unsigned char *little(unsigned char *to, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) *to++ = i < 8 ? (unsigned char)(value >> 8 * i) : 0;
    return to;
}

size_t zip_make(const zip_file_member *members, size_t count, unsigned char *out, size_t room) {
    unsigned char *to = out;
    size_t headers[SLAB_PARTS + 4], used = 22;
    for (size_t i = 0; i < count; i++) used += 76 + 2 * strlen(members[i].name) + members[i].count;
    assert_true(used <= room && count <= sizeof headers / sizeof *headers);
    for (size_t i = 0; i < count; i++) { /* "PK 3 4", version, flags, method, time, crc, sizes, name, extra */
        const zip_file_member *m = &members[i];
        size_t name = strlen(m->name);
        headers[i] = (size_t)(to - out);
        to = little(little(little(to, 0x04034b50, 4), 10, 2), 0, 8);
        to = little(little(little(to, crc32(0, m->bytes, m->count), 4), m->count, 4), m->count, 4);
        to = little(little(to, name, 2), 0, 2);
        memcpy(to, m->name, name);
        memcpy(to + name, m->bytes, m->count);
        to += name + m->count;
    }
    size_t directory = (size_t)(to - out);
    for (size_t i = 0; i < count; i++) { /* "PK 1 2", versions, flags, ..., comment, disk, attributes, header */
        const zip_file_member *m = &members[i];
        size_t name = strlen(m->name);
        to = little(little(little(to, 0x02014b50, 4), 0x000a000a, 4), 0, 8);
        to = little(little(little(to, crc32(0, m->bytes, m->count), 4), m->count, 4), m->count, 4);
        to = little(little(little(to, name, 2), 0, 12), headers[i], 4);
        memcpy(to, m->name, name);
        to += name;
    }
    size_t end = (size_t)(to - out);
    to = little(little(little(to, 0x06054b50, 4), 0, 4), count, 2);
    to = little(little(little(little(to, count, 2), end - directory, 4), directory, 4), 0, 2);
    return (size_t)(to - out);
}

static void write_v1(const slab_files *f, const char *path) {
    static unsigned char file[2 * SLAB_DATA];
    zip_file_member members[SLAB_PARTS + 1] = {{"m/data.pkl", f->header.bytes, (uint32_t)f->header.count}};
    static char names[SLAB_PARTS][24];
    for (size_t i = 0; i < f->count; i++) {
        snprintf(names[i], sizeof names[i], "m/data/%zu", i);
        members[i + 1] = (zip_file_member){names[i], f->data + f->parts[i].at, (uint32_t)f->parts[i].bytes};
    }
    write_bytes(path, file, zip_make(members, f->count + 1, file, sizeof file));
}

static void write_model(const slab_files *f, const char *path) {
    static unsigned char file[8 + SLAB_TEXT + SLAB_DATA];
    unsigned char *to = little(file, f->header.count, 8);
    memcpy(to, f->header.bytes, f->header.count);
    memcpy(to + f->header.count, f->data, f->data_bytes);
    write_bytes(path, file, 8 + f->header.count + f->data_bytes);
}

const char *slab_write(const slab_files *f, const char *folder) {
    bool shards = f->format >= STH_QUANT_V3_INT4;
    const char *path = temp_path(folder, f->format == STH_QUANT_V1 ? "m.fpk" : "m.safetensors");
    if (f->format == STH_QUANT_V1) {
        write_v1(f, path);
        return path;
    }
    write_model(f, path);
    if (f->beside.count)
        write_text(temp_path(folder, shards ? "squareq-plan.json" : "m.manifest.json"), f->beside.bytes);
    return shards ? folder : path;
}

/* ---- checks that all readers share ---- */

void slab_check_edits(const char *folder, sth_quant_format format, const slab_edit_case *cases, size_t count) {
    static slab_files f;
    for (size_t i = 0; i < count; i++) {
        sth_quant *slab = NULL;
        slab_make(&f, format);
        slab_edit(&f, cases[i].from, cases[i].to);
        const char *path = slab_write(&f, folder);
        long live = sthi_alloc_live();
        int open = open_descriptors();
        sth_status status = sth_quant_open(path, &slab);
        if (status != cases[i].status || !strstr(sth_last_error()->message, cases[i].says))
            fail_msg("\"%s\" for \"%s\": %s (%s), expected %s (...%s...)", cases[i].to, cases[i].from,
                     sth_status_name(status), sth_last_error()->message, sth_status_name(cases[i].status),
                     cases[i].says);
        assert_null(slab);
        assert_int_equal(sthi_alloc_live(), live);
        assert_int_equal(open_descriptors(), open);
    }
}

static void fail_each(const char *path, sthi_fault_kind kind, uint64_t least) {
    long live = sthi_alloc_live();
    int open = open_descriptors();
    for (uint64_t n = 1, hit = 1; hit; n++) {
        sth_quant *slab = NULL;
        sthi_fault_arm(kind, n, false);
        sth_status status = sth_quant_open(path, &slab);
        hit = sthi_fault_seen(kind) >= n;
        sthi_fault_disarm_all();
        if (hit && status != (kind == STHI_FAULT_READ ? STH_IO : STH_OUT_OF_HOST_MEMORY))
            fail_msg("failure %llu of %s: %s (%s)", (unsigned long long)n, path, sth_status_name(status),
                     sth_last_error()->message);
        if (!hit) assert_ok(status);
        assert_true((status == STH_OK) == (slab != NULL));
        sth_quant_close(slab);
        assert_int_equal(sthi_alloc_live(), live);
        assert_int_equal(open_descriptors(), open);
        assert_true(hit || n > least);
    }
}

void slab_check_faults(const char *path) {
    fail_each(path, STHI_FAULT_ALLOC, 12);
    fail_each(path, STHI_FAULT_READ, 2);
}
