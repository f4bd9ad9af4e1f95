/* A book of what is alive: notes sorted by key (an address or a handle), whose spans do not meet. No locks. */
#ifndef STHI_BOOK_H
#define STHI_BOOK_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct sthi_note {
    uint64_t key;    /* the address, the handle */
    uint64_t bytes;  /* as asked for; 0: a handle */
    uint64_t span;   /* addresses that it takes; a ring takes twice its bytes. 0: a handle */
    uint64_t number; /* of the call that made it, or of the object */
    bool ring, timing, recorded;
} sthi_note;

typedef struct sthi_book {
    sthi_note *notes;
    size_t count, capacity;
} sthi_book;

/* False when host memory is out. Nothing that meets the note is in the book. */
bool sthi_book_add(sthi_book *b, sthi_note note);
sthi_note *sthi_book_find(const sthi_book *b, uint64_t key);    /* that begins there; NULL: none */
sthi_note *sthi_book_holding(const sthi_book *b, uint64_t key); /* whose span holds it; NULL: none */
bool sthi_book_meets(const sthi_book *b, uint64_t key, uint64_t span);
void sthi_book_remove(sthi_book *b, const sthi_note *note);
void sthi_book_fini(sthi_book *b);
#endif
