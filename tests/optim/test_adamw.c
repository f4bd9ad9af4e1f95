/* The optimiser: its arithmetic against float64, the same bits for any number of threads and for state in RAM
 * or in the file, tickets, failures as values, and a child made by fork. */
#define _GNU_SOURCE
#include "support/check.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/memory.h"
#include "base/thread.h"
#include "base/half.h"
#include "base/random.h"
#include "stagehand/optim.h"

#define CHUNK 65536
#define COUNT (3 * CHUNK + 1001)

static sth_adamw *make_in(uint32_t threads, const char *path) {
    sth_adamw_options options;
    sth_adamw *adamw = NULL;
    sth_adamw_options_init(&options);
    options.threads = threads;
    options.state_path = path;
    assert_ok(sth_adamw_create(&options, &adamw));
    return adamw;
}
static sth_adamw *make(uint32_t threads) { return make_in(threads, NULL); }

static size_t size_of(sth_dtype dtype) { return sth_dtype_bits(dtype) / 8; }

static void put(void *memory, sth_dtype dtype, size_t i, float x) {
    switch (dtype) {
    case STH_DTYPE_F64: ((double *)memory)[i] = x; break;
    case STH_DTYPE_F32: ((float *)memory)[i] = x; break;
    case STH_DTYPE_BF16: ((uint16_t *)memory)[i] = sthi_to_bf16(x); break;
    default: ((uint16_t *)memory)[i] = sthi_to_f16(x);
    }
}
static double get(const void *memory, sth_dtype dtype, size_t i) {
    switch (dtype) {
    case STH_DTYPE_F64: return ((const double *)memory)[i];
    case STH_DTYPE_F32: return ((const float *)memory)[i];
    case STH_DTYPE_BF16: return sthi_from_bf16(((const uint16_t *)memory)[i]);
    default: return sthi_from_f16(((const uint16_t *)memory)[i]);
    }
}

/* A parameter with its gradient and state in RAM, filled from a seed. */
typedef struct parameter {
    size_t n;
    sth_dtype dtype, grad_dtype, moment_dtype;
    void *p, *g, *m, *v;
    float *master;
} parameter;

static parameter make_parameter(size_t n, sth_dtype dtype, sth_dtype grad_dtype, sth_dtype moments,
                                bool master) {
    parameter x = {.n = n, .dtype = dtype, .grad_dtype = grad_dtype, .moment_dtype = moments};
    x.p = calloc(n + 1, size_of(dtype)), x.g = calloc(n + 1, size_of(grad_dtype));
    x.m = calloc(n + 1, size_of(moments)), x.v = calloc(n + 1, size_of(moments));
    x.master = master ? calloc(n + 1, sizeof(float)) : NULL;
    for (size_t i = 0; i < n; i++) {
        put(x.p, dtype, i, (float)((double)sthi_random64(1, i) * 0x1p-63 - 1));
        put(x.g, grad_dtype, i, (float)((double)sthi_random64(2, i) * 0x1p-63 - 1));
        if (master) x.master[i] = (float)get(x.p, dtype, i);
    }
    return x;
}
static void drop_parameter(parameter *x) { free(x->p), free(x->g), free(x->m), free(x->v), free(x->master); }

static sth_adamw_update update_of(const parameter *x, uint64_t step) {
    sth_adamw_update u;
    sth_adamw_update_init(&u);
    u.count = x->n, u.param = x->p, u.grad = x->g, u.exp_avg = x->m, u.exp_avg_sq = x->v,
    u.master = x->master;
    u.param_dtype = x->dtype, u.grad_dtype = x->grad_dtype, u.moment_dtype = x->moment_dtype;
    u.step = step, u.lr = 1e-2, u.weight_decay = 0.1;
    return u;
}

/* ---- arithmetic ---- */

/* A plain AdamW in float64, for one element. */
static double reference(double p, double g, uint64_t steps, const sth_adamw_update *u) {
    double m = 0, v = 0;
    for (uint64_t t = 1; t <= steps; t++) {
        double grad = (u->maximize ? -g : g) * u->grad_scale;
        p *= 1 - u->lr * u->weight_decay;
        m = u->beta1 * m + (1 - u->beta1) * grad;
        v = u->beta2 * v + (1 - u->beta2) * grad * grad;
        double mean = m / (1 - pow(u->beta1, (double)t)), variance = v / (1 - pow(u->beta2, (double)t));
        p -= u->lr * mean / (sqrt(variance) + u->eps);
    }
    return p;
}

