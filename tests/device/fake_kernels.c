/* The stand-in's kernels: the back end's text, where it could be compiled for the CPU, found by name. */
#include <string.h>

#include "device/four_bits.h"
#include "fake_parts.h"
#include "kernels_on_cpu.h"

static int modules;

fake_code fake_module_load(void **out, const void *image) {
    if (strcmp(image, "fake image")) return FAKE_INVALID_VALUE;
    modules++;
    *out = &modules;
    return FAKE_OK;
}

fake_code fake_module_unload(void *module) {
    if (module != &modules || !modules) return FAKE_INVALID_HANDLE;
    modules--;
    return FAKE_OK;
}

fake_code fake_module_function(void **out, void *module, const char *name) {
    int kernel = module == &modules ? kernel_of_name(name) : -1;
    if (kernel < 0) return FAKE_INVALID_VALUE;
    *out = (void *)(uintptr_t)(kernel + 1);
    return FAKE_OK;
}

typedef struct pending {
    int kernel;
    unsigned grid, block;
    sthi_launch launch;
} pending;
_Static_assert(sizeof(pending) <= sizeof((fake_work *)0)->arguments, "a launch fits the work of a stream");

static void expand(void *arguments) {
    pending p;
    memcpy(&p, arguments, sizeof p);
    kernel_on_cpu(p.kernel, p.grid, p.block, &p.launch);
}

static void touch(fake_work *w, uint64_t address, uint64_t bytes, bool writes) {
    if (address && bytes)
        w->touch[w->touches++] = (fake_touch){(const char *)(uintptr_t)address, bytes, true, writes};
}

static void touch_rows(fake_work *w, const sthi_launch *l, bool four_bits) {
    uint64_t rows = l->rows, cols = l->cols;
    uint64_t row = four_bits ? (cols + 1) / 2 : cols, scales = four_bits ? rows * ((cols + 63) / 64) * 2 : rows * 4;
    touch(w, l->codes, (rows - 1) * l->stride + row, false);
    touch(w, l->scales, scales, false);
    touch(w, l->zeros, scales, false);
}

static void touch_tiles(fake_work *w, const sthi_launch *l) {
    sthi_four_shape s = {.encoding = l->nvfp4 ? STH_TRANSFER_FILE_NVFP4 : STH_TRANSFER_FILE_INT4, .rows = l->rows,
                         .cols = l->cols, .stride = l->stride, .pitch = l->pitch, .rank = l->rank, .group = l->group,
                         .factor = l->factor, .smooth = l->smooth != 0};
    sthi_four_bytes bytes;
    (void)sthi_four_wrong_sizes(&s, &bytes);
    touch(w, l->codes, bytes.codes, false);
    touch(w, l->scales, bytes.scales, false);
    touch(w, l->up, bytes.up, false);
    touch(w, l->down, bytes.down, false);
    touch(w, l->smooth, bytes.smooth, false);
}

static void touch_lossless(fake_work *w, const sthi_launch *l) { touch(w, l->codes, l->stride, false); }

fake_code fake_launch(void *function, const unsigned grid[3], const unsigned block[3], unsigned shared, void *stream,
                      void **arguments, void **extra) {
    pending p = {.kernel = (int)(uintptr_t)function - 1, .grid = grid[0], .block = block[0]};
    bool flat = grid[1] == 1 && grid[2] == 1 && block[1] == 1 && block[2] == 1;
    if (!flat || shared || extra || !grid[0] || !block[0] || block[0] > 1024 || p.kernel < 0) return FAKE_INVALID_VALUE;
    memcpy(&p.launch, arguments[0], sizeof p.launch);
    fake_work w = {.run = expand, .what = "an expansion"};
    memcpy(w.arguments, &p, sizeof p);
    if (p.kernel == kernel_of_name("sthi_expand_four_bits")) touch_tiles(&w, &p.launch);
    else if (p.kernel == kernel_of_name("sthi_expand_lossless")) touch_lossless(&w, &p.launch);
    else touch_rows(&w, &p.launch, p.kernel == kernel_of_name("sthi_expand_int4"));
    touch(&w, p.launch.place, p.launch.rows * p.launch.cols * (p.launch.dtype ? 2 : 4), true);
    return fake_enqueue(stream, &w);
}

long fake_modules_live(void) { return modules; }
void fake_modules_reset(void) { modules = 0; }
