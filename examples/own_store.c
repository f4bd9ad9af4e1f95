/* A store of one's own: layers that are computed when they are asked for, by a thread of the store's, and streamed
 * through the reference executor. In the place of compute() may stand a socket, a decoder, or another process.
 *
 *   own_store [LAYERS [BUDGET]]
 *
 * Build: cc -std=c17 own_store.c $(pkg-config --cflags --libs stagehand) -lpthread -o own_store */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stagehand/stagehand.h>

enum { WIDTH = 32, MOST = 64 };

typedef enum state { IDLE, ASKED, READY } state;

typedef struct store {
    uint32_t layers;
    char name[16];
    sth_store_tensor weight;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    state states[MOST];
    float *bytes[MOST];
    bool stop;
    int computed, alive, most_alive;
} store;

static float *compute(uint32_t layer) { /* a rotation of the inputs by one, times something */
    float *w = calloc(WIDTH * WIDTH, sizeof *w);
    for (int i = 0; w && i < WIDTH; i++) w[i * WIDTH + (i + 1) % WIDTH] = layer % 2 ? 2.0f : 0.5f;
    return w;
}

/* The store's own thread brings what was asked for. */
static void *bring(void *arg) {
    store *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        uint32_t i = 0;
        while (i < s->layers && s->states[i] != ASKED) i++;
        if (i == s->layers) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        float *bytes = compute(i);
        pthread_mutex_lock(&s->lock);
        s->bytes[i] = bytes;
        s->states[i] = READY;
        s->computed++;
        if (++s->alive > s->most_alive) s->most_alive = s->alive;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static uint32_t layer_count(void *self) { return ((store *)self)->layers; }

static sth_status layer(void *self, uint32_t i, sth_store_layer *out) {
    store *s = self;
    snprintf(s->name, sizeof s->name, "layers.%u", i % 1000);
    s->weight = (sth_store_tensor){.name = "weight", .dtype = STH_DTYPE_F32, .rank = 2, .shape = {WIDTH, WIDTH},
                                   .bytes = WIDTH * WIDTH * 4};
    *out = (sth_store_layer){s->name, s->weight.bytes, &s->weight, 1};
    return STH_OK;
}

static sth_status request(void *self, uint32_t i) {
    store *s = self;
    pthread_mutex_lock(&s->lock);
    s->states[i] = ASKED;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return STH_OK;
}

static sth_status wait_for(void *self, uint32_t i) {
    store *s = self;
    pthread_mutex_lock(&s->lock);
    while (s->states[i] != READY) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return s->bytes[i] ? STH_OK : sth_error_set(STH_OUT_OF_HOST_MEMORY, "own_store", 0, NULL, "no memory for a layer");
}

static const void *get(void *self, uint32_t i) { return ((store *)self)->bytes[i]; }

static void release(void *self, uint32_t i) {
    store *s = self;
    pthread_mutex_lock(&s->lock);
    while (s->states[i] == ASKED) pthread_cond_wait(&s->changed, &s->lock); /* given up before it came */
    free(s->bytes[i]);
    s->bytes[i] = NULL;
    s->states[i] = IDLE;
    s->alive--;
    pthread_mutex_unlock(&s->lock);
}

static sth_status stream(store *s, const char *budget) {
    sth_store_ops table = {.struct_size = sizeof table, .version = STH_STORE_VERSION, .kind = "computed",
                           .layer_count = layer_count, .layer = layer, .request = request, .wait = wait_for,
                           .get = get, .release = release};
    sth_device *device = NULL;
    sth_store *handle = NULL;
    sth_executor *executor = NULL;
    sth_runner *runner = NULL;
    sth_mlp_options mlp;
    sth_runner_options options;
    float x[WIDTH], y[WIDTH];
    for (int i = 0; i < WIDTH; i++) x[i] = (float)i;
    sth_activations in = {1, {{STH_DTYPE_F32, 1, {WIDTH}, (uintptr_t)x, 0}}};
    sth_activations out = {1, {{.address = (uintptr_t)y, .bytes = sizeof y}}};
    sth_mlp_options_init(&mlp);
    sth_runner_options_init(&options);
    sth_status rc = sth_parse_size(budget, &options.runtime.budget);
    if (rc == STH_OK) rc = sth_store_create(&table, s, &handle);
    if (rc == STH_OK) rc = sth_device_open("sim", NULL, &device);
    if (rc == STH_OK) rc = sth_executor_cpu_create(&mlp, &executor);
    if (rc == STH_OK) rc = sth_runner_create(device, handle, executor, &options, &runner);
    for (int run = 0; run < 3 && rc == STH_OK; run++) rc = sth_runner_run_host(runner, &in, &out);
    if (rc != STH_OK) fprintf(stderr, "%s: %s\n", sth_status_name(rc), sth_last_error()->message);
    sth_runner_destroy(runner);
    sth_executor_close(executor);
    sth_store_close(handle);
    sth_device_close(device);
    for (int i = 0; i < WIDTH && rc == STH_OK; i++) { /* as many doublings as halvings: a rotation is left */
        if (y[i] == x[(i + (int)s->layers) % WIDTH] * (s->layers % 2 ? 0.5f : 1)) continue;
        fprintf(stderr, "output %d is %g\n", i, (double)y[i]);
        return STH_INTERNAL;
    }
    return rc;
}

int main(int argc, char **argv) {
    store s = {.layers = argc > 1 ? (uint32_t)atoi(argv[1]) : 12};
    if (argc > 3 || !s.layers || s.layers > MOST) {
        fprintf(stderr, "usage: own_store [LAYERS (1 to %d) [BUDGET]]\n", MOST);
        return 2;
    }
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.changed, NULL);
    if (pthread_create(&s.thread, NULL, bring, &s)) return 1;
    sth_status rc = stream(&s, argc > 2 ? argv[2] : "20KB");
    pthread_mutex_lock(&s.lock);
    s.stop = true;
    pthread_cond_broadcast(&s.changed);
    pthread_mutex_unlock(&s.lock);
    pthread_join(s.thread, NULL);
    if (rc == STH_OK) printf("%u layers, computed %d times, at most %d at once\n", s.layers, s.computed, s.most_alive);
    return rc == STH_OK ? 0 : 1;
}