static void agrees_with_float64_for_all_dtypes(void **state) {
    (void)state;
    static const struct {
        sth_dtype dtype, grad, moments;
        bool master;
        double tolerance; /* of what the weights become, which are about 1 */
    } kinds[] = {
        {STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false, 1e-6},
        {STH_DTYPE_F32, STH_DTYPE_BF16, STH_DTYPE_F32, false, 1e-6},
        {STH_DTYPE_F32, STH_DTYPE_F64, STH_DTYPE_F32, false, 1e-6},
        {STH_DTYPE_F64, STH_DTYPE_F64, STH_DTYPE_F64, false, 1e-14},
        {STH_DTYPE_F64, STH_DTYPE_F16, STH_DTYPE_F64, false, 1e-14},
        {STH_DTYPE_BF16, STH_DTYPE_BF16, STH_DTYPE_F32, true, 0x1p-8},
        {STH_DTYPE_F16, STH_DTYPE_F16, STH_DTYPE_F32, true, 0x1p-11},
        {STH_DTYPE_BF16, STH_DTYPE_F32, STH_DTYPE_F32, true, 0x1p-8},
        {STH_DTYPE_BF16, STH_DTYPE_BF16, STH_DTYPE_F32, false, 0x1p-5},
        {STH_DTYPE_BF16, STH_DTYPE_BF16, STH_DTYPE_BF16, false, 0x1p-5},
        {STH_DTYPE_F16, STH_DTYPE_F32, STH_DTYPE_F16, false, 0x1p-8},
    };
    sth_adamw *adamw = make(2);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int way = 0; way < 2; way++) {
            parameter x =
                make_parameter(3001, kinds[k].dtype, kinds[k].grad, kinds[k].moments, kinds[k].master);
            double first[3001];
            for (size_t i = 0; i < x.n; i++) first[i] = get(x.p, x.dtype, i);
            sth_adamw_update u = {0};
            for (uint64_t step = 1; step <= 5; step++) {
                u = update_of(&x, step);
                u.maximize = way, u.grad_scale = way ? 0.5 : 1;
                u.beta1 = way ? 0.4 : 0.9; /* lerp from its other end */
                assert_ok(sth_adamw_submit(adamw, &u, NULL));
                assert_ok(sth_adamw_wait(adamw, 0));
            }
            for (size_t i = 0; i < x.n; i++) {
                /* squares of small gradients are not in float16's range */
                if (x.moment_dtype == STH_DTYPE_F16 && fabs(get(x.g, x.grad_dtype, i)) < 0.1) continue;
                double want = reference(first[i], get(x.g, x.grad_dtype, i), 5, &u);
                if (fabs(get(x.p, x.dtype, i) - want) > kinds[k].tolerance)
                    fail_msg("kind %zu, element %zu: %.9g, not %.9g", k, i, get(x.p, x.dtype, i), want);
                /* a master is float32's result, and the weight is it, rounded */
                if (!x.master) continue;
                assert_true(fabs((double)x.master[i] - want) <= 1e-6);
                put(x.g, x.dtype, 0, x.master[i]);
                assert_memory_equal(x.g, (char *)x.p + i * 2, 2);
                put(x.g, x.grad_dtype, 0, 0);
            }
            drop_parameter(&x);
        }
    sth_adamw_destroy(adamw);
}

/* A step of nothing: what the master is afterwards is what the step took it for. */
static void take_masters(sth_adamw *adamw, const parameter *x, bool random, sth_adamw_state in_file) {
    sth_adamw_update u = update_of(x, 1);
    u.lr = u.weight_decay = 0;
    u.stochastic_rounding = random;
    if (in_file) {
        u.exp_avg = u.exp_avg_sq = NULL, u.master = NULL, u.state = in_file;
        assert_ok(sth_adamw_state_write(adamw, in_file, STH_ADAMW_EXP_AVG, x->m));
        assert_ok(sth_adamw_state_write(adamw, in_file, STH_ADAMW_EXP_AVG_SQ, x->v));
        assert_ok(sth_adamw_state_write(adamw, in_file, STH_ADAMW_MASTER, x->master));
    }
    assert_ok(sth_adamw_submit(adamw, &u, NULL));
    assert_ok(sth_adamw_wait(adamw, 0));
    if (in_file) assert_ok(sth_adamw_state_read(adamw, in_file, STH_ADAMW_MASTER, x->master));
}

