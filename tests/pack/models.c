/* Test support: failures here end the test. */
#define _GNU_SOURCE
#include "support/check.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "pack/models.h"
#include "store/tempfiles.h"

#define HEADER                                                                        \
    "{\"a.weight\":{\"dtype\":\"F32\",\"shape\":[8,16],\"data_offsets\":[0,512]},"    \
    "\"a.bias\":{\"dtype\":\"BF16\",\"shape\":[8],\"data_offsets\":[512,528]},"       \
    "\"b.weight\":{\"dtype\":\"BF16\",\"shape\":[4,4],\"data_offsets\":[528,560]},"   \
    "\"c\":{\"dtype\":\"U8\",\"shape\":[40],\"data_offsets\":[560,600]}}"

static unsigned char data[MODEL_DATA];
static bool made;

/* Floats are finite whatever they are read as. */
void model_reset(void) {
    for (size_t i = 0; i < MODEL_DATA; i++) data[i] = (unsigned char)(0x30 + i % 13);
    made = true;
}

unsigned char *model_bytes(const char *tensor) {
    if (!made) model_reset();
    if (strcmp(tensor, "a.weight") == 0) return data;
    if (strcmp(tensor, "a.bias") == 0) return data + 512;
    return data + (strcmp(tensor, "b.weight") == 0 ? 528 : 560);
}

const char *model_write(const char *folder) {
    const char *path = temp_path(folder, "model.safetensors");
    unsigned char file[8 + sizeof HEADER + MODEL_DATA] = {(sizeof HEADER - 1) & 0xff, (sizeof HEADER - 1) >> 8};
    memcpy(file + 8, HEADER, sizeof HEADER - 1);
    memcpy(file + 8 + sizeof HEADER - 1, model_bytes("a.weight"), MODEL_DATA);
    write_bytes(path, file, 8 + sizeof HEADER - 1 + MODEL_DATA);
    return path;
}

sth_pack_options model_options(sth_pack_format format) {
    sth_pack_options options;
    sth_pack_options_init(&options);
    options.format = format;
    options.threads = 1;
    return options;
}

sth_status model_pack(const char *in, const char *out, sth_pack_format format) {
    sth_pack_options options = model_options(format);
    return sth_pack(in, out, &options);
}

bool model_is_there(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

int model_entries(const char *folder) {
    DIR *dir = opendir(folder);
    int n = 0;
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

bool model_same(const char *a, const char *b) {
    static char left[1 << 16], right[1 << 16];
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    assert_true(f && g);
    bool same = true;
    for (size_t n = 1, m; same && n;) {
        n = fread(left, 1, sizeof left, f);
        m = fread(right, 1, sizeof right, g);
        same = n == m && memcmp(left, right, n) == 0;
    }
    fclose(f);
    fclose(g);
    return same;
}
