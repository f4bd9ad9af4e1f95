/* A fetch cuts pieces into requests of whole blocks, keeps up to DEPTH of them under way in a ring, or does them one
 * after the other, and copies out of the side buffer what could not be read where it goes.
 *
 * What a ring's request did not bring, for whatever reason, is read again by pread: errors, short reads and refusals
 * are told apart in one place. Invariants: a request's memory is the kernel's until it has ended, and a fetch ends
 * after its last request; only bytes of a piece are written, and free ones next to it. A fetcher is one thread's; no
 * locks. */
#define _GNU_SOURCE
#include "store/fetch.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/memory.h"
#include "store/ring.h"

/* Few large requests: a virtual disk brought 1.7 GB/s by 4 of 4 MiB at once, 1.0 by 16 of 1 MiB. GAP: what is read
 * around the page cache where it has nothing. */
enum { DEPTH = 8, REQUEST = 4 << 20, GAP = 1 << 20, SIDE = 256 << 10, MAX_ALIGN = 64 << 10 };

/* [offset, offset + bytes) of the file into `into`, all multiples of the alignment. The piece's own are `take` bytes
 * behind the first `skip`; they are copied to `copy_to` unless that is NULL. */
typedef struct request {
    uint32_t piece;
    sthi_access *access;
    uint64_t offset;
    uint32_t bytes, skip, take;
    uint8_t *into, *copy_to;
    bool busy;
} request;

struct sthi_fetcher {
    sthi_ring *ring;
    bool ring_refused;
    uint8_t *side, *side_map; /* DEPTH x SIDE */
    request requests[DEPTH];
    uint32_t busy;
    /* the fetch under way */
    sth_status status;
    sthi_error_copy why;
    uint32_t bad_piece;
    uint64_t bad_offset;
};

/* How far a piece was cut up. */
typedef struct cursor {
    const sthi_piece *piece;
    uint32_t number;
    uint64_t at;           /* bytes done */
    uint64_t direct_until; /* page cache: bytes up to which it has nothing */
} cursor;

sthi_fetcher *sthi_fetcher_create(void) { return sthi_zalloc(1, sizeof(sthi_fetcher)); }

void sthi_fetcher_destroy(sthi_fetcher *f) {
    if (!f) return;
    sthi_ring_close(f->ring);
    sthi_pages_unmap(f->side_map, DEPTH * SIDE + MAX_ALIGN);
    sthi_free(f);
}

static bool make_side(sthi_fetcher *f) {
    if (f->side) return true;
    f->side_map = sthi_pages_map(DEPTH * SIDE + MAX_ALIGN, 0);
    if (!f->side_map) return false;
    f->side = f->side_map + (MAX_ALIGN - (uintptr_t)f->side_map % MAX_ALIGN) % MAX_ALIGN;
    return true;
}

/* The first failure counts. */
static void note_failure(sthi_fetcher *f, uint32_t piece, uint64_t offset, sth_status status) {
    if (status == STH_OK || f->status != STH_OK) return;
    f->status = status;
    sthi_error_save(&f->why);
    f->bad_piece = piece;
    f->bad_offset = offset;
}

/* ---- one request ---- */

static int64_t faulty(int64_t n) {
    if (sthi_fault_hit(STHI_FAULT_READ)) return -EIO;
    if (n > 1 && sthi_fault_hit(STHI_FAULT_SHORT_READ)) return n / 2;
    return n;
}

static int64_t pread_once(int fd, void *to, uint64_t bytes, uint64_t offset) {
    ssize_t n;
    do n = pread(fd, to, bytes, (off_t)offset);
    while (n < 0 && errno == EINTR);
    return faulty(n < 0 ? -errno : n);
}

/* Reads on from `got` bytes until all that is needed is there. */
static sth_status finish_request(const request *r, uint64_t got) {
    const sthi_access *a = r->access;
    uint64_t need = (uint64_t)r->skip + r->take, own = r->offset + r->skip;
    while (got < need) {
        uint64_t from = got - got % a->align;
        int64_t n = pread_once(a->direct_fd, r->into + from, r->bytes - from, r->offset + from);
        bool refused = n == -EINVAL || n == -EOPNOTSUPP || n == -ENOTSUP;
        if (n < 0 && !refused)
            return sthi_file_fail_read(a->file, own, r->take, got > r->skip ? got - r->skip : 0, (int)-n);
        if (n == 0) return sthi_file_fail_read(a->file, own, r->take, got > r->skip ? got - r->skip : 0, 0);
        if (n > 0 && from + (uint64_t)n > got) got = from + (uint64_t)n;
        else return sthi_file_pread(a->file, r->offset + got, need - got, r->into + got);
    }
    return STH_OK;
}

static void end_request(sthi_fetcher *f, request *r, int64_t got) {
    r->busy = false;
    sth_status rc = finish_request(r, got > 0 ? (uint64_t)got : 0);
    note_failure(f, r->piece, r->offset + r->skip, rc);
    if (rc == STH_OK && r->copy_to) memcpy(r->copy_to, r->into + r->skip, r->take);
}

/* ---- the ring ---- */

static bool have_ring(sthi_fetcher *f) {
    int err;
    if (!f->ring && !f->ring_refused) f->ring = sthi_ring_open(DEPTH, &err);
    f->ring_refused = !f->ring;
    return f->ring != NULL;
}

/* Waits for one request; all of them are done by hand when the ring takes no more. */
static void wait_for_one(sthi_fetcher *f) {
    uint64_t tag;
    int32_t result;
    if (sthi_ring_wait(f->ring, &tag, &result)) {
        f->busy--;
        end_request(f, &f->requests[tag], faulty(result));
        return;
    }
    for (uint32_t i = 0; i < DEPTH; i++)
        if (f->requests[i].busy) end_request(f, &f->requests[i], 0);
    f->busy = 0;
    sthi_ring_close(f->ring);
    f->ring = NULL;
    f->ring_refused = true;
}

