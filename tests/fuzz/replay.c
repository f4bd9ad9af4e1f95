/* Runs a fuzz target over the files of the folders and over the files named on the command line, so that a
 * corpus is a test with any compiler. Fails when there is nothing to run. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned long replayed;

static void fail(const char *path) {
    perror(path);
    exit(2);
}

static void replay_file(const char *path, size_t size) {
    FILE *f = fopen(path, "rb");
    uint8_t *data = malloc(size ? size : 1); /* exactly as large as the input: reading past it is seen */
    if (!f || !data || fread(data, 1, size, f) != size) fail(path);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    fclose(f);
    replayed++;
}

static void replay(const char *path) {
    struct stat st;
    if (stat(path, &st)) fail(path);
    if (!S_ISDIR(st.st_mode)) {
        replay_file(path, (size_t)st.st_size);
        return;
    }
    struct dirent **entries;
    int count = scandir(path, &entries, NULL, alphasort);
    if (count < 0) fail(path);
    for (int i = 0; i < count; i++) {
        char *inside;
        if (asprintf(&inside, "%s/%s", path, entries[i]->d_name) < 0) fail(path);
        if (entries[i]->d_name[0] != '.') replay(inside);
        free(inside);
        free(entries[i]);
    }
    free(entries);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) replay(argv[i]);
    printf("1..1\n%s 1 - %lu inputs replayed\n", replayed ? "ok" : "not ok", replayed);
    return replayed ? 0 : 1;
}
