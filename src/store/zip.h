/* The directory of a zip file whose members are stored as they are. */
#ifndef STHI_STORE_ZIP_H
#define STHI_STORE_ZIP_H
#include <stdint.h>

#include "store/file.h"

typedef struct sthi_zip_member {
    const char *name;
    uint64_t header; /* where its local header begins */
    uint64_t offset; /* of its first byte in the file */
    uint64_t bytes;
    uint32_t crc; /* CRC-32 of its bytes, as the directory says */
} sthi_zip_member;

typedef struct sthi_zip {
    sthi_zip_member *members; /* sorted by name */
    uint64_t count;
    char *names;
} sthi_zip;

/* Reads the central directory and every local header. Afterwards names are distinct, members lie between the
 * start of the file and the directory, and no two share a byte. Refused: compression, encryption, several
 * disks. Does not read the members. */
sth_status sthi_zip_read(const sthi_file *file, sthi_zip *out);
void sthi_zip_fini(sthi_zip *zip);
const sthi_zip_member *sthi_zip_find(const sthi_zip *zip, const char *name); /* NULL: there is none */
#endif