static void a_weight_that_is_not_its_master_rounded_becomes_it(void **state) {
    (void)state;
    enum { WRITTEN = 6 };
    static const float values[WRITTEN] = {7, -0.0078125f, 0, INFINITY, NAN, 1.015625f};
    sth_adamw *adamw = make_in(2, "/tmp");
    for (int way = 0; way < 8; way++) {
        sth_dtype dtype = way & 1 ? STH_DTYPE_F16 : STH_DTYPE_BF16;
        bool random = way & 2;
        sth_adamw_state in_file = 0;
        if (way & 4) assert_ok(sth_adamw_state_create(adamw, 70001, STH_DTYPE_F32, true, &in_file));
        parameter x = make_parameter(70001, dtype, STH_DTYPE_F32, STH_DTYPE_F32, true);
        float *before = malloc(x.n * sizeof *before);
        for (size_t i = 0; i < x.n; i++) x.master[i] *= 1 + 0x1p-14f; /* rounds to the weight all the same */
        memcpy(before, x.master, x.n * sizeof *before);
        for (size_t i = 0; i < WRITTEN; i++) x.master[x.n / 2 + i] = 1, put(x.p, dtype, x.n / 2 + i, values[i]);
        take_masters(adamw, &x, random, in_file);
        for (size_t i = 0; i < x.n; i++) {
            size_t k = i - x.n / 2;
            float want = k < WRITTEN ? values[k] : before[i];
            if (!(x.master[i] == want) && !(isnan(want) && isnan(x.master[i])))
                fail_msg("way %d, element %zu: %.9g, not %.9g", way, i, (double)x.master[i], (double)want);
        }
        free(before);
        drop_parameter(&x);
    }
    sth_adamw_destroy(adamw);
}

/* Both values next to a master are the master's; a NaN and an infinity are what they were. */
static void what_a_master_may_be_rounded_to_is_not_written(void **state) {
    (void)state;
    static const float masters[] = {1.001f, 1.001f, 1, -0.3f, -0.3f, INFINITY, NAN};
    static const float weights[] = {1, 1.0078125f, 1, -0.298828125f, -0.30078125f, INFINITY, NAN};
    enum { COUNT_OF = sizeof masters / sizeof *masters };
    sth_adamw *adamw = make(1);
    parameter x = make_parameter(COUNT_OF, STH_DTYPE_BF16, STH_DTYPE_F32, STH_DTYPE_F32, true);
    memcpy(x.master, masters, sizeof masters);
    for (size_t i = 0; i < COUNT_OF; i++) put(x.p, x.dtype, i, weights[i]);
    take_masters(adamw, &x, true, 0);
    for (size_t i = 0; i < COUNT_OF; i++)
        assert_true(x.master[i] == masters[i] || (isnan(masters[i]) && isnan(x.master[i])));
    put(x.p, x.dtype, 2, 1.0078125f); /* 1 is exact, and never rounded up */
    take_masters(adamw, &x, true, 0);
    assert_true(x.master[2] == 1.0078125f);
    drop_parameter(&x);
    sth_adamw_destroy(adamw);
}

