/* Fuzz target for the zip directory. Input: the file.
 *
 * Property: it is read or refused with the file's name; members then lie inside the file and apart, in order of their
 * distinct names, and every one is found; nothing is left allocated or open. */
#include <string.h>

#include "base/memory.h"
#include "fuzz/files.h"
#include "store/zip.h"

static void check_members(const sthi_file *file, const sthi_zip *zip) {
    for (uint64_t i = 0; i < zip->count; i++) {
        const sthi_zip_member *m = &zip->members[i];
        CHECK(m->header < m->offset && m->offset <= file->size && m->bytes <= file->size - m->offset);
        CHECK(sthi_zip_find(zip, m->name) == m);
        CHECK(!i || strcmp(zip->members[i - 1].name, m->name) < 0);
        for (uint64_t j = 0; j < i; j++) {
            const sthi_zip_member *o = &zip->members[j];
            CHECK(o->offset + o->bytes <= m->header || m->offset + m->bytes <= o->header);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_path("f.zip");
    sthi_file file;
    sthi_zip zip;
    long live = sthi_alloc_live();
    fuzz_write(path, data, size);
    CHECK(sthi_file_open(path, &file) == STH_OK);
    sth_status status = sthi_zip_read(&file, &zip);
    if (status == STH_OK) {
        check_members(&file, &zip);
        sthi_zip_fini(&zip);
    } else {
        CHECK(status == STH_CORRUPT_DATA && strstr(sth_last_error()->message, path));
    }
    sthi_file_close(&file);
    CHECK(sthi_alloc_live() == live);
    return 0;
}
