/* Text that grows. Where memory is out it stays as it is, and says so at the end. */
#ifndef STHI_BASE_TEXT_H
#define STHI_BASE_TEXT_H
#include <stdbool.h>
#include <stddef.h>

typedef struct sthi_text {
    char *bytes; /* ends with 0; NULL at first */
    size_t count, capacity;
    bool failed;
} sthi_text;

__attribute__((format(printf, 2, 3))) void sthi_text_put(sthi_text *text, const char *format, ...);
/* Takes the bytes, which sthi_free gives back; NULL where memory was out, and then nothing is left. */
char *sthi_text_take(sthi_text *text);
/* Text for HTML and SVG: what has a meaning there is written otherwise. */
void sthi_text_escaped(sthi_text *text, const char *plain);
#endif