static void random_rounding_repeats_and_moves_small_steps(void **state) {
    (void)state;
    static uint16_t result[3][COUNT];
    const uint32_t threads[] = {1, 2, 7};
    for (int t = 0; t < 3; t++) {
        sth_adamw *adamw = make(threads[t]);
        parameter x = make_parameter(COUNT, STH_DTYPE_BF16, STH_DTYPE_F32, STH_DTYPE_F32, false);
        for (size_t i = 0; i < x.n; i++) put(x.p, x.dtype, i, 1), put(x.g, x.grad_dtype, i, 1);
        for (uint64_t step = 1; step <= 10; step++) { /* each is a step of -2^-13: nearest would not move */
            sth_adamw_update u = update_of(&x, step);
            u.lr = 0x1p-13, u.weight_decay = 0, u.stochastic_rounding = true, u.seed = 5, u.stream = 3;
            assert_ok(sth_adamw_submit(adamw, &u, NULL));
            assert_ok(sth_adamw_wait(adamw, 0));
        }
        double mean = 0;
        for (size_t i = 0; i < x.n; i++) mean += get(x.p, x.dtype, i) / COUNT;
        /* the deviation of one rounding is below 2^-9, of ten of them below 2^-7, of the mean 2^-7 / 444 */
        assert_true(fabs(mean - (1 - 10 * 0x1p-13)) < 5 * 0x1p-7 / 444);
        memcpy(result[t], x.p, sizeof result[t]);
        drop_parameter(&x);
        sth_adamw_destroy(adamw);
    }
    assert_memory_equal(result[0], result[1], sizeof result[0]);
    assert_memory_equal(result[0], result[2], sizeof result[0]);
}

/* ---- threads ---- */

static void the_number_of_threads_changes_no_bit(void **state) {
    (void)state;
    static float p[3][COUNT], m[3][COUNT], v[3][COUNT];
    static uint16_t low[3][COUNT];
    double sums[3];
    const uint32_t threads[] = {1, 2, 7};
    for (int t = 0; t < 3; t++) {
        sth_adamw *adamw = make(threads[t]);
        assert_int_equal(sth_adamw_threads(adamw), threads[t]);
        parameter x = make_parameter(COUNT, STH_DTYPE_BF16, STH_DTYPE_BF16, STH_DTYPE_F32, true);
        for (uint64_t step = 1; step <= 3; step++) {
            sth_adamw_update u = update_of(&x, step);
            assert_ok(sth_adamw_submit(adamw, &u, NULL));
            assert_ok(sth_adamw_wait(adamw, 0));
        }
        memcpy(p[t], x.master, sizeof p[t]), memcpy(m[t], x.m, sizeof m[t]), memcpy(v[t], x.v, sizeof v[t]);
        memcpy(low[t], x.p, sizeof low[t]);
        sth_grad grads[] = {
            {x.g, COUNT, STH_DTYPE_BF16}, {x.m, 0, STH_DTYPE_F32}, {x.m, 70000, STH_DTYPE_F32}};
        assert_ok(sth_adamw_sum_squares(adamw, grads, 3, &sums[t]));
        drop_parameter(&x);
        sth_adamw_destroy(adamw);
        assert_true(sums[t] == sums[0]);
        assert_memory_equal(p[0], p[t], sizeof p[0]);
        assert_memory_equal(m[0], m[t], sizeof m[0]);
        assert_memory_equal(v[0], v[t], sizeof v[0]);
        assert_memory_equal(low[0], low[t], sizeof low[0]);
    }
}

static void many_updates_are_under_way_at_once(void **state) {
    (void)state;
    enum { MANY = 200 };
    sth_adamw *adamw = make(3);
    parameter x[MANY];
    uint64_t tickets[MANY];
    for (size_t i = 0; i < MANY; i++)
        x[i] = make_parameter(i * 37, STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false);
    for (uint64_t step = 1; step <= 2; step++) {
        for (size_t i = 0; i < MANY; i++) {
            sth_adamw_update u = update_of(&x[i], step);
            assert_ok(sth_adamw_submit(adamw, &u, &tickets[i]));
            assert_true(i == 0 || tickets[i] > tickets[i - 1]);
        }
        assert_ok(sth_adamw_wait(adamw, tickets[MANY / 2]));
        assert_true(get(x[MANY / 2].v, STH_DTYPE_F32, 0) > 0);
        assert_ok(sth_adamw_wait(adamw, 0));
        assert_ok(sth_adamw_wait(adamw, tickets[3])); /* long done */
    }
    for (size_t i = 1; i < MANY; i++) /* the same values as the longest one, whose beginning they are */
        assert_memory_equal(x[i].p, x[MANY - 1].p, i * 37 * sizeof(float));
    for (size_t i = 0; i < MANY; i++) drop_parameter(&x[i]);
    sth_adamw_destroy(adamw);
}

