/* SHA-256 (FIPS 180-4), for the signatures that manifests carry. Not for secrets. */
#ifndef STHI_BASE_SHA256_H
#define STHI_BASE_SHA256_H
#include <stddef.h>
#include <stdint.h>

typedef struct sthi_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} sthi_sha256;

void sthi_sha256_init(sthi_sha256 *sha);
void sthi_sha256_add(sthi_sha256 *sha, const void *bytes, size_t count);
void sthi_sha256_end(sthi_sha256 *sha, unsigned char out[32]);
#endif
