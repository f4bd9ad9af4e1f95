/* Libraries of the CUDA toolkit beside the driver, found at run time. */
#ifndef STHI_CUDA_LIBRARY_H
#define STHI_CUDA_LIBRARY_H
#include <stddef.h>

#include "stagehand/status.h"

typedef struct cuda_library {
    const char *what;           /* "CUDA run-time compiler (libnvrtc)" */
    const char *domain;         /* of its errors */
    const char *variable;       /* with its absolute path */
    const char *package;        /* that brings it */
    const char *oldest;         /* version that has all we need */
    const char *stem;           /* by which a loaded one is known, such as "/libnvrtc.so" */
    const char *const *names;   /* file names, best first; NULL ends */
    const char *const *below;   /* folders of packages, below the one that holds "nvidia" or "torch"; NULL ends */
} cuda_library;

typedef struct cuda_symbol {
    const char *symbol;
    size_t offset; /* of the function in the table */
} cuda_symbol;

/* Loads it, for ever, and fills a table of functions. Returns BACKEND_UNAVAILABLE with the reason. */
sth_status sthi_cuda_library(const cuda_library *what, const cuda_symbol *symbols, size_t count, void *out_table);
#endif
