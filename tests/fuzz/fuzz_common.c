/* Fuzz target for files of weights that processes have in common. Input: a byte of flags, then the file of another
 * process, cut off or filled up with zeros to a few pages.
 *
 * Property: a file that lies costs nobody anything but its own word. An arena that looks for weights finds them there
 * only if a place of their size in the file, behind its table, was said to have their print, and can read all of them;
 * else it has its own copy. Nothing is left allocated. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/memory.h"
#include "device/device.h"
#include "fuzz/files.h"
#include "host/arena.h"

enum { WEIGHTS = 8192, PAGES = 5, PLACES = 6 };
enum { UNSEALED = 1, OTHER_NAME = 2, WITH_PRINT = 4 };

static uint8_t weights[WEIGHTS];

static int make_file(const uint8_t *data, size_t size, unsigned flags, const uint64_t print[2]) {
    int fd = memfd_create(flags & OTHER_NAME ? "stagehand-weight" : "stagehand-weights-1",
                          MFD_CLOEXEC | MFD_ALLOW_SEALING);
    size_t all = PAGES * sthi_page_size();
    CHECK(fd >= 0 && !ftruncate(fd, (off_t)all));
    CHECK(pwrite(fd, data, size < all ? size : all, 0) >= 0);
    if (flags & WITH_PRINT) /* of the first entry */
        CHECK(pwrite(fd, print, 16, 32) == 16);
    if (!(flags & UNSEALED)) CHECK(!fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    sth_sim_options options;
    sth_device *device;
    sth_arena *arena;
    uint64_t print[2];
    void *p;
    if (!size) return 0;
    uint64_t own[2] = {(uint64_t)getpid(), (uint64_t)(uintptr_t)&own}; /* other fuzzers' files are none of ours */
    memset(weights, 7, sizeof weights);
    memcpy(weights, own, sizeof own);
    sth_arena_part part = {0, weights, WEIGHTS};
    CHECK(sth_arena_print(&part, 1, WEIGHTS, print) == STH_OK);
    int fd = make_file(data + 1, size - 1, data[0], print);
    long live = sthi_alloc_live();
    sth_sim_options_init(&options);
    options.virtual_time = true;
    CHECK(sthi_device_open("sim", &options, &device) == STH_OK);
    CHECK(sth_arena_create_common(device, PLACES * WEIGHTS, UINT64_MAX, PLACES, &arena) == STH_OK);
    CHECK(sth_arena_place(arena, WEIGHTS, &part, 1, data[0] & WITH_PRINT ? print : NULL, &p) == STH_OK);
    CHECK(sth_arena_finish(arena) == STH_OK);
    bool found = sth_arena_found_bytes(arena) != 0;
    CHECK(!found || (data[0] & (WITH_PRINT | UNSEALED | OTHER_NAME)) == WITH_PRINT);
    if (!found) CHECK(!memcmp(p, weights, WEIGHTS) && !memcmp(sth_arena_image(arena, p), weights, WEIGHTS));
    uint8_t read[WEIGHTS];
    memcpy(read, p, WEIGHTS);
    sth_arena_release(arena);
    sthi_device_release(device);
    CHECK(sthi_alloc_live() == live);
    close(fd);
    return 0;
}
