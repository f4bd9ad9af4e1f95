/* The optimiser: checks updates, cuts them into pieces for the threads, and for states in the file reads and
 * writes each piece's part of it round the update.
 *
 * Layout of a state in the file: for each piece of STHI_OPTIM_CHUNK elements its first moments, second
 * moments and master, one behind the other, so that a piece is one read and one write.
 *
 *   | m of piece 0 | v of piece 0 | master of piece 0 | m of piece 1 | ...     the last piece is shorter
 *
 * Invariants: a piece's weights are written after its state was; a state is `fresh` until its first update
 * was submitted or it was written, and then no byte of it is read. Lock: `lock` guards the table of states
 * and the file's growth, also while the disk gives room. */
#include "optim/adamw.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "base/workers.h"
#include "optim/statefile.h"
#include "optim/update.h"
#include "store/dtype.h"
#include "telemetry/timeline.h"

#define MAX_THREADS 256
#define DEFAULT_THREADS 16
#define MAX_ELEMENTS (UINT64_C(1) << 54) /* no memory has more, of any dtype */
/* A piece of state in the file, and the weights that it makes: the most is float64 with its two moments. */
#define SCRATCH_BYTES (STHI_OPTIM_CHUNK * 3 * sizeof(double))

typedef struct state {
    uint64_t offset, count;
    sth_dtype moment_dtype;
    bool master, fresh;
} state;

struct sth_adamw {
    const sthi_kernels *kernels;
    sthi_workers *workers;
    sthi_statefile file; /* fd, path: set for good */

    sthi_mutex lock;
    state *states;
    uint64_t state_count, state_capacity;
};

typedef struct update_job {
    sthi_job job; /* first: the pool frees it by this address */
    sth_adamw *adamw;
    sth_adamw_update update;
    sthi_adamw_step step;
    state state; /* count 0: in RAM */
} update_job;

/* ---- life ---- */

static uint32_t default_threads(void) {
    int cores = sthi_core_count();
    return (uint32_t)(cores < DEFAULT_THREADS ? cores : DEFAULT_THREADS);
}

static sth_status open_parts(sth_adamw *adamw, const sth_adamw_options *options) {
    uint32_t threads = options->threads ? options->threads : default_threads();
    if (options->state_path) STHI_TRY(sthi_statefile_open(options->state_path, &adamw->file));
    return sthi_workers_create("optimizer", "sth-adamw", threads, options->state_path ? SCRATCH_BYTES : 0,
                               &adamw->workers);
}

sth_status sthi_adamw_create(const sth_adamw_options *options, sth_adamw **out) {
    if (options->size != sizeof *options || options->threads > MAX_THREADS)
        return sthi_fail(
            STH_INVALID_ARGUMENT, NULL, 0, "optimizer",
            "options come from sth_adamw_options_init and ask for at most %d threads (these: %u)",
            MAX_THREADS, options->threads);
    sth_adamw *adamw = sthi_zalloc(1, sizeof *adamw);
    if (!adamw) return sthi_no_memory("optimizer", "the optimizer");
    adamw->kernels = sthi_kernels_best();
    adamw->file.fd = -1;
    sthi_mutex_init(&adamw->lock);
    sth_status status = open_parts(adamw, options);
    if (status == STH_OK) {
        *out = adamw;
        return STH_OK;
    }
    sthi_error_copy first;
    sthi_error_save(&first);
    sthi_adamw_destroy(adamw);
    return sthi_error_restore(&first);
}

void sthi_adamw_destroy(sth_adamw *adamw) {
    if (!adamw) return;
    sthi_workers_destroy(adamw->workers);
    sthi_statefile_close(&adamw->file);
    sthi_mutex_fini(&adamw->lock);
    sthi_free(adamw->states);
    sthi_free(adamw);
}

uint32_t sthi_adamw_threads(const sth_adamw *adamw) { return sthi_workers_count(adamw->workers); }
const char *sthi_adamw_kernels(const sth_adamw *adamw) { return adamw->kernels->name; }

/* ---- states in the file ---- */

static uint64_t element_bytes(const state *s) {
    return 2 * sthi_optim_size(s->moment_dtype) + (s->master ? 4 : 0);
}

static uint64_t piece_count(uint64_t elements) {
    return elements / STHI_OPTIM_CHUNK + (elements % STHI_OPTIM_CHUNK != 0);
}
static size_t piece_length(uint64_t elements, uint64_t piece) {
    return sthi_min_u64(STHI_OPTIM_CHUNK, elements - piece * STHI_OPTIM_CHUNK);
}
static uint64_t piece_offset(const state *s, uint64_t piece) {
    return s->offset + piece * STHI_OPTIM_CHUNK * element_bytes(s);
}

