/* An io_uring for reads, by raw system calls: what it needs is in the kernel's headers alone. One thread uses
 * a ring. */
#ifndef STHI_STORE_RING_H
#define STHI_STORE_RING_H
#include <stdbool.h>
#include <stdint.h>

typedef struct sthi_ring sthi_ring;

/* NULL and *out_errno where the kernel gives none: ENOSYS, EPERM (seccomp, sysctl), ENOMEM. */
sthi_ring *sthi_ring_open(uint32_t entries, int *out_errno);
/* Nothing may be under way. NULL is fine. */
void sthi_ring_close(sthi_ring *ring);

/* Queues a read; false when `entries` are queued or under way. It begins with the next sthi_ring_wait. */
bool sthi_ring_read(sthi_ring *ring, int fd, uint64_t offset, void *to, uint32_t bytes, uint64_t tag);
/* Starts what is queued and waits until a read has ended: its tag, and its bytes or -errno. Only while reads are
 * queued or under way. False: no read is under way any more, and those that were not handed out have never begun. */
bool sthi_ring_wait(sthi_ring *ring, uint64_t *out_tag, int32_t *out_result);
#endif
