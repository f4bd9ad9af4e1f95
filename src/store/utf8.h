/* Text from files. */
#ifndef STHI_STORE_UTF8_H
#define STHI_STORE_UTF8_H
#include <stdbool.h>
#include <stddef.h>

/* True for well-formed UTF-8 without a 0 in it: no overlong forms, no surrogates. */
bool sthi_utf8_is_text(const char *text, size_t bytes);
#endif