static sth_status add_state(sth_adamw *adamw, state *s, uint64_t bytes, sth_adamw_state *out) {
    if (adamw->state_count == adamw->state_capacity) {
        uint64_t capacity = adamw->state_capacity ? 2 * adamw->state_capacity : 16;
        state *grown = sthi_realloc(adamw->states, capacity, sizeof *grown);
        if (!grown) return sthi_no_memory("optimizer", "the optimizer's list of states");
        adamw->states = grown;
        adamw->state_capacity = capacity;
    }
    STHI_TRY(sthi_statefile_grow(&adamw->file, bytes, &s->offset));
    adamw->states[adamw->state_count++] = *s;
    *out = adamw->state_count;
    return STH_OK;
}

sth_status sthi_adamw_state_create(sth_adamw *adamw, uint64_t count, sth_dtype moment_dtype, bool master,
                                   sth_adamw_state *out) {
    state s = {.count = count, .moment_dtype = moment_dtype, .master = master, .fresh = true};
    uint64_t bytes;
    STHI_TRY(sthi_workers_refuse_child(adamw->workers)); /* the file is its parent's */
    if (!adamw->file.path)
        return sthi_fail(STH_INVALID_STATE, NULL, 0, "optimizer",
                         "the optimizer was made without a state_path");
    if (!count || !sthi_optim_size(moment_dtype) || !sthi_mul_u64(count, element_bytes(&s), &bytes))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer",
                         "a state of %llu elements of dtype %s is not possible", (unsigned long long)count,
                         sthi_dtype_name(moment_dtype));
    sthi_lock(&adamw->lock);
    sth_status status = add_state(adamw, &s, bytes, out);
    sthi_unlock(&adamw->lock);
    return status;
}

/* A copy of a state's record; with `begun` it is fresh no more from now on. */
static sth_status look_up(sth_adamw *adamw, sth_adamw_state id, bool begun, state *out) {
    STHI_TRY(sthi_workers_refuse_child(adamw->workers)); /* the file is its parent's */
    sthi_lock(&adamw->lock);
    bool known = id && id <= adamw->state_count;
    if (known) {
        *out = adamw->states[id - 1];
        if (begun) adamw->states[id - 1].fresh = false;
    }
    sthi_unlock(&adamw->lock);
    if (known) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer", "state %llu is not one of this optimizer",
                     (unsigned long long)id);
}

typedef sth_status move_fn(const sthi_statefile *file, uint64_t offset, char *memory, uint64_t bytes);
static sth_status move_in(const sthi_statefile *file, uint64_t offset, char *memory, uint64_t bytes) {
    return sthi_statefile_read(file, offset, memory, bytes);
}
static sth_status move_out(const sthi_statefile *file, uint64_t offset, char *memory, uint64_t bytes) {
    return sthi_statefile_write(file, offset, memory, bytes);
}

static sth_status move_part(sth_adamw *adamw, const state *s, sth_adamw_part part, char *memory,
                            move_fn *move) {
    if ((part != STH_ADAMW_EXP_AVG && part != STH_ADAMW_EXP_AVG_SQ && part != STH_ADAMW_MASTER) ||
        (part == STH_ADAMW_MASTER && !s->master))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer", "this state has no part %d", (int)part);
    uint64_t moment = sthi_optim_size(s->moment_dtype), each = part == STH_ADAMW_MASTER ? 4 : moment;
    for (uint64_t i = 0; i < piece_count(s->count); i++) {
        uint64_t n = piece_length(s->count, i);
        STHI_TRY(move(&adamw->file, piece_offset(s, i) + (uint64_t)part * n * moment, memory, n * each));
        memory += n * each;
    }
    return STH_OK;
}

sth_status sthi_adamw_state_read(sth_adamw *adamw, sth_adamw_state id, sth_adamw_part part, void *memory) {
    state s;
    STHI_TRY(look_up(adamw, id, false, &s));
    return move_part(adamw, &s, part, memory, move_in);
}

sth_status sthi_adamw_state_write(sth_adamw *adamw, sth_adamw_state id, sth_adamw_part part,
                                  const void *memory) {
    state s;
    STHI_TRY(look_up(adamw, id, true, &s));
    return move_part(adamw, &s, part, (char *)memory, move_out);
}

uint64_t sthi_adamw_file_bytes(sth_adamw *adamw) {
    if (sthi_workers_refuse_child(adamw->workers) != STH_OK) return 0;
    sthi_lock(&adamw->lock);
    uint64_t bytes = adamw->file.bytes;
    sthi_unlock(&adamw->lock);
    return bytes;
}

/* ---- updates ---- */

