/* Calls of optim.h. */
#include "fuzz/calls.h"

enum { MOST = 1000, ROOM = MOST * 8 }; /* elements; bytes of each array */

static void make(calls *c) {
    sth_adamw_options o;
    sth_adamw_options_init(&o);
    sth_adamw_options_init(NULL);
    o.threads = calls_byte(c) % 8 ? 1 + calls_byte(c) % 2u : calls_byte(c) % 2 ? 257 : UINT32_MAX;
    if (calls_byte(c) & 1) o.state_path = calls_byte(c) % 4 ? fuzz_folder() : calls_file(c);
    if (o.state_path && !*o.state_path) o.state_path = "/nothing/at/all";
    if (o.state_path && *o.state_path != '/') o.state_path = fuzz_path("nothing");
    if (calls_once_in(c, 24)) o.size = (size_t)calls_extreme(c);
    sth_adamw *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_adamw_create(calls_or_null(c, &o), &made));
    CHECK(rc == STH_OK || made == (void *)c);
    c->adamw = rc == STH_OK ? made : NULL;
    memset(c->states, 0, sizeof c->states);
}

static sth_dtype any_dtype(calls *c) {
    static const sth_dtype most[] = {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F16, STH_DTYPE_F64};
    return calls_once_in(c, 8) ? (sth_dtype)calls_choice(c, STH_DTYPE_COUNT) : most[calls_byte(c) % 4];
}

static void make_state(calls *c, uint32_t i) {
    uint64_t count = calls_bytes(c, MOST);
    sth_dtype dtype = any_dtype(c);
    bool master = calls_byte(c) & 1;
    sth_adamw_state made = 77;
    sth_status rc = CALLS_TRY(sth_adamw_state_create(calls_or_null(c, c->adamw), count, dtype, master, &made));
    CHECK(rc == STH_OK || made == 77);
    if (rc != STH_OK) return;
    CALLS_TRY(sth_adamw_wait(c->adamw, 0)); /* of the state that was there */
    c->states[i] = made;
    c->state_counts[i] = count;
    c->state_dtypes[i] = dtype;
    c->state_masters[i] = master;
}

static void move_state(calls *c, uint32_t i) {
    sth_adamw_part part = (sth_adamw_part)calls_choice(c, 3);
    sth_adamw_state state = calls_once_in(c, 16) ? calls_extreme(c) : c->states[i];
    if (state != c->states[i] && state <= CALLS_STATES + 2) return; /* may be another's, of another size */
    CALLS_TRY(sth_adamw_wait(c->adamw, 0));
    if (calls_byte(c) & 1) CALLS_TRY(sth_adamw_state_read(c->adamw, state, part, calls_or_null(c, calls_memory)));
    else CALLS_TRY(sth_adamw_state_write(c->adamw, state, part, calls_or_null_const(c, calls_memory)));
}

static void update(calls *c, uint32_t i) {
    sth_adamw_update u;
    sth_adamw_update_init(&u);
    sth_adamw_update_init(NULL);
    uint64_t ticket;
    uint8_t *arrays = calls_memory + CALLS_MEMORY / 2;
    bool filed = c->states[i] && calls_byte(c) & 1;
    u.count = filed ? c->state_counts[i] : calls_bytes(c, MOST);
    u.param = calls_or_null(c, arrays);
    u.grad = calls_or_null(c, arrays + ROOM);
    u.param_dtype = any_dtype(c);
    u.grad_dtype = any_dtype(c);
    if (filed) u.state = c->states[i];
    else {
        u.exp_avg = calls_or_null(c, arrays + 2 * ROOM);
        u.exp_avg_sq = calls_or_null(c, arrays + 3 * ROOM);
        u.master = calls_byte(c) % 4 ? NULL : (float *)(void *)(arrays + 4 * ROOM);
        u.moment_dtype = calls_byte(c) % 4 ? u.param_dtype : any_dtype(c);
    }
    if (calls_once_in(c, 24)) u.state = calls_extreme(c);
    u.step = calls_byte(c) % 4 ? UINT64_C(1) + calls_byte(c) : calls_extreme(c);
    double *reals[] = {&u.lr, &u.beta1, &u.beta2, &u.eps, &u.weight_decay, &u.grad_scale};
    if (calls_byte(c) % 2) *reals[calls_byte(c) % 6] = calls_real(c);
    u.maximize = calls_byte(c) & 1;
    u.stochastic_rounding = calls_byte(c) & 1;
    u.seed = calls_extreme(c);
    u.stream = calls_extreme(c);
    if (calls_once_in(c, 24)) u.size = (size_t)calls_extreme(c);
    if (CALLS_TRY(sth_adamw_submit(calls_or_null(c, c->adamw), &u, calls_or_null(c, &ticket))) == STH_OK)
        CALLS_TRY(sth_adamw_wait(c->adamw, calls_byte(c) & 1 ? 0 : calls_byte(c) % 4 ? 0 : calls_extreme(c)));
    CALLS_TRY(sth_adamw_wait(c->adamw, 0)); /* the next one has the same memory */
}

static void gradients(calls *c) {
    sth_grad grads[2];
    double sum;
    for (int i = 0; i < 2; i++)
        grads[i] = (sth_grad){calls_or_null(c, calls_memory + i * ROOM), calls_bytes(c, MOST), any_dtype(c)};
    size_t count = calls_byte(c) % 8 ? calls_byte(c) % 3u : SIZE_MAX;
    if (count > 2) { /* refused before any is read, or else there is no list */
        CHECK(CALLS_TRY(sth_adamw_scale(c->adamw, NULL, count, 1)) != STH_OK);
        return;
    }
    CALLS_TRY(sth_adamw_sum_squares(calls_or_null(c, c->adamw), calls_or_null_const(c, grads), count,
                                    calls_or_null(c, &sum)));
    CALLS_TRY(sth_adamw_scale(calls_or_null(c, c->adamw), calls_or_null_const(c, grads), count, calls_real(c)));
}

void calls_on_updates(calls *c) {
    uint32_t i = calls_byte(c) % CALLS_STATES;
    if (!c->adamw) {
        make(c);
        return;
    }
    switch (calls_byte(c) % 6) {
    case 0: make_state(c, i); break;
    case 1: if (c->states[i]) move_state(c, i); break;
    case 2: gradients(c); break;
    case 3:
        (void)sth_adamw_threads(calls_or_null(c, c->adamw));
        (void)sth_adamw_file_bytes(calls_or_null(c, c->adamw));
        CHECK(sth_adamw_kernels(calls_or_null(c, c->adamw)));
        break;
    default: update(c, i);
    }
}

void calls_end_updates(calls *c) { sth_adamw_destroy(c->adamw); }
