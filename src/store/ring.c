/* The two queues that the kernel shares with us, one for submissions and one for completions. We write the tail
 * of the first and the head of the second, the kernel the other two: loads of the kernel's ends acquire, stores
 * of ours release. Invariant: `under_way` is what was taken by the kernel and has not been handed out; a read's
 * memory belongs to the kernel until then. No locks: one thread. No kernel thread, no polling. */
#define _GNU_SOURCE
#include "store/ring.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"

#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>

struct sthi_ring {
    int fd;
    uint32_t entries, queued, under_way;
    void *map, *sqe_map;
    size_t map_bytes, sqe_bytes;
    uint32_t *sq_head, *sq_tail, *sq_array, sq_mask;
    uint32_t *cq_head, *cq_tail, cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
};

static uint32_t load(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void store(uint32_t *p, uint32_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Both queues lie in one mapping since Linux 5.4, whose reads we use (5.6). */
static bool map_queues(sthi_ring *r, const struct io_uring_params *p) {
    r->map_bytes = larger(p->sq_off.array + p->sq_entries * sizeof(uint32_t),
                          p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe));
    r->sqe_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    int prot = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    r->map = mmap(NULL, r->map_bytes, prot, flags, r->fd, IORING_OFF_SQ_RING);
    r->sqe_map = mmap(NULL, r->sqe_bytes, prot, flags, r->fd, IORING_OFF_SQES);
    if (r->map == MAP_FAILED || r->sqe_map == MAP_FAILED) return false;
    char *at = r->map;
    r->sq_head = (uint32_t *)(at + p->sq_off.head);
    r->sq_tail = (uint32_t *)(at + p->sq_off.tail);
    r->sq_array = (uint32_t *)(at + p->sq_off.array);
    r->sq_mask = *(uint32_t *)(at + p->sq_off.ring_mask);
    r->cq_head = (uint32_t *)(at + p->cq_off.head);
    r->cq_tail = (uint32_t *)(at + p->cq_off.tail);
    r->cq_mask = *(uint32_t *)(at + p->cq_off.ring_mask);
    r->cqes = (struct io_uring_cqe *)(at + p->cq_off.cqes);
    r->sqes = r->sqe_map;
    return true;
}

static int setup(uint32_t entries, struct io_uring_params *p) {
    if (sthi_fault_hit(STHI_FAULT_URING)) {
        errno = EPERM;
        return -1;
    }
    int fd = (int)syscall(__NR_io_uring_setup, entries, p);
    if (fd >= 0 && !(p->features & IORING_FEAT_SINGLE_MMAP)) {
        close(fd);
        errno = ENOSYS;
        return -1;
    }
    return fd;
}

sthi_ring *sthi_ring_open(uint32_t entries, int *out_errno) {
    struct io_uring_params p = {0};
    sthi_ring *r = sthi_zalloc(1, sizeof *r);
    *out_errno = ENOMEM;
    if (!r) return NULL;
    r->map = r->sqe_map = MAP_FAILED;
    r->entries = entries;
    r->fd = setup(entries, &p);
    if (r->fd >= 0 && map_queues(r, &p)) return r;
    *out_errno = errno;
    sthi_ring_close(r);
    return NULL;
}

void sthi_ring_close(sthi_ring *r) {
    if (!r) return;
    if (r->map != MAP_FAILED) munmap(r->map, r->map_bytes);
    if (r->sqe_map != MAP_FAILED) munmap(r->sqe_map, r->sqe_bytes);
    if (r->fd >= 0) close(r->fd);
    sthi_free(r);
}

bool sthi_ring_read(sthi_ring *r, int fd, uint64_t offset, void *to, uint32_t bytes, uint64_t tag) {
    if (r->queued + r->under_way == r->entries) return false;
    uint32_t tail = *r->sq_tail, at = tail & r->sq_mask;
    struct io_uring_sqe *e = &r->sqes[at];
    memset(e, 0, sizeof *e);
    e->opcode = IORING_OP_READ;
    e->fd = fd;
    e->off = offset;
    e->addr = (uint64_t)(uintptr_t)to;
    e->len = bytes;
    e->user_data = tag;
    r->sq_array[at] = at;
    store(r->sq_tail, tail + 1);
    r->queued++;
    return true;
}

static bool completed(sthi_ring *r, uint64_t *out_tag, int32_t *out_result) {
    uint32_t head = *r->cq_head;
    if (head == load(r->cq_tail)) return false;
    const struct io_uring_cqe *e = &r->cqes[head & r->cq_mask];
    *out_tag = e->user_data;
    *out_result = e->res;
    store(r->cq_head, head + 1);
    r->under_way--;
    return true;
}

/* The kernel has taken nothing of what is queued, and will not. */
static void take_back(sthi_ring *r) {
    store(r->sq_tail, *r->sq_tail - r->queued);
    r->queued = 0;
}

bool sthi_ring_wait(sthi_ring *r, uint64_t *out_tag, int32_t *out_result) {
    for (;;) {
        if (!r->queued && completed(r, out_tag, out_result)) return true;
        if (!r->queued && !r->under_way) return false;
        unsigned wait_for = load(r->cq_tail) == *r->cq_head ? 1 : 0;
        long n = syscall(__NR_io_uring_enter, r->fd, r->queued, wait_for,
                         wait_for ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
        if (n > 0) {
            r->under_way += (uint32_t)n;
            r->queued -= (uint32_t)n;
        } else if (r->queued && !(n < 0 && errno == EINTR)) {
            take_back(r); /* refused, or no memory for requests */
        } else if (n < 0 && errno != EINTR) {
            sched_yield(); /* what is under way ends all the same, and its memory is the kernel's until then */
        }
    }
}

#else

sthi_ring *sthi_ring_open(uint32_t entries, int *out_errno) {
    (void)entries;
    *out_errno = ENOSYS;
    return NULL;
}
void sthi_ring_close(sthi_ring *r) { (void)r; }
bool sthi_ring_read(sthi_ring *r, int fd, uint64_t offset, void *to, uint32_t bytes, uint64_t tag) {
    (void)r, (void)fd, (void)offset, (void)to, (void)bytes, (void)tag;
    return false;
}
bool sthi_ring_wait(sthi_ring *r, uint64_t *out_tag, int32_t *out_result) {
    (void)r, (void)out_tag, (void)out_result;
    return false;
}
#endif
