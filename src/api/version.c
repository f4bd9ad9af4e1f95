/* Exports the version that the library was built as. */
#include "stagehand/stagehand.h"

#define TEXT_OF(x) #x
#define DOTTED(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

const char *sth_version(void) { return DOTTED(STH_VERSION_MAJOR, STH_VERSION_MINOR, STH_VERSION_PATCH); }
