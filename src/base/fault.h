/* Fault points: places where an effect can be made to fail on purpose. Off unless armed; a check costs
 * one relaxed load. Tests arm "the n-th call of this kind fails, once or for ever". */
#ifndef STHI_BASE_FAULT_H
#define STHI_BASE_FAULT_H
#include <stdbool.h>
#include <stdint.h>

#define STHI_FAULT_LIST(X) \
    X(ALLOC, "alloc")      \
    X(PIN, "pin")          \
    X(READ, "read")        \
    X(SHORT_READ, "short_read") \
    X(DIRECT, "direct")    \
    X(URING, "uring")      \
    X(WRITE, "write")      \
    X(THREAD, "thread")    \
    X(DEVICE_ALLOC, "device_alloc") \
    X(DEVICE_CALL, "device_call") \
    X(DEVICE_WAIT, "device_wait") /* only calls that ask whether work has ended */

typedef enum sthi_fault_kind {
#define STHI_FAULT_ENUM(name, text) STHI_FAULT_##name,
    STHI_FAULT_LIST(STHI_FAULT_ENUM)
#undef STHI_FAULT_ENUM
        STHI_FAULT_KINDS
} sthi_fault_kind;

/* True when this call must fail. */
bool sthi_fault_hit(sthi_fault_kind kind);
/* Fails the n-th hit from now (n = 1 is the next one), and every later one too if `forever`. */
void sthi_fault_arm(sthi_fault_kind kind, uint64_t n, bool forever);
void sthi_fault_disarm_all(void);
/* Hits seen since the kind was armed. */
uint64_t sthi_fault_seen(sthi_fault_kind kind);
#endif
