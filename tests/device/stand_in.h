/* The stand-in for a back end's driver, where the environment names one. */
#ifndef TESTS_STAND_IN_H
#define TESTS_STAND_IN_H
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/fake_driver.h"

/* NULL where the library that is named for "cuda" is none, or none is named. */
static inline const fake_controls *stand_in_of(const char *backend) {
    char variable[64];
    snprintf(variable, sizeof variable, "STAGEHAND_%s_LIBRARY", backend[0] == 'c' ? "CUDA" : "HIP");
    const char *path = getenv(variable);
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL; /* stays, as the back end's own does */
    return library ? dlsym(library, FAKE_CONTROLS) : NULL;
}
#endif
