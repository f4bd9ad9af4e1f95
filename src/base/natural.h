/* Text with numbers in it, in the order that people expect. */
#ifndef STHI_BASE_NATURAL_H
#define STHI_BASE_NATURAL_H
/* Negative, 0 or positive: numbers compare by their value, a part of a name ends before all other characters. */
int sthi_compare_natural(const char *a, const char *b);
#endif
