/* Assertions about our own state. Debug builds (-Dbuildtype=debug) and those under a sanitizer
 * check them; all others do not evaluate them, so that an expression must have no effect. One
 * that is false is a bug of the library, never a failure of the world: those are values. */
#ifndef STHI_BASE_INVARIANT_H
#define STHI_BASE_INVARIANT_H
#ifdef STHI_INVARIANTS
#include <stdio.h>
#include <stdlib.h>

static inline void sthi_invariant_broken(const char *file, int line, const char *expression) {
    fprintf(stderr, "%s:%d: stagehand's invariant does not hold: %s\n", file, line, expression);
    abort();
}

#define STHI_INVARIANT(expression) \
    ((expression) ? (void)0 : sthi_invariant_broken(__FILE__, __LINE__, #expression))
#else
#define STHI_INVARIANT(expression) ((void)sizeof(!(expression)))
#endif
#endif
