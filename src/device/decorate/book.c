/* Sorted notes with binary search. */
#include "device/decorate/book.h"

#include <string.h>

#include "base/memory.h"

/* Index of the first note whose key is above `key`; the one before it may hold it. */
static size_t above(const sthi_book *b, uint64_t key) {
    size_t lo = 0, hi = b->count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (b->notes[mid].key <= key) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

bool sthi_book_add(sthi_book *b, sthi_note note) {
    if (b->count == b->capacity) {
        size_t capacity = b->capacity ? 2 * b->capacity : 16;
        sthi_note *notes = sthi_realloc(b->notes, capacity, sizeof *notes);
        if (!notes) return false;
        b->notes = notes;
        b->capacity = capacity;
    }
    size_t i = above(b, note.key);
    memmove(&b->notes[i + 1], &b->notes[i], (b->count - i) * sizeof note);
    b->notes[i] = note;
    b->count++;
    return true;
}

sthi_note *sthi_book_find(const sthi_book *b, uint64_t key) {
    size_t i = above(b, key);
    return i && b->notes[i - 1].key == key ? &b->notes[i - 1] : NULL;
}

sthi_note *sthi_book_holding(const sthi_book *b, uint64_t key) {
    size_t i = above(b, key);
    return i && key - b->notes[i - 1].key < b->notes[i - 1].span ? &b->notes[i - 1] : NULL;
}

bool sthi_book_meets(const sthi_book *b, uint64_t key, uint64_t span) {
    if (sthi_book_find(b, key) || sthi_book_holding(b, key)) return true;
    size_t i = above(b, key);
    return i < b->count && b->notes[i].key - key < span;
}

void sthi_book_remove(sthi_book *b, const sthi_note *note) {
    size_t i = (size_t)(note - b->notes);
    b->count--;
    memmove(&b->notes[i], &b->notes[i + 1], (b->count - i) * sizeof *note);
}

void sthi_book_fini(sthi_book *b) {
    sthi_free(b->notes);
    *b = (sthi_book){0};
}