static void destroy_finishes_what_was_submitted(void **state) {
    (void)state;
    sth_adamw *adamw = make(2);
    parameter x = make_parameter(COUNT, STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false);
    sth_adamw_update u = update_of(&x, 1);
    assert_ok(sth_adamw_submit(adamw, &u, NULL));
    sth_adamw_destroy(adamw);
    assert_true(get(x.v, STH_DTYPE_F32, COUNT - 1) > 0);
    drop_parameter(&x);
    sth_adamw_destroy(NULL);
}

static void a_forked_child_is_refused(void **state) {
    (void)state;
    sth_adamw *adamw = make(1);
    parameter x = make_parameter(8, STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false);
    sth_adamw_update u = update_of(&x, 1);
    pid_t child = fork();
    if (!child) {
        double sum;
        sth_grad grad = {x.g, 8, STH_DTYPE_F32};
        bool refused = sth_adamw_submit(adamw, &u, NULL) == STH_INVALID_STATE &&
                       sth_adamw_wait(adamw, 0) == STH_INVALID_STATE &&
                       sth_adamw_sum_squares(adamw, &grad, 1, &sum) == STH_INVALID_STATE;
        sth_adamw_destroy(adamw);
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_ok(sth_adamw_submit(adamw, &u, NULL));
    assert_ok(sth_adamw_wait(adamw, 0));
    drop_parameter(&x);
    sth_adamw_destroy(adamw);
}

/* ---- the file ---- */

static void state_in_the_file_gives_the_same_bits(void **state) {
    (void)state;
    static const struct {
        sth_dtype dtype, moments;
        bool master;
    } kinds[] = {
        {STH_DTYPE_F32, STH_DTYPE_F32, false},
        {STH_DTYPE_BF16, STH_DTYPE_F32, true},
        {STH_DTYPE_F16, STH_DTYPE_F16, false},
        {STH_DTYPE_F64, STH_DTYPE_F64, false},
    };
    sth_adamw *adamw = make_in(3, "/tmp");
    uint64_t before = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        parameter a =
            make_parameter(COUNT, kinds[k].dtype, kinds[k].dtype, kinds[k].moments, kinds[k].master);
        parameter b =
            make_parameter(COUNT, kinds[k].dtype, kinds[k].dtype, kinds[k].moments, kinds[k].master);
        sth_adamw_state s;
        assert_ok(sth_adamw_state_create(adamw, COUNT, kinds[k].moments, kinds[k].master, &s));
        assert_true(sth_adamw_file_bytes(adamw) - before >= COUNT * (2 * size_of(kinds[k].moments)));
        before = sth_adamw_file_bytes(adamw);
        for (uint64_t step = 1; step <= 3; step++) {
            sth_adamw_update in_ram = update_of(&a, step), in_file = update_of(&b, step);
            in_file.exp_avg = in_file.exp_avg_sq = NULL, in_file.master = NULL, in_file.state = s;
            assert_ok(sth_adamw_submit(adamw, &in_ram, NULL));
            assert_ok(sth_adamw_submit(adamw, &in_file, NULL));
            assert_ok(sth_adamw_wait(adamw, 0));
        }
        assert_ok(sth_adamw_state_read(adamw, s, STH_ADAMW_EXP_AVG, b.m));
        assert_ok(sth_adamw_state_read(adamw, s, STH_ADAMW_EXP_AVG_SQ, b.v));
        assert_memory_equal(a.p, b.p, COUNT * size_of(a.dtype));
        assert_memory_equal(a.m, b.m, COUNT * size_of(a.moment_dtype));
        assert_memory_equal(a.v, b.v, COUNT * size_of(a.moment_dtype));
        if (a.master) {
            assert_ok(sth_adamw_state_read(adamw, s, STH_ADAMW_MASTER, b.master));
            assert_memory_equal(a.master, b.master, COUNT * sizeof(float));
        } else
            assert_status(sth_adamw_state_read(adamw, s, STH_ADAMW_MASTER, b.p), STH_INVALID_ARGUMENT);
        /* what is written is what the next update begins from */
        memset(b.m, 0, COUNT * size_of(a.moment_dtype));
        memset(a.m, 0, COUNT * size_of(a.moment_dtype));
        assert_ok(sth_adamw_state_write(adamw, s, STH_ADAMW_EXP_AVG, b.m));
        sth_adamw_update in_ram = update_of(&a, 4), in_file = update_of(&b, 4);
        in_file.exp_avg = in_file.exp_avg_sq = NULL, in_file.master = NULL, in_file.state = s;
        assert_ok(sth_adamw_submit(adamw, &in_ram, NULL));
        assert_ok(sth_adamw_submit(adamw, &in_file, NULL));
        assert_ok(sth_adamw_wait(adamw, 0));
        assert_memory_equal(a.p, b.p, COUNT * size_of(a.dtype));
        drop_parameter(&a);
        drop_parameter(&b);
    }
    sth_adamw_destroy(adamw);
}