static request *free_request(sthi_fetcher *f) {
    if (f->busy == DEPTH) wait_for_one(f);
    uint32_t i = 0;
    while (f->requests[i].busy) i++;
    return &f->requests[i];
}

static void start(sthi_fetcher *f, request *r) {
    const sthi_access *a = r->access;
    uint64_t tag = (uint64_t)(r - f->requests);
    if (a->direct_way == STH_READ_URING && have_ring(f) &&
        sthi_ring_read(f->ring, a->direct_fd, r->offset, r->into, r->bytes, tag)) {
        r->busy = true;
        f->busy++;
        return;
    }
    end_request(f, r, 0);
}

/* ---- cutting up ---- */

/* The next request of what is left of a piece, up to `end` of its bytes. */
static void cut_direct(sthi_fetcher *f, cursor *c, uint64_t end, request *r) {
    const sthi_piece *p = c->piece;
    uint64_t align = p->access->align, offset = p->offset + c->at, left = end - c->at;
    uint8_t *to = p->to + c->at;
    uint64_t head = offset % align;
    bool straight = (uintptr_t)to % align == head;
    bool open_head = head && p->free_before && c->at == 0, open_tail = p->free_behind && end == p->bytes;
    *r = (request){.piece = c->number, .access = p->access, .offset = offset - head, .skip = (uint32_t)head};
    if (straight && (!head || open_head)) { /* read where it goes */
        uint64_t take = sthi_min_u64(left, REQUEST - head), beyond = (head + take) % align;
        bool last = take == left;
        if (beyond && !(last && open_tail)) take = take > beyond ? take - beyond : 0;
        if (take) {
            r->into = to - head;
            r->take = (uint32_t)take;
            r->bytes = (uint32_t)((head + take + align - 1) / align * align);
            c->at += take;
            return;
        }
    }
    uint64_t most = straight ? align : SIDE; /* an edge alone, or all of it */
    r->into = f->side + (uint64_t)(r - f->requests) * SIDE;
    r->copy_to = to;
    r->take = (uint32_t)sthi_min_u64(left, most - head);
    r->bytes = (uint32_t)((head + r->take + align - 1) / align * align);
    c->at += r->take;
}

/* What is in the page cache of the rest of the piece; sets direct_until when there is a gap. */
static void take_cached(sthi_fetcher *f, cursor *c) {
    const sthi_piece *p = c->piece;
    sthi_access *a = p->access;
    while (c->at < p->bytes && f->status == STH_OK) {
        struct iovec v = {p->to + c->at, p->bytes - c->at};
        ssize_t n = preadv2(a->file->fd, &v, 1, (off_t)(p->offset + c->at), RWF_NOWAIT);
        int64_t got = faulty(n < 0 ? -errno : n);
        if (got == -EINTR) continue;
        if (got == -EOPNOTSUPP) atomic_store(&a->nowait, false);
        if (got <= 0) { /* around the cache, where an error is seen again */
            c->direct_until = sthi_min_u64(p->bytes, c->at + GAP);
            return;
        }
        atomic_fetch_add(&a->cached_bytes, (uint64_t)got);
        c->at += (uint64_t)got;
    }
}

static void read_buffered(sthi_fetcher *f, cursor *c, uint64_t end) {
    const sthi_piece *p = c->piece;
    sth_status rc = sthi_file_pread(p->access->file, p->offset + c->at, end - c->at, p->to + c->at);
    note_failure(f, c->number, p->offset + c->at, rc);
    c->at = end;
}

static void read_direct(sthi_fetcher *f, cursor *c, uint64_t end) {
    if (!make_side(f)) { /* still right, only slower */
        read_buffered(f, c, end);
        return;
    }
    while (c->at < end && f->status == STH_OK) {
        request *r = free_request(f);
        cut_direct(f, c, end, r);
        start(f, r);
    }
}

static void read_piece(sthi_fetcher *f, cursor *c) {
    const sthi_piece *p = c->piece;
    sthi_access *a = p->access;
    int way = atomic_load(&a->way);
    while (c->at < p->bytes && f->status == STH_OK) {
        uint64_t end = p->bytes;
        bool cached = way == STH_READ_CACHED && atomic_load(&a->nowait);
        if (cached) {
            take_cached(f, c);
            end = c->direct_until;
            if (c->at == p->bytes) break;
        }
        if (a->direct_fd >= 0 && way != STH_READ_BUFFERED && (cached || way != STH_READ_CACHED)) read_direct(f, c, end);
        else read_buffered(f, c, end);
    }
}

static void check_files(sthi_fetcher *f, const sthi_piece *pieces, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (!i || pieces[i].access != pieces[i - 1].access)
            note_failure(f, i, pieces[i].offset, sthi_file_check_unchanged(pieces[i].access->file));
}

sth_status sthi_fetch(sthi_fetcher *f, const sthi_piece *pieces, uint32_t count, uint32_t *out_piece,
                      uint64_t *out_offset) {
    f->status = STH_OK;
    check_files(f, pieces, count);
    for (uint32_t i = 0; i < count && f->status == STH_OK; i++) {
        cursor c = {.piece = &pieces[i], .number = i};
        atomic_fetch_add(&pieces[i].access->read_bytes, pieces[i].bytes);
        read_piece(f, &c);
    }
    while (f->busy) wait_for_one(f);
    check_files(f, pieces, count);
    if (f->status != STH_OK) {
        *out_piece = f->bad_piece;
        *out_offset = f->bad_offset;
        return sthi_error_restore(&f->why);
    }
    return STH_OK;
}
