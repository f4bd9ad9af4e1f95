/* CUDA's run-time compiler (NVRTC), a library of the CUDA toolkit and of PyTorch's wheels. From CUDA 11.1 on. */
#include <stdio.h>

#include "base/error.h"
#include "device/cuda/cuda.h"

/* The card's own conversion, which rounds as the kernels' text for others does. */
const char sthi_cuda_prelude[] = "static __device__ unsigned sthi_f16(float x) { unsigned short h; "
                                 "asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(h) : \"f\"(x)); return h; }\n";

const char *const sthi_cuda_packages[] = {"/nvidia/", "/torch/lib/", NULL};

enum { COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 }; /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_.. */

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER}; /* guards what follows */
static gpu_compiler to_code, to_text; /* machine code; PTX, which the driver finishes */

static const gpu_symbol symbols[] = {
    {"nvrtcCreateProgram", &to_code.create},
    {"nvrtcCompileProgram", &to_code.compile},
    {"nvrtcDestroyProgram", &to_code.destroy},
    {"nvrtcGetCUBINSize", &to_code.code_size},
    {"nvrtcGetCUBIN", &to_code.code},
    {"nvrtcGetPTXSize", &to_text.code_size},
    {"nvrtcGetPTX", &to_text.code},
    {"nvrtcGetProgramLogSize", &to_code.log_size},
    {"nvrtcGetProgramLog", &to_code.log},
};

static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "libnvrtc.so.11.2", NULL};
static const char *const below[] = {"/nvidia/cu13/lib", "/nvidia/cuda_nvrtc/lib", "/torch/lib", NULL};
static const gpu_library library = {
    .what = "the CUDA run-time compiler",
    .domain = "nvrtc",
    .variable = "STAGEHAND_NVRTC_LIBRARY",
    .names = names,
    .loaded_as = "/libnvrtc.so",
    .packages = sthi_cuda_packages,
    .below = below,
    .advice = "install nvidia-cuda-nvrtc",
    .too_old = "it is older than CUDA 11.1",
    .symbols = symbols,
    .symbol_count = sizeof symbols / sizeof *symbols,
};

static sth_status compile_for(const gpu_compiler *c, const char *source, const char *architecture, char **out) {
    char option[48];
    snprintf(option, sizeof option, "--gpu-architecture=%s", architecture);
    const char *const options[] = {option, "--std=c++14", "--fmad=false"};
    return sthi_gpu_compile_with(c, &library, source, 3, options, out);
}

/* For the card itself, else, where the compiler is older than the card, as PTX of an older one. */
static sth_status compile_locked(const char *source, int capability, char **out) {
    char architecture[16];
    STHI_TRY(sthi_gpu_library_load(&library));
    gpu_compiler text = to_code;
    text.code_size = to_text.code_size;
    text.code = to_text.code;
    snprintf(architecture, sizeof architecture, "sm_%d", capability);
    sth_status rc = compile_for(&to_code, source, architecture, out);
    if (rc == STH_OK) return rc;
    return capability > 80 ? compile_for(&text, source, "compute_80", out) : rc;
}

sth_status sthi_cuda_compile(const gpu_device *d, const char *source, char **out) {
    int major = 0, minor = 0;
    gpu_result r = d->driver->device_attribute(&major, COMPUTE_MAJOR, d->handle);
    if (r == GPU_OK) r = d->driver->device_attribute(&minor, COMPUTE_MINOR, d->handle);
    if (r != GPU_OK) return sthi_gpu_fail(d->vendor, r, d->name, "asking for the compute capability", NULL);
    sthi_lock(&lock);
    sth_status rc = compile_locked(source, 10 * major + minor, out);
    sthi_unlock(&lock);
    return rc;
}
