/* What the files of the stand-in know of each other. All of it is called with the lock held. */
#ifndef TESTS_FAKE_PARTS_H
#define TESTS_FAKE_PARTS_H
#include <pthread.h>

#include "fake_driver.h"

enum { FAKE_SLOTS = 64, FAKE_TABLE = 1024 };

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_done; /* work was done */

/* Of a registration above the limit: OUT_OF_MEMORY, which with FAKE_DRIVER_STICKY the next call that the card has a
 * part in returns once more, as under WSL2. */
fake_code fake_refusal(void);

void fake_complain(const char *text, ...) __attribute__((format(printf, 1, 2)));

/* ---- tables of things by address */
typedef struct span {
    char *p;
    size_t bytes;
    uint64_t bytes_at; /* device memory: where its bytes are, whatever addresses they have */
    int fd;            /* handle: the memory */
    bool readable;     /* mapping: access was set */
} span;

typedef struct table {
    span items[FAKE_TABLE];
    size_t count;
} table;
span *fake_find(table *t, const void *p);
bool fake_add(table *t, span s);
void fake_drop(table *t, span *s);

/* ---- fake_memory.c */
void fake_memory_init(size_t capacity, size_t pin_limit);
bool fake_is_live(const char *p, size_t bytes);   /* all of it is device memory that is there */
bool fake_is_pinned(const char *p, size_t bytes); /* all of it is in one registration */
/* Calls `visit` for each run of bytes of device memory that [p, p+bytes) is, wherever it is mapped. */
void fake_each_run(const char *p, size_t bytes, void (*visit)(uint64_t at, uint64_t n, void *), void *context);
long fake_memory_live(void);
void fake_memory_reset(void);

/* ---- fake_order.c */
typedef struct fake_clock {
    uint64_t at[FAKE_SLOTS]; /* how far each stream is known to have come */
} fake_clock;
void fake_clock_join(fake_clock *, const fake_clock *);

typedef struct fake_touch {
    const char *p;
    size_t bytes;
    bool device, writes;
} fake_touch;
/* The host knows that all work up to `clock` is done. */
void fake_order_seen(const fake_clock *clock);
const fake_clock *fake_order_host(void);
/* Work number `index` of stream `slot`, behind `clock`, is to touch these bytes. */
void fake_order_enqueue(unsigned slot, uint64_t index, const fake_clock *clock, const fake_touch *, int count,
                        const char *what);
/* Complains where work that is not known to be done touches the bytes, which go; forgets them. */
void fake_order_gone(fake_touch, bool waited, const char *what);
void fake_order_reset(void);

/* ---- fake_stream.c */
typedef struct fake_work {
    void (*run)(void *arguments); /* NULL: a copy from touch[1] to touch[0] */
    uint64_t arguments[24];
    fake_touch touch[8];
    int touches;
    const char *what;
} fake_work;
fake_code fake_enqueue(void *stream, const fake_work *);
void fake_schedule(uint64_t seed, unsigned late_us);
void fake_wait_for_all(void);
void fake_kill(void); /* nothing that is pending runs any more */
long fake_streams_live(void);
void fake_streams_reset(void);

/* ---- fake_kernels.c */
long fake_modules_live(void);
void fake_modules_reset(void);
#endif
