/* Kernels, compiled when they are first needed by the CUDA run-time compiler (NVRTC) for the card at hand.
 *
 * The compiler is a library of the CUDA toolkit and of PyTorch's wheels (library.c says where it is looked for;
 * STAGEHAND_NVRTC_LIBRARY names another). Without one there are no kernels, and the runtime expands on the host. Lock:
 * `compiling` of the device, held while compiling (some 100 ms). */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/cuda/cuda.h"
#include "device/cuda/library.h"

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

static const cuda_symbol symbols[] = {
#define NVRTC_ENTRY(member, symbol, parameters) {#symbol, offsetof(nvrtc, member)},
    NVRTC_SYMBOLS(NVRTC_ENTRY)
#undef NVRTC_ENTRY
};

static sth_status load(nvrtc *out) {
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "libnvrtc.so.11.2", NULL};
    static const char *const below[] = {"/nvidia/cu13/lib", "/nvidia/cuda_nvrtc/lib", "/torch/lib", NULL};
    static const cuda_library compiler = {.what = "CUDA run-time compiler (libnvrtc)", .domain = "nvrtc",
                                          .variable = "STAGEHAND_NVRTC_LIBRARY", .package = "nvidia-cuda-nvrtc",
                                          .oldest = "CUDA 11.1", .stem = "/libnvrtc.so", .names = names, .below = below};
    return sthi_cuda_library(&compiler, symbols, sizeof symbols / sizeof *symbols, out);
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

sth_status sthi_cuda_compile_text(const cuda_device *d, const char *text, char **out_image) {
    nvrtc n;
    int major = 0, minor = 0;
    STHI_TRY(load(&n));
    cu_result r = d->driver->device_attribute(&major, CU_ATTRIBUTE_COMPUTE_MAJOR, d->handle);
    if (r == CU_OK) r = d->driver->device_attribute(&minor, CU_ATTRIBUTE_COMPUTE_MINOR, d->handle);
    if (r != CU_OK) return sthi_cuda_fail(d->driver, r, d->name, "asking for the compute capability", NULL);
    size_t bytes = sizeof conversions + strlen(text);
    char *source = sthi_alloc(bytes);
    if (!source) return sthi_fail(STH_OUT_OF_HOST_MEMORY, "nvrtc", 0, "kernels", "no memory for kernels");
    snprintf(source, bytes, "%s%s", conversions, text);
    sth_status rc = compile(&n, source, 10 * major + minor, out_image);
    sthi_free(source);
    return rc;
}

sth_status sthi_cuda_compile(cuda_device *d) {
    char *image = NULL;
    STHI_TRY(sthi_cuda_compile_text(d, kernels, &image));
    sth_status rc = load_module(d, image);
    sthi_free(image);
    return rc;
}
