/* HIP's run-time compiler (HIPRTC), a library of ROCm and of PyTorch's wheels for it. Without an architecture among the
 * options it compiles for the current device. */
#include "base/error.h"
#include "device/hip/hip.h"

#define STHI_KERNELS(...)
#define STHI_KERNELS_HALF(...) const char sthi_hip_prelude[] = #__VA_ARGS__ "\n";
#include "device/gpu/kernels.h"

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER}; /* guards what follows */
static gpu_compiler compiler;

static const gpu_symbol symbols[] = {
    {"hiprtcCreateProgram", &compiler.create},   {"hiprtcCompileProgram", &compiler.compile},
    {"hiprtcDestroyProgram", &compiler.destroy}, {"hiprtcGetCodeSize", &compiler.code_size},
    {"hiprtcGetCode", &compiler.code},           {"hiprtcGetProgramLogSize", &compiler.log_size},
    {"hiprtcGetProgramLog", &compiler.log},
};

static const char *const names[] = {"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so", NULL};
static const char *const packages[] = {"/libamdhip64.so", NULL}; /* it lies beside it */
static const char *const below[] = {"", NULL};
static const gpu_library library = {
    .what = "the HIP run-time compiler",
    .domain = "hiprtc",
    .variable = "STAGEHAND_HIPRTC_LIBRARY",
    .names = names,
    .loaded_as = "/libhiprtc.so",
    .packages = packages,
    .below = below,
    .advice = "install ROCm's hiprtc",
    .too_old = "Stagehand needs ROCm 6 or later",
    .symbols = symbols,
    .symbol_count = sizeof symbols / sizeof *symbols,
};

sth_status sthi_hip_compile(const gpu_device *d, const char *source, char **out) {
    /* As in the text's comment: nothing is contracted. */
    static const char *const options[] = {"-std=c++14", "-ffp-contract=off"};
    (void)d;
    sthi_lock(&lock);
    sth_status rc = sthi_gpu_library_load(&library);
    if (rc == STH_OK) rc = sthi_gpu_compile_with(&compiler, &library, source, 2, options, out);
    sthi_unlock(&lock);
    return rc;
}
