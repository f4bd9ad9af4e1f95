/* A stand-in for the CUDA run-time compiler: it takes the source that it is given, if it is for the stand-in's card, and
 * makes an image of it that the stand-in for the driver knows. FAKE_NVRTC_REFUSES: it does not. */
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
typedef struct program {
    int compiled;
} *program;

EXPORT int nvrtcCreateProgram(program *out, const char *source, const char *name, int headers, const char *const *texts,
                              const char *const *names) {
    if (!strstr(source, "sthi_expand_int8_bf16") || !strstr(source, "sthi_f16") || !name || headers || texts || names) return 3;
    *out = calloc(1, sizeof **out);
    return *out ? 0 : 1;
}

EXPORT int nvrtcCompileProgram(program p, int count, const char *const *options) {
    if (count < 1 || strcmp(options[0], "--gpu-architecture=sm_90") || getenv("FAKE_NVRTC_REFUSES")) return 6;
    p->compiled = 1;
    return 0;
}

EXPORT int nvrtcDestroyProgram(program *p) {
    free(*p);
    *p = NULL;
    return 0;
}

EXPORT int nvrtcGetCUBINSize(program p, size_t *out) {
    *out = sizeof "fake image";
    return p->compiled ? 0 : 2;
}

EXPORT int nvrtcGetCUBIN(program p, char *out) {
    memcpy(out, "fake image", sizeof "fake image");
    return p->compiled ? 0 : 2;
}

EXPORT int nvrtcGetPTXSize(program p, size_t *out) { return nvrtcGetCUBINSize(p, out); }
EXPORT int nvrtcGetPTX(program p, char *out) { return nvrtcGetCUBIN(p, out); }

EXPORT int nvrtcGetProgramLogSize(program p, size_t *out) {
    (void)p;
    *out = sizeof "on purpose";
    return 0;
}

EXPORT int nvrtcGetProgramLog(program p, char *out) {
    (void)p;
    memcpy(out, "on purpose", sizeof "on purpose");
    return 0;
}
