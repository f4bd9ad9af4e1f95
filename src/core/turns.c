/* Turns of threads that ask for room. See turns.h. */
#include "core/turns.h"

#include <stddef.h>

sthi_turn *sthi_turns_find(const sthi_turns *turns, uint64_t thread) {
    sthi_turn *t = turns->first;
    while (t && t->thread != thread) t = t->next;
    return t;
}

void sthi_turns_add(sthi_turns *turns, sthi_turn *turn, uint64_t thread, int64_t until_ns) {
    sthi_turn **last = &turns->first;
    while (*last) last = &(*last)->next;
    *turn = (sthi_turn){.thread = thread, .depth = 1, .until_ns = until_ns};
    *last = turn;
}

bool sthi_turns_is_first(const sthi_turns *turns, uint64_t thread) {
    return turns->first && turns->first->thread == thread;
}

sthi_turn *sthi_turns_end(sthi_turns *turns, uint64_t thread) {
    sthi_turn **at = &turns->first;
    while (*at && (*at)->thread != thread) at = &(*at)->next;
    sthi_turn *turn = *at;
    if (!turn || --turn->depth) return NULL;
    *at = turn->next;
    return turn;
}
