/* The stand-in's kernels: the back end's text, where it could be compiled for the CPU, found by name. */
#include <stdio.h>
#include <string.h>

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
    static const char *const encodings[] = {"int8", "fp8", "int4"}, *const dtypes[] = {"f32", "bf16", "f16"};
    char wanted[40];
    for (int i = 0; module == &modules && i < 9; i++) {
        snprintf(wanted, sizeof wanted, "sthi_expand_%s_%s", encodings[i / 3], dtypes[i % 3]);
        if (strcmp(wanted, name)) continue;
        *out = (void *)(uintptr_t)(i + 1);
        return FAKE_OK;
    }
    return FAKE_INVALID_VALUE;
}

enum { KERNEL, GRID, BLOCK, COUNT, ROW_STEPS, BY_EIGHT, COLS, STRIDE, CODES, SCALES, ZEROS, PLACE };

static void expand(void *arguments) {
    const uint64_t *a = arguments;
    const void *at[3];
    for (int i = 0; i < 3; i++) at[i] = (const void *)(uintptr_t)a[CODES + i];
    kernel_on_cpu((int)a[KERNEL], (unsigned)a[GRID], (unsigned)a[BLOCK], (unsigned)a[COUNT], (unsigned)a[ROW_STEPS],
                  (unsigned)a[BY_EIGHT], (unsigned)a[COLS], a[STRIDE], at[0], at[1], at[2], (void *)(uintptr_t)a[PLACE]);
}

static void touch(fake_work *w, uint64_t address, uint64_t bytes, bool writes) {
    if (address)
        w->touch[w->touches++] = (fake_touch){(const char *)(uintptr_t)address, bytes, true, writes};
}

fake_code fake_launch(void *function, const unsigned grid[3], const unsigned block[3], unsigned shared, void *stream,
                      void **p, void **extra) {
    int kernel = (int)(uintptr_t)function - 1;
    bool flat = grid[1] == 1 && grid[2] == 1 && block[1] == 1 && block[2] == 1;
    if (!flat || shared || extra || !grid[0] || !block[0] || block[0] > 1024 || kernel < 0 || kernel >= 9)
        return FAKE_INVALID_VALUE;
    fake_work w = {.run = expand, .what = "an expansion", .arguments = {(uint64_t)kernel, grid[0], block[0]}};
    for (int i = 0; i < 4; i++) w.arguments[COUNT + i] = *(unsigned *)p[i];
    for (int i = 0; i < 5; i++) w.arguments[STRIDE + i] = *(unsigned long long *)p[4 + i];
    uint64_t *a = w.arguments, rows = a[COUNT] / a[ROW_STEPS], cols = a[COLS];
    bool four_bits = kernel / 3 == 2;
    uint64_t row_bytes = four_bits ? (cols + 1) / 2 : cols, scale_bytes = four_bits ? rows * ((cols + 63) / 64) * 2 : rows * 4;
    touch(&w, a[CODES], (rows - 1) * a[STRIDE] + row_bytes, false);
    touch(&w, a[SCALES], scale_bytes, false);
    touch(&w, a[ZEROS], scale_bytes, false);
    touch(&w, a[PLACE], rows * cols * (kernel % 3 == 0 ? 4 : 2), true);
    return fake_enqueue(stream, &w);
}

long fake_modules_live(void) { return modules; }
void fake_modules_reset(void) { modules = 0; }
