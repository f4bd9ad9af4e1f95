/* Kernels, compiled when they are first needed by the CUDA run-time compiler (NVRTC) for the card at hand.
 *
 * The compiler is a library of the CUDA toolkit and of PyTorch's wheels. Where it is looked for, in this order:
 * STAGEHAND_NVRTC_LIBRARY (an absolute path), one that the process has loaded, the system's loader by name, and the
 * folders of the nvidia and torch packages next to libraries that the process has loaded. Without one there are no
 * kernels, and the runtime expands on the host. Lock: `lock` of load.c's kind, held while compiling (some 100 ms). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/cuda/cuda.h"

#define STHI_KERNELS(...) static const char kernels[] = #__VA_ARGS__;
#include "device/cuda/kernels.h"
#undef STHI_KERNELS

static const char conversions[] =
    "static __device__ unsigned sthi_f16(float x) { unsigned short h; "
    "asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(h) : \"f\"(x)); return h; }\n";

typedef struct nvrtc_program_opaque *nvrtc_program;
enum { NVRTC_OK = 0 };

/* X(member, symbol, parameters): from CUDA 11.1 on */
#define NVRTC_SYMBOLS(X)                                                                                         \
    X(create, nvrtcCreateProgram,                                                                                \
      (nvrtc_program *, const char *source, const char *name, int, const char *const *, const char *const *))    \
    X(compile, nvrtcCompileProgram, (nvrtc_program, int, const char *const *options))                            \
    X(destroy, nvrtcDestroyProgram, (nvrtc_program *))                                                           \
    X(cubin_size, nvrtcGetCUBINSize, (nvrtc_program, size_t *))                                                  \
    X(cubin, nvrtcGetCUBIN, (nvrtc_program, char *))                                                             \
    X(ptx_size, nvrtcGetPTXSize, (nvrtc_program, size_t *))                                                      \
    X(ptx, nvrtcGetPTX, (nvrtc_program, char *))                                                                 \
    X(log_size, nvrtcGetProgramLogSize, (nvrtc_program, size_t *))                                               \
    X(log, nvrtcGetProgramLog, (nvrtc_program, char *))

typedef struct nvrtc {
#define NVRTC_MEMBER(member, symbol, parameters) int(*member) parameters;
    NVRTC_SYMBOLS(NVRTC_MEMBER)
#undef NVRTC_MEMBER
} nvrtc;

static const struct {
    const char *symbol;
    size_t offset;
} symbols[] = {
#define NVRTC_ENTRY(member, symbol, parameters) {#symbol, offsetof(nvrtc, member)},
    NVRTC_SYMBOLS(NVRTC_ENTRY)
#undef NVRTC_ENTRY
};

/* ---- finding the compiler ---- */

static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "libnvrtc.so.11.2"};
enum { NAMES = sizeof names / sizeof *names };

typedef struct finder {
    void *library;
} finder;

static void *open_in(const char *folder, size_t length, const char *below) {
    char path[PATH_MAX];
    for (int i = 0; i < NAMES; i++) {
        int n = snprintf(path, sizeof path, "%.*s%s/%s", (int)length, folder, below, names[i]);
        void *library = n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
        if (library) return library;
    }
    return NULL;
}

/* One library of the process: the compiler itself, or one of the packages that bring it along. */
static int look_at(struct dl_phdr_info *info, size_t size, void *context) {
    static const char *const below[] = {"/nvidia/cu13/lib", "/nvidia/cuda_nvrtc/lib", "/torch/lib"};
    finder *f = context;
    (void)size;
    const char *path = info->dlpi_name, *at;
    if (!path || *path != '/') return 0;
    if (strstr(path, "/libnvrtc.so")) f->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!f->library && ((at = strstr(path, "/nvidia/")) || (at = strstr(path, "/torch/lib/"))))
        for (size_t i = 0; !f->library && i < sizeof below / sizeof *below; i++)
            f->library = open_in(path, (size_t)(at - path), below[i]);
    return f->library != NULL;
}

static sth_status open_library(void **out) {
    const char *path = secure_getenv("STAGEHAND_NVRTC_LIBRARY");
    if (path && *path != '/')
        return sthi_fail(STH_BACKEND_UNAVAILABLE, "nvrtc", 0, path,
                         "STAGEHAND_NVRTC_LIBRARY is \"%s\"; it must be the absolute path of the compiler's library", path);
    finder f = {NULL};
    if (path) f.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; !path && !f.library && i < NAMES; i++) f.library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; !path && !f.library && i < NAMES; i++) f.library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!path && !f.library) dl_iterate_phdr(look_at, &f);
    *out = f.library;
    if (f.library) return STH_OK;
    return sthi_fail(STH_BACKEND_UNAVAILABLE, "nvrtc", 0, path ? path : names[1],
                     "there is no CUDA run-time compiler (libnvrtc): install nvidia-cuda-nvrtc, or set "
                     "STAGEHAND_NVRTC_LIBRARY to the path of libnvrtc.so");
}

