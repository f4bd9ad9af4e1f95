/* Threads that were refused room and ask again take turns, in the order in which they came: the first keeps what it
 * has brought to the device, all others give theirs back until they are first. So two that come at once do not wait
 * for each other's memory. Pure: no lock, no clock; runtime/share/turns.c is the shell.
 *
 * Invariant: a thread is in the list once. */
#ifndef STHI_CORE_TURNS_H
#define STHI_CORE_TURNS_H
#include <stdbool.h>
#include <stdint.h>

typedef struct sthi_turn {
    struct sthi_turn *next;
    uint64_t thread;
    uint32_t depth;   /* times that the thread has begun and not ended */
    int64_t until_ns; /* when it gives up, on the clock of whoever began it */
} sthi_turn;

typedef struct sthi_turns {
    sthi_turn *first;
} sthi_turns;

sthi_turn *sthi_turns_find(const sthi_turns *turns, uint64_t thread); /* NULL: it has none */
/* Behind all others; the thread has none yet. */
void sthi_turns_add(sthi_turns *turns, sthi_turn *turn, uint64_t thread, int64_t until_ns);
bool sthi_turns_is_first(const sthi_turns *turns, uint64_t thread);
/* The turn that has ended with this end, for its owner to free; NULL: others of the thread go on, or there is none. */
sthi_turn *sthi_turns_end(sthi_turns *turns, uint64_t thread);
#endif
