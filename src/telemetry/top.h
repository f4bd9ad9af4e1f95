/* Pages of the live view: what processes tell each other by files that they map (docs/top.md).
 *
 *     sthi_top_open -> sthi_top_store, each step -> sthi_top_close          in the process
 *     sthi_top_folder -> sthi_top_read_all                                  in the reader */
#ifndef STHI_TELEMETRY_TOP_H
#define STHI_TELEMETRY_TOP_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/top.h"

#define STHI_TOP_MAGIC UINT64_C(0x706f74646e616873) /* "shandtop" */
#define STHI_TOP_SUFFIX ".page"
enum {
    STHI_TOP_VERSION = 1,  /* of all that follows, and of sth_top_figures */
    STHI_TOP_PLACES = 31,
    STHI_TOP_PLACE_BYTES = 512,
    STHI_TOP_PAGE_BYTES = (STHI_TOP_PLACES + 1) * STHI_TOP_PLACE_BYTES,
    STHI_TOP_WORDS = STHI_TOP_PLACE_BYTES / 8 - 1
};

typedef struct sthi_top_header {
    uint64_t magic;
    uint32_t version, pid;
    uint32_t places, place_bytes, figures_bytes, unused;
    char program[96];
} sthi_top_header;

/* A place's words, as they lie behind its sequence number. */
typedef struct sthi_top_words {
    uint64_t taken;        /* 1, or 0 */
    uint64_t stored_ns;    /* on the monotonic clock */
    sth_top_figures figures;
} sthi_top_words;

typedef struct sthi_top_place {
    _Atomic uint64_t sequence; /* odd while words are stored */
    _Atomic uint64_t words[STHI_TOP_WORDS];
} sthi_top_place;

typedef struct sthi_top_page {
    sthi_top_header header;
    char unused[STHI_TOP_PLACE_BYTES - sizeof(sthi_top_header)];
    sthi_top_place places[STHI_TOP_PLACES];
} sthi_top_page;

_Static_assert(sizeof(sthi_top_page) == STHI_TOP_PAGE_BYTES, "a page has no holes");
_Static_assert(sizeof(sthi_top_words) <= sizeof(((sthi_top_place *)0)->words), "figures fit in a place");
_Static_assert(offsetof(sthi_top_words, figures.name) % 8 == 0, "texts begin with a word of their own");

/* top_figures.c: bytes from a page that nobody vouches for. Pure. */

/* Whether the header is one of this version, of this process. */
bool sthi_top_header_is_sound(const sthi_top_header *header, int32_t pid);
/* The figures of a taken place; false where they are none. pid and place are the caller's to set. */
bool sthi_top_take(const sthi_top_header *header, const sthi_top_words *words, int64_t now_ns,
                   sth_top_runtime *out);
/* Ends a text with 0; what is no UTF-8 or no printing character becomes '?'. */
void sthi_top_clean(char *text, size_t room);

/* top_folder.c */

enum { STHI_TOP_FOLDERS_TO_WRITE = 2, STHI_TOP_FOLDERS = 3, STHI_TOP_PATH = 512 };
/* The i-th folder of pages, in the order in which a process tries them; false where there is none. */
bool sthi_top_folder(int i, char out[STHI_TOP_PATH]);
/* A descriptor of the folder; -1 where it is missing, another user's, or open to others.
 * Blocks: for the file system. */
int sthi_top_enter(const char *folder, bool make);

/* top_page.c: the page of this process. Threads: any. */

/* A place for a runtime; NULL where there is none to have. Blocks: for making the file. */
sthi_top_place *sthi_top_open(const char *name, const char *device);
/* Stores numbers and flags; name and device stay. One thread at a time for each place. Blocks: no. */
void sthi_top_store(sthi_top_place *place, const sth_top_figures *figures);
/* NULL is fine. Blocks: for removing the file. */
void sthi_top_close(sthi_top_place *place);

/* top_read.c. pid: 0 for all. */
sth_status sthi_top_read_all(int32_t pid, sth_top_list *out);
#endif
