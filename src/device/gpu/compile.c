/* Has the kernels compiled, when they are first needed, by the vendor's run-time compiler for the card at hand, and
 * loads them. Without a compiler there are no kernels, and the runtime expands on the host.
 * Lock: the device's `compiling`, held by the caller; compiling takes some 100 ms. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/gpu/gpu.h"

#define STHI_LAUNCH(...) static const char launch[] = #__VA_ARGS__;
#include "device/gpu/launch.h"
#define STHI_KERNELS(...) static const char kernels[] = #__VA_ARGS__;
#define STHI_KERNELS_HALF(...)
#include "device/gpu/kernels.h"

enum { COMPILED = 0 };

static sth_status fail_compile(const gpu_compiler *c, const gpu_library *l, gpu_program p, int code) {
    size_t bytes = 0;
    char *log = c->log_size(p, &bytes) == COMPILED && bytes ? sthi_zalloc(bytes + 1, 1) : NULL;
    if (log) (void)c->log(p, log);
    sth_status rc = sthi_fail(STH_BACKEND_UNAVAILABLE, l->domain, code, "kernels",
                              "%s refuses the kernels (%d): %.400s", l->what, code, log ? log : "no log");
    sthi_free(log);
    return rc;
}

static sth_status take(const gpu_compiler *c, const gpu_library *l, gpu_program p, char **out) {
    size_t bytes = 0;
    int code = c->code_size(p, &bytes);
    if (code != COMPILED || !bytes) return fail_compile(c, l, p, code);
    char *image = sthi_zalloc(bytes, 1);
    if (!image) return sthi_no_memory_in(l->domain, "kernels", "kernels");
    code = c->code(p, image);
    if (code == COMPILED) {
        *out = image;
        return STH_OK;
    }
    sthi_free(image);
    return fail_compile(c, l, p, code);
}

sth_status sthi_gpu_compile_with(const gpu_compiler *c, const gpu_library *l, const char *source, int option_count,
                                 const char *const *options, char **out) {
    gpu_program p = NULL;
    int code = c->create(&p, source, "stagehand.cu", 0, NULL, NULL);
    if (code != COMPILED)
        return sthi_fail(STH_BACKEND_UNAVAILABLE, l->domain, code, "kernels", "%s does not start (%d)", l->what, code);
    code = c->compile(p, option_count, options);
    sth_status rc = code == COMPILED ? take(c, l, p, out) : fail_compile(c, l, p, code);
    (void)c->destroy(&p);
    return rc;
}

static sth_status load_module(gpu_device *d, const char *image) {
#define NAME(name, function) #function,
    static const char *const names[GPU_KERNELS] = {GPU_KERNEL_LIST(NAME)};
#undef NAME
    gpu_result r = d->module ? GPU_OK : d->driver->module_load(&d->module, image);
    if (r != GPU_OK) return sthi_gpu_fail(d->vendor, r, d->name, "loading the kernels", NULL);
    for (int k = 0; k < GPU_KERNELS; k++) {
        r = d->driver->module_function(&d->kernels[k], d->module, names[k]);
        if (r != GPU_OK) return sthi_gpu_fail(d->vendor, r, names[k], "finding a kernel", NULL);
    }
    return STH_OK;
}

sth_status sthi_gpu_compile(gpu_device *d) {
    size_t bytes = strlen(d->vendor->prelude) + sizeof launch + sizeof kernels;
    char *source = sthi_alloc(bytes), *image = NULL;
    if (!source) return sthi_no_memory_in(d->vendor->name, "kernels", "kernels");
    snprintf(source, bytes, "%s%s%s", d->vendor->prelude, launch, kernels);
    sth_status rc = d->vendor->compile(d, source, &image);
    if (rc == STH_OK) rc = load_module(d, image);
    sthi_free(image);
    sthi_free(source);
    return rc;
}