static sthi_adamw_piece cut(const sth_adamw_update *u, uint64_t piece) {
    uint64_t first = piece * STHI_OPTIM_CHUNK;
    sthi_adamw_piece out = {
        .param = (char *)u->param + first * sthi_optim_size(u->param_dtype),
        .grad = (const char *)u->grad + first * sthi_optim_size(u->grad_dtype),
        .param_dtype = u->param_dtype,
        .grad_dtype = u->grad_dtype,
        .moment_dtype = u->moment_dtype,
        .first = first,
        .n = piece_length(u->count, piece),
    };
    return out;
}

static void update(const update_job *self, const sthi_adamw_piece *part) {
    sthi_mark begun = sthi_timeline_mark("optimizer", "AdamW");
    sthi_adamw_run(self->adamw->kernels, &self->step, part);
    uint64_t bytes = part->n * sthi_optim_size(part->param_dtype);
    sthi_timeline_since(begun, STHI_TRACK_OPTIMIZER, "optimizer", "AdamW", bytes);
}

static sth_status run_in_ram(sthi_job *job, uint64_t piece, void *scratch) {
    (void)scratch;
    const update_job *self = (update_job *)job;
    const sth_adamw_update *u = &self->update;
    sthi_adamw_piece part = cut(u, piece);
    size_t moment = sthi_optim_size(u->moment_dtype);
    part.exp_avg = (char *)u->exp_avg + part.first * moment;
    part.exp_avg_sq = (char *)u->exp_avg_sq + part.first * moment;
    part.master = u->master ? u->master + part.first : NULL;
    update(self, &part);
    return STH_OK;
}

/* The piece's state comes into the thread's buffer, is updated with the weights going to a second buffer, and
 * is written back before the weights are: a state that cannot be written leaves this piece's weights as they
 * were. */
static sth_status run_in_file(sthi_job *job, uint64_t piece, void *scratch) {
    const update_job *self = (update_job *)job;
    const state *s = &self->state;
    const sthi_statefile *file = &self->adamw->file;
    sthi_adamw_piece part = cut(&self->update, piece);
    size_t moment = sthi_optim_size(s->moment_dtype), bytes = part.n * element_bytes(s);
    size_t weight = sthi_optim_size(part.param_dtype);
    part.exp_avg = scratch;
    part.exp_avg_sq = (char *)scratch + part.n * moment;
    part.master = s->master ? (float *)((char *)scratch + 2 * part.n * moment) : NULL;
    if (!s->fresh)
        STHI_TRY(sthi_statefile_read(file, piece_offset(s, piece), scratch, bytes));
    else {
        memset(scratch, 0, 2 * part.n * moment);
        if (part.master)
            sthi_optim_widen(self->adamw->kernels, part.master, part.param, part.param_dtype, part.n);
    }
    void *param = part.param, *aside = (char *)scratch + STHI_OPTIM_CHUNK * element_bytes(s);
    memcpy(aside, param, part.n * weight);
    part.param = aside;
    update(self, &part);
    STHI_TRY(sthi_statefile_write(file, piece_offset(s, piece), scratch, bytes));
    memcpy(param, aside, part.n * weight);
    return STH_OK;
}

static bool is_half(sth_dtype dtype) { return dtype == STH_DTYPE_BF16 || dtype == STH_DTYPE_F16; }

static bool fits(const sth_adamw_update *u, bool has_master) {
    if (!sthi_optim_size(u->param_dtype) || !sthi_optim_size(u->grad_dtype)) return false;
    if (has_master && !is_half(u->param_dtype)) return false;
    if (u->param_dtype == STH_DTYPE_F64) return u->moment_dtype == STH_DTYPE_F64;
    return u->moment_dtype == STH_DTYPE_F32 || u->moment_dtype == u->param_dtype;
}

static sth_status too_many(uint64_t count) {
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer", "no memory has %llu elements",
                     (unsigned long long)count);
}

static sth_status check(const sth_adamw_update *u, const state *s) {
    bool in_file = u->state != 0;
    if (u->size != sizeof *u || !u->step)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer",
                         "an update comes from sth_adamw_update_init, its step is at least 1");
    if (u->count > MAX_ELEMENTS) return too_many(u->count);
    if (u->count && (!u->param || !u->grad || (!in_file && (!u->exp_avg || !u->exp_avg_sq))))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer", "param, grad or a moment is NULL");
    if (in_file && (u->exp_avg || u->exp_avg_sq || u->master || s->count != u->count))
        return sthi_fail(
            STH_INVALID_ARGUMENT, NULL, 0, "optimizer",
            "the state in the file is of %llu elements, the update of %llu, without moments in RAM",
            (unsigned long long)s->count, (unsigned long long)u->count);
    if (!fits(u, in_file ? s->master : u->master != NULL))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer",
                         "a parameter of dtype %s with gradients of %s and moments of %s is not supported",
                         sthi_dtype_name(u->param_dtype), sthi_dtype_name(u->grad_dtype),
                         sthi_dtype_name(u->moment_dtype));
    return STH_OK;
}

