/* Host memory for the library's own records. Nothing outside base/ calls malloc.
 * Every function can be made to fail through base/fault.h. */
#ifndef STHI_BASE_MEMORY_H
#define STHI_BASE_MEMORY_H
#include <stddef.h>
#include <stdint.h>

void *sthi_alloc(size_t bytes);               /* uninitialised; NULL when memory is out */
void *sthi_zalloc(size_t count, size_t each); /* zeroed, overflow-checked; NULL when memory is out */
void *sthi_realloc(void *old, size_t count, size_t each); /* overflow-checked; NULL keeps old alive */
char *sthi_strdup(const char *text);
void sthi_free(void *p);
long sthi_alloc_live(void); /* blocks allocated and not freed, for leak checks in tests */

/* Whole pages straight from the system, zeroed, for arenas and slabs. */
void *sthi_pages_map(size_t bytes, int huge);
void sthi_pages_unmap(void *p, size_t bytes);
void sthi_pages_discard(void *p, size_t bytes); /* the memory goes, the address space stays */
size_t sthi_page_size(void);

/* Bytes that can be taken without swapping, as /proc/meminfo and the limit of the control group (version 2) say it;
 * UINT64_MAX where that cannot be read. */
uint64_t sthi_memory_available(void);
void sthi_memory_assume(uint64_t bytes); /* for tests: the answer from now on; 0: what is there, again */

/* The same `bytes` (a multiple of the page size) mapped twice in a row: a write at p[i] is seen at
 * p[i + bytes]. Zeroed; NULL when memory or address space is out. */
void *sthi_mirror_map(size_t bytes);
void sthi_mirror_unmap(void *p, size_t bytes); /* `bytes` as given to sthi_mirror_map */
#endif
