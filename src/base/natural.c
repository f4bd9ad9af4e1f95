/* Natural order: block 10 follows block 9. Pure. */
#include "base/natural.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Length of the run of digits at `text`, leading zeros left out. */
static size_t number_length(const char **text) {
    while (**text == '0' && is_digit((*text)[1])) (*text)++;
    size_t n = 0;
    while (is_digit((*text)[n])) n++;
    return n;
}

/* A part of a name ends before all other characters: a.b, a.c, a-b. */
static int rank_of(char c) { return c == '.' ? 1 : (unsigned char)c + (c != 0); }

int sthi_compare_natural(const char *a, const char *b) {
    const char *whole_a = a, *whole_b = b;
    while (*a && *b) {
        if (is_digit(*a) && is_digit(*b)) {
            size_t la = number_length(&a), lb = number_length(&b);
            if (la != lb) return la < lb ? -1 : 1;
            int order = strncmp(a, b, la);
            if (order) return order;
            a += la, b += lb;
        } else {
            if (*a != *b) break;
            a++, b++;
        }
    }
    int order = rank_of(*a) - rank_of(*b);
    return order ? order : strcmp(whole_a, whole_b);
}