sth_status sthi_adamw_submit(sth_adamw *adamw, const sth_adamw_update *update, uint64_t *out_ticket) {
    state s = {0};
    sth_adamw_update u = *update;
    if (u.state) {
        STHI_TRY(look_up(adamw, u.state, false, &s));
        u.moment_dtype = s.moment_dtype;
    }
    STHI_TRY(check(&u, &s));
    update_job *job = sthi_zalloc(1, sizeof *job);
    if (!job) return sthi_no_memory("optimizer", "an update");
    *job = (update_job){.adamw = adamw, .update = u, .state = s};
    job->job.run = u.state ? run_in_file : run_in_ram;
    job->job.pieces = piece_count(u.count);
    sthi_adamw_step_init(&job->step, &u);
    sth_status status = sthi_workers_submit(adamw->workers, &job->job, out_ticket);
    if (status != STH_OK)
        sthi_free(job);
    else if (u.state)
        (void)look_up(adamw, u.state, true, &s);
    return status;
}

sth_status sthi_adamw_wait(sth_adamw *adamw, uint64_t ticket) {
    return sthi_workers_wait(adamw->workers, ticket);
}

/* ---- gradients ---- */

/* A pass over the pieces of several gradients. first[i] is the number of gradient i's first piece. */
typedef struct grads_job {
    sthi_job job;
    const sthi_kernels *kernels;
    const sth_grad *grads;
    size_t count;
    uint64_t *first;
    double *sums; /* one for each piece; NULL to scale by `factor` */
    double factor;
} grads_job;

static sth_status run_grads(sthi_job *job, uint64_t piece, void *scratch) {
    (void)scratch;
    const grads_job *self = (grads_job *)job;
    size_t low = 0, high = self->count; /* the last gradient that begins at or before the piece */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        *(self->first[middle] <= piece ? &low : &high) = middle;
    }
    const sth_grad *grad = &self->grads[low];
    uint64_t own = piece - self->first[low];
    size_t n = piece_length(grad->count, own);
    void *data = (char *)grad->data + own * STHI_OPTIM_CHUNK * sthi_optim_size(grad->dtype);
    if (self->sums)
        self->sums[piece] = sthi_optim_squares(self->kernels, data, grad->dtype, n);
    else
        sthi_optim_scale(self->kernels, data, grad->dtype, n, self->factor);
    return STH_OK;
}

static sth_status count_pieces(grads_job *self) {
    for (size_t i = 0; i < self->count; i++) {
        const sth_grad *grad = &self->grads[i];
        if (!sthi_optim_size(grad->dtype) || (grad->count && !grad->data))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "optimizer",
                             "gradient %zu is NULL or of dtype %s, which is not supported", i,
                             sthi_dtype_name(grad->dtype));
        if (grad->count > MAX_ELEMENTS) return too_many(grad->count);
        self->first[i] = self->job.pieces;
        self->job.pieces += piece_count(grad->count);
    }
    return STH_OK;
}

static sth_status over_grads(sth_adamw *adamw, const sth_grad *grads, size_t count, double factor,
                             double *out_sum) {
    grads_job self = {.kernels = adamw->kernels, .grads = grads, .count = count, .factor = factor};
    self.job.run = run_grads;
    self.first = sthi_zalloc(count, sizeof *self.first);
    sth_status status = self.first ? count_pieces(&self) : STH_OUT_OF_HOST_MEMORY;
    if (status == STH_OK && out_sum && !(self.sums = sthi_zalloc(self.job.pieces, sizeof *self.sums)))
        status = STH_OUT_OF_HOST_MEMORY;
    if (status == STH_OUT_OF_HOST_MEMORY)
        (void)sthi_no_memory("optimizer", "a pass over %zu gradients", count);
    if (status == STH_OK) status = sthi_workers_run(adamw->workers, &self.job);
    double sum = 0;
    for (uint64_t i = 0; status == STH_OK && self.sums && i < self.job.pieces; i++) sum += self.sums[i];
    if (status == STH_OK && out_sum) *out_sum = sum;
    sthi_free(self.first);
    sthi_free(self.sums);
    return status;
}

sth_status sthi_adamw_sum_squares(sth_adamw *adamw, const sth_grad *grads, size_t count, double *out_sum) {
    return over_grads(adamw, grads, count, 1, out_sum);
}
sth_status sthi_adamw_scale(sth_adamw *adamw, const sth_grad *grads, size_t count, double factor) {
    return over_grads(adamw, grads, count, factor, NULL);
}
