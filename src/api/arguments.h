/* What the exported functions say of their arguments. */
#ifndef STHI_API_ARGUMENTS_H
#define STHI_API_ARGUMENTS_H

#include <stddef.h>

#include "base/error.h"

static inline sth_status null_argument(const char *what) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, what, "%s is NULL", what);
}

#endif