static void a_write_that_fails_is_the_waiters_error(void **state) {
    (void)state;
    sth_adamw *adamw = make_in(1, "/tmp");
    parameter x = make_parameter(COUNT, STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false);
    parameter first = make_parameter(COUNT, STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false);
    sth_adamw_state s;
    assert_ok(sth_adamw_state_create(adamw, COUNT, STH_DTYPE_F32, false, &s));
    sth_adamw_update u = update_of(&x, 1);
    u.exp_avg = u.exp_avg_sq = NULL, u.state = s;
    uint64_t ticket;
    const sthi_fault_kind kinds[] = {STHI_FAULT_WRITE, STHI_FAULT_READ};
    for (int k = 0; k < 2; k++) {
        memcpy(first.p, x.p, COUNT * sizeof(float));
        u.step = (uint64_t)k + 1;
        sthi_fault_arm(kinds[k], 2, true); /* the second piece and what follows */
        assert_ok(sth_adamw_submit(adamw, &u, &ticket));
        assert_status(sth_adamw_wait(adamw, ticket), STH_IO);
        sthi_fault_disarm_all();
        assert_string_equal(sth_last_error()->object, "/tmp");
        assert_ok(sth_adamw_wait(adamw, 0)); /* told once */
        /* weights of pieces whose state was not written stayed as they were */
        assert_memory_not_equal(first.p, x.p, CHUNK * sizeof(float));
        assert_memory_equal((float *)first.p + CHUNK, (float *)x.p + CHUNK, (COUNT - CHUNK) * sizeof(float));
    }
    u.step = 3;
    assert_ok(sth_adamw_submit(adamw, &u, NULL));
    assert_ok(sth_adamw_wait(adamw, 0));
    drop_parameter(&x);
    drop_parameter(&first);
    sth_adamw_destroy(adamw);
}

/* ---- refusals and failures ---- */

static void refuses_what_cannot_be(void **state) {
    (void)state;
    sth_adamw *adamw = make(1), *none = NULL;
    parameter x = make_parameter(8, STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false);
    sth_adamw_update good = update_of(&x, 1), u;
    sth_adamw_state s;
    assert_status(sth_adamw_state_create(adamw, 8, STH_DTYPE_F32, false, &s), STH_INVALID_STATE);
#define REFUSED(change) \
    do { \
        u = good; \
        change; \
        assert_status(sth_adamw_submit(adamw, &u, NULL), STH_INVALID_ARGUMENT); \
    } while (0)
    REFUSED(u.size = 8);
    REFUSED(u.step = 0);
    REFUSED(u.param = NULL);
    REFUSED(u.grad = NULL);
    REFUSED(u.exp_avg = NULL);
    REFUSED(u.exp_avg_sq = NULL);
    REFUSED(u.count = UINT64_MAX);
    REFUSED(u.param_dtype = STH_DTYPE_I32);
    REFUSED(u.grad_dtype = STH_DTYPE_BOOL);
    REFUSED(u.moment_dtype = STH_DTYPE_BF16);
    REFUSED(u.param_dtype = STH_DTYPE_F64);
    REFUSED(u.master = x.p); /* of a float32 parameter */
    REFUSED(u.state = 1);
    assert_ok(sth_adamw_submit(adamw, &good, NULL));
    assert_ok(sth_adamw_wait(adamw, 0));
    sth_adamw_options options;
    sth_adamw_options_init(&options);
    options.threads = 257;
    assert_status(sth_adamw_create(&options, &none), STH_INVALID_ARGUMENT);
    options.threads = 1, options.state_path = "/nowhere/at/all";
    assert_status(sth_adamw_create(&options, &none), STH_NOT_FOUND);
    assert_null(none);
    assert_status(sth_adamw_create(NULL, &none), STH_INVALID_ARGUMENT);
    sth_grad grad = {x.g, 8, STH_DTYPE_I32};
    double sum;
    assert_status(sth_adamw_sum_squares(adamw, &grad, 1, &sum), STH_INVALID_ARGUMENT);
    assert_status(sth_adamw_scale(adamw, &grad, 1, 2), STH_INVALID_ARGUMENT);
    assert_ok(sth_adamw_sum_squares(adamw, NULL, 0, &sum));
    assert_true(sum == 0);
    drop_parameter(&x);
    sth_adamw_destroy(adamw);
}

