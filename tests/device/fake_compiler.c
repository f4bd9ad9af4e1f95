/* A stand-in for the run-time compilers, CUDA's and with FAKE_HIPRTC HIP's: it takes the source that it is given, if
 * the options are for the stand-in's card, and makes an image of it that the stand-in for the driver knows.
 * FAKE_COMPILER_REFUSES: it does not. */
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#ifdef FAKE_HIPRTC
#define NAME(name) hiprtc##name
static int options_are_right(int count, const char *const *options) {
    return count == 2 && !strcmp(options[1], "-ffp-contract=off");
}
static const char forbidden[] = "asm(";
#else
#define NAME(name) nvrtc##name
static int options_are_right(int count, const char *const *options) {
    return count >= 1 && !strcmp(options[0], "--gpu-architecture=sm_90");
}
static const char forbidden[] = "__AMDGCN__";
#endif

typedef struct program {
    int compiled;
} *program;

EXPORT int NAME(CreateProgram)(program *out, const char *source, const char *name, int headers,
                               const char *const *texts, const char *const *names) {
    if (!strstr(source, "sthi_expand_four_bits(sthi_launch l)") || !strstr(source, "} sthi_launch;") ||
        !strstr(source, "unsigned sthi_f16(float x)") || strstr(source, forbidden) || !name || headers || texts ||
        names)
        return 3;
    *out = calloc(1, sizeof **out);
    return *out ? 0 : 1;
}

EXPORT int NAME(CompileProgram)(program p, int count, const char *const *options) {
    if (!options_are_right(count, options) || getenv("FAKE_COMPILER_REFUSES")) return 6;
    p->compiled = 1;
    return 0;
}

EXPORT int NAME(DestroyProgram)(program *p) {
    free(*p);
    *p = NULL;
    return 0;
}

static int size(program p, size_t *out) {
    *out = sizeof "fake image";
    return p->compiled ? 0 : 2;
}

static int image(program p, char *out) {
    memcpy(out, "fake image", sizeof "fake image");
    return p->compiled ? 0 : 2;
}

#ifdef FAKE_HIPRTC
EXPORT int hiprtcGetCodeSize(program p, size_t *out) { return size(p, out); }
EXPORT int hiprtcGetCode(program p, char *out) { return image(p, out); }
#else
EXPORT int nvrtcGetCUBINSize(program p, size_t *out) { return size(p, out); }
EXPORT int nvrtcGetCUBIN(program p, char *out) { return image(p, out); }
EXPORT int nvrtcGetPTXSize(program p, size_t *out) { return size(p, out); }
EXPORT int nvrtcGetPTX(program p, char *out) { return image(p, out); }
#endif

EXPORT int NAME(GetProgramLogSize)(program p, size_t *out) {
    (void)p;
    *out = sizeof "on purpose";
    return 0;
}

EXPORT int NAME(GetProgramLog)(program p, char *out) {
    (void)p;
    memcpy(out, "on purpose", sizeof "on purpose");
    return 0;
}