static sth_status load(nvrtc *out) {
    void *library;
    STHI_TRY(open_library(&library));
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *f = dlsym(library, symbols[i].symbol);
        if (!f)
            return sthi_fail(STH_BACKEND_UNAVAILABLE, "nvrtc", 0, symbols[i].symbol,
                             "the CUDA run-time compiler has no function %s; it is older than CUDA 11.1", symbols[i].symbol);
        memcpy((char *)out + symbols[i].offset, &f, sizeof f);
    }
    return STH_OK;
}

/* ---- compiling ---- */

static sth_status fail_compile(const nvrtc *n, nvrtc_program p, int code) {
    size_t bytes = 0;
    char *log = n->log_size(p, &bytes) == NVRTC_OK && bytes ? sthi_zalloc(bytes + 1, 1) : NULL;
    if (log) (void)n->log(p, log);
    sth_status rc = sthi_fail(STH_BACKEND_UNAVAILABLE, "nvrtc", code, "kernels",
                              "the CUDA run-time compiler refuses the kernels (%d): %.400s", code, log ? log : "no log");
    sthi_free(log);
    return rc;
}

/* *out: machine code, or PTX that the driver finishes; freed by the caller. */
static sth_status take(const nvrtc *n, nvrtc_program p, bool machine_code, char **out) {
    size_t bytes = 0;
    int code = machine_code ? n->cubin_size(p, &bytes) : n->ptx_size(p, &bytes);
    if (code != NVRTC_OK || !bytes) return fail_compile(n, p, code);
    char *image = sthi_zalloc(bytes, 1);
    if (!image) return sthi_fail(STH_OUT_OF_HOST_MEMORY, "nvrtc", 0, "kernels", "no memory for kernels");
    code = machine_code ? n->cubin(p, image) : n->ptx(p, image);
    if (code == NVRTC_OK) {
        *out = image;
        return STH_OK;
    }
    sthi_free(image);
    return fail_compile(n, p, code);
}

static sth_status compile_for(const nvrtc *n, const char *source, const char *architecture, bool machine_code, char **out) {
    char option[48];
    snprintf(option, sizeof option, "--gpu-architecture=%s", architecture);
    const char *const options[] = {option, "--std=c++14", "--fmad=false"};
    nvrtc_program p = NULL;
    int code = n->create(&p, source, "stagehand.cu", 0, NULL, NULL);
    if (code != NVRTC_OK)
        return sthi_fail(STH_BACKEND_UNAVAILABLE, "nvrtc", code, "kernels", "the CUDA run-time compiler does not start (%d)",
                         code);
    code = n->compile(p, 3, options);
    sth_status rc = code == NVRTC_OK ? take(n, p, machine_code, out) : fail_compile(n, p, code);
    (void)n->destroy(&p);
    return rc;
}

/* For the card itself, else, where the compiler is older than the card, as PTX of an older one. */
static sth_status compile(const nvrtc *n, const char *source, int capability, char **out) {
    char architecture[16];
    snprintf(architecture, sizeof architecture, "sm_%d", capability);
    sth_status rc = compile_for(n, source, architecture, true, out);
    if (rc == STH_OK) return rc;
    return capability > 80 ? compile_for(n, source, "compute_80", false, out) : rc;
}

static sth_status load_module(cuda_device *d, const char *image) {
    static const char *const of_encoding[] = {"int8", "fp8", "int4"}, *const of_dtype[] = {"f32", "bf16", "f16"};
    cu_result r = d->driver->module_load(&d->module, image);
    if (r != CU_OK) return sthi_cuda_fail(d->driver, r, d->name, "loading the kernels", NULL);
    for (int e = 0; e < 3; e++)
        for (int t = 0; t < 3; t++) {
            char name[40];
            snprintf(name, sizeof name, "sthi_expand_%s_%s", of_encoding[e], of_dtype[t]);
            r = d->driver->module_function(&d->kernels[e][t], d->module, name);
            if (r != CU_OK) return sthi_cuda_fail(d->driver, r, name, "finding a kernel", NULL);
        }
    return STH_OK;
}

sth_status sthi_cuda_compile(cuda_device *d) {
    nvrtc n;
    int major = 0, minor = 0;
    STHI_TRY(load(&n));
    cu_result r = d->driver->device_attribute(&major, CU_ATTRIBUTE_COMPUTE_MAJOR, d->handle);
    if (r == CU_OK) r = d->driver->device_attribute(&minor, CU_ATTRIBUTE_COMPUTE_MINOR, d->handle);
    if (r != CU_OK) return sthi_cuda_fail(d->driver, r, d->name, "asking for the compute capability", NULL);
    size_t bytes = sizeof conversions + sizeof kernels;
    char *source = sthi_alloc(bytes), *image = NULL;
    if (!source) return sthi_fail(STH_OUT_OF_HOST_MEMORY, "nvrtc", 0, "kernels", "no memory for kernels");
    snprintf(source, bytes, "%s%s", conversions, kernels);
    sth_status rc = compile(&n, source, 10 * major + minor, &image);
    if (rc == STH_OK) rc = load_module(d, image);
    sthi_free(image);
    sthi_free(source);
    return rc;
}