/* One life of an optimiser with state in a file; false when a call failed. */
static bool scenario(parameter *x) {
    sth_adamw_options options;
    sth_adamw *adamw = NULL;
    sth_adamw_state s;
    double sum;
    sth_grad grad = {x->g, x->n, x->grad_dtype};
    sth_adamw_options_init(&options);
    options.threads = 2, options.state_path = "/tmp";
    if (sth_adamw_create(&options, &adamw) != STH_OK) return false;
    bool done = sth_adamw_state_create(adamw, x->n, STH_DTYPE_F32, false, &s) == STH_OK;
    sth_adamw_update u = update_of(x, 1);
    u.exp_avg = u.exp_avg_sq = NULL, u.state = s;
    done = done && sth_adamw_submit(adamw, &u, NULL) == STH_OK && sth_adamw_wait(adamw, 0) == STH_OK;
    u.step = 2;
    done = done && sth_adamw_submit(adamw, &u, NULL) == STH_OK && sth_adamw_wait(adamw, 0) == STH_OK;
    done = done && sth_adamw_sum_squares(adamw, &grad, 1, &sum) == STH_OK;
    sth_adamw_destroy(adamw);
    return done;
}

static void any_failure_leaves_nothing_behind(void **state) {
    (void)state;
    parameter x = make_parameter(COUNT, STH_DTYPE_F32, STH_DTYPE_F32, STH_DTYPE_F32, false);
    const sthi_fault_kind kinds[] = {STHI_FAULT_ALLOC, STHI_FAULT_THREAD, STHI_FAULT_READ, STHI_FAULT_WRITE};
    long live = sthi_alloc_live();
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        uint64_t n = 1;
        for (bool done = false; !done; n++) {
            sthi_fault_arm(kinds[k], n, false);
            done = scenario(&x);
            sthi_fault_disarm_all();
            assert_int_equal(sthi_alloc_live(), live);
            assert_true(n < 50);
        }
        assert_true(n > 2); /* it failed at least once */
    }
    drop_parameter(&x);
}

static void cores_are_no_more_than_processors(void **state) {
    (void)state;
    assert_true(sthi_core_count() >= 1 && sthi_core_count() <= sthi_cpu_count());
    sth_adamw *adamw = make(0);
    int cores = sthi_core_count();
    assert_int_equal(sth_adamw_threads(adamw), cores < 16 ? cores : 16);
    sth_adamw_destroy(adamw);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_float64_for_all_dtypes),
        cmocka_unit_test(a_weight_that_is_not_its_master_rounded_becomes_it),
        cmocka_unit_test(what_a_master_may_be_rounded_to_is_not_written),
        cmocka_unit_test(random_rounding_repeats_and_moves_small_steps),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
        cmocka_unit_test(many_updates_are_under_way_at_once),
        cmocka_unit_test(destroy_finishes_what_was_submitted),
        cmocka_unit_test(a_forked_child_is_refused),
        cmocka_unit_test(state_in_the_file_gives_the_same_bits),
        cmocka_unit_test(a_write_that_fails_is_the_waiters_error),
        cmocka_unit_test(refuses_what_cannot_be),
        cmocka_unit_test(any_failure_leaves_nothing_behind),
        cmocka_unit_test(cores_are_no_more_than_processors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
