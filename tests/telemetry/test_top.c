/* Pages of the live view: what a process stores is what a reader gets, whole; pages come and go with their runtimes and
 * processes; nobody else's pages are read; bytes that lie are passed over. */
#define _GNU_SOURCE
#include "telemetry/top.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/memory.h"
#include "stagehand/stagehand.h"
#include "support/check.h"

static char session[64], folder[96];

static int begin(void **state) {
    (void)state;
    snprintf(session, sizeof session, "/tmp/sth-top-XXXXXX");
    if (!mkdtemp(session)) return -1;
    snprintf(folder, sizeof folder, "%s/stagehand", session);
    return setenv("XDG_RUNTIME_DIR", session, 1) || setenv("STAGEHAND_TOP", "1", 1);
}

static int end(void **state) {
    (void)state;
    char command[128];
    sthi_fault_disarm_all();
    snprintf(command, sizeof command, "rm -r %s", session);
    return system(command);
}

/* Names of files in the folder, hidden ones included. */
static int count_files(void) {
    char command[160];
    int n = -1;
    snprintf(command, sizeof command, "ls -A %s 2>/dev/null | wc -l", folder);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%d", &n), 1);
    pclose(f);
    return n;
}

static sth_top_list look(int32_t pid) {
    sth_top_list list;
    assert_ok(sth_top_read(pid, &list));
    return list;
}

static uint32_t seen(int32_t pid) {
    sth_top_list list = look(pid);
    uint32_t n = list.count;
    sth_top_free(&list);
    assert_int_equal(list.count, 0);
    return n;
}

/* ---- pages of this process ---- */

static void stored_figures_are_read(void **state) {
    (void)state;
    sthi_top_place *place = sthi_top_open("transformer", "cuda:0 a card");
    assert_non_null(place);
    sth_top_figures f = {.steps = 7, .budget = 1000, .demand_loads = 3, .planned = 1, .bound_by = STH_BOUND_DISK,
                         .step = {.step = 6, .step_time_ms = 1.5, .link_gb_s = 20}};
    sthi_top_store(place, &f);
    sth_top_list list = look(getpid());
    assert_int_equal(list.count, 1);
    assert_int_equal(list.passed_over, 0);
    sth_top_runtime *r = &list.runtimes[0];
    assert_int_equal(r->pid, getpid());
    assert_non_null(strstr(r->program, "top"));
    assert_string_equal(r->figures.name, "transformer");
    assert_string_equal(r->figures.device, "cuda:0 a card");
    assert_memory_equal(&r->figures, &f, offsetof(sth_top_figures, name));
    assert_true(r->age_s >= 0 && r->age_s < 60);
    sth_top_free(&list);
    assert_int_equal(seen(1), 0);
    sthi_top_close(place);
    assert_int_equal(count_files(), 0);
    assert_int_equal(seen(getpid()), 0);
}

static void the_page_goes_with_the_last_place(void **state) {
    (void)state;
    sthi_top_place *places[STHI_TOP_PLACES];
    for (int i = 0; i < STHI_TOP_PLACES; i++) assert_non_null(places[i] = sthi_top_open("model", "sim:0"));
    assert_null(sthi_top_open("one too many", "sim:0"));
    assert_int_equal(seen(getpid()), STHI_TOP_PLACES);
    sthi_top_close(places[4]);
    assert_int_equal(seen(getpid()), STHI_TOP_PLACES - 1);
    places[4] = sthi_top_open("again", "sim:0");
    sth_top_list list = look(getpid());
    assert_int_equal(list.runtimes[4].place, 4);
    assert_string_equal(list.runtimes[4].figures.name, "again");
    assert_int_equal(list.runtimes[4].figures.steps, 0);
    sth_top_free(&list);
    for (int i = 0; i < STHI_TOP_PLACES; i++) {
        assert_int_equal(count_files(), 1);
        sthi_top_close(places[i]);
    }
    assert_int_equal(count_files(), 0);
}

static void a_process_may_turn_it_off_or_fail_to_make_its_file(void **state) {
    (void)state;
    setenv("STAGEHAND_TOP", "0", 1);
    assert_null(sthi_top_open("model", "sim:0"));
    sthi_top_close(NULL);
    setenv("STAGEHAND_TOP", "1", 1);
    sthi_fault_arm(STHI_FAULT_WRITE, 1, true);
    assert_null(sthi_top_open("model", "sim:0"));
    assert_int_equal(count_files(), 0);
    sthi_fault_disarm_all();
    sthi_top_place *place = sthi_top_open("model", "sim:0");
    assert_non_null(place);
    sthi_top_close(place);
}

static void a_folder_that_others_may_enter_is_not_used(void **state) {
    (void)state;
    assert_int_equal(mkdir(folder, 0700), 0);
    assert_int_equal(chmod(folder, 0755), 0);
    assert_int_equal(sthi_top_enter(folder, true), -1);
    assert_int_equal(chmod(folder, 0700), 0);
    int fd = sthi_top_enter(folder, false);
    assert_true(fd >= 0);
    close(fd);
    char link[128];
    snprintf(link, sizeof link, "%s/link", session);
    assert_int_equal(symlink(folder, link), 0);
    assert_int_equal(sthi_top_enter(link, false), -1);
    assert_int_equal(sthi_top_enter("/tmp", false), -1);
}

/* ---- other processes ---- */

/* Runs `body` in a child; its exit code. */
static int in_child(int (*body)(void)) {
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(body());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int publish_own(void) {
    sth_top_list list;
    sthi_top_place *place = sthi_top_open("child", "sim:0");
    bool fine = place && sth_top_read(getpid(), &list) == STH_OK && list.count == 1 &&
                strcmp(list.runtimes[0].figures.name, "child") == 0;
    sthi_top_close(place);
    return fine ? 0 : 1;
}

static void a_child_has_a_page_of_its_own(void **state) {
    (void)state;
    sthi_top_place *place = sthi_top_open("parent", "sim:0");
    assert_non_null(place);
    assert_int_equal(in_child(publish_own), 0);
    assert_int_equal(count_files(), 1);
    assert_int_equal(seen(getpid()), 1);
    sthi_top_store(place, &(sth_top_figures){.steps = 1});
    sthi_top_close(place);
    assert_int_equal(count_files(), 0);
}

static int die_with_a_page(void) { return sthi_top_open("lost", "sim:0") ? 0 : 1; }

static void a_page_without_its_process_is_removed(void **state) {
    (void)state;
    assert_int_equal(in_child(die_with_a_page), 0);
    assert_int_equal(count_files(), 1);
    (void)seen(0);
    assert_int_equal(count_files(), 0);
}

static int keep_a_page_and_fork(void) {
    if (!sthi_top_open("lost", "sim:0")) return 1;
    pid_t child = fork(); /* it lives on: the page must not */
    if (child == 0) {
        pause();
        _exit(0);
    }
    char path[128];
    snprintf(path, sizeof path, "%s/child", session);
    FILE *f = fopen(path, "w");
    if (!f) return 1;
    fprintf(f, "%d", (int)child);
    return fclose(f);
}

static void a_child_does_not_keep_its_parents_page(void **state) {
    (void)state;
    char path[128];
    int child = 0;
    assert_int_equal(in_child(keep_a_page_and_fork), 0);
    assert_int_equal(count_files(), 1);
    (void)seen(0);
    assert_int_equal(count_files(), 0);
    snprintf(path, sizeof path, "%s/child", session);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%d", &child), 1);
    fclose(f);
    assert_int_equal(kill(child, SIGKILL), 0);
}

/* ---- the sequence lock ---- */

enum { STORES = 20000 };

static void *store_often(void *place) {
    for (uint64_t i = 1; i <= few_under_tsan(1000, STORES); i++) {
        sth_step_metrics step = {.step = (double)i, .link_gb_s = (double)i};
        sth_top_figures f = {.steps = i, .budget = i, .replans = i, .step = step};
        sthi_top_store(place, &f);
    }
    return NULL;
}

static void figures_are_of_one_store(void **state) {
    (void)state;
    pthread_t writer;
    sthi_top_place *place = sthi_top_open("model", "sim:0");
    assert_int_equal(pthread_create(&writer, NULL, store_often, place), 0);
    for (uint64_t last = 0; last < few_under_tsan(1000, STORES);) {
        sth_top_list list = look(getpid());
        if (list.count) { /* else it was stored into each time: passed over */
            sth_top_figures *f = &list.runtimes[0].figures;
            assert_true(f->steps >= last && f->budget == f->steps && f->replans == f->steps);
            assert_true(f->step.step == (double)f->steps && f->step.link_gb_s == (double)f->steps);
            last = f->steps;
        }
        sth_top_free(&list);
    }
    pthread_join(writer, NULL);
    sthi_top_close(place);
}

/* ---- pages that lie ---- */

#define NOBODY 2147480077 /* a PID that no system gives */
#define PAGE_OF_NOBODY "2147480077-1f.page"

/* A page as this version writes it, with one taken place. */
static void fill(sthi_top_page *page, sthi_top_words *words) {
    memset(page, 0, sizeof *page);
    page->header = (sthi_top_header){.magic = STHI_TOP_MAGIC, .version = STHI_TOP_VERSION, .pid = NOBODY,
                                     .places = STHI_TOP_PLACES, .place_bytes = STHI_TOP_PLACE_BYTES,
                                     .figures_bytes = sizeof(sth_top_figures), .program = "program"};
    *words = (sthi_top_words){.taken = 1, .figures = {.name = "model", .device = "sim:0"}};
}

/* Writes the page and keeps its lock, as its process would; the descriptor. */
static int put(const sthi_top_page *page, const sthi_top_words *words, const char *name, size_t bytes) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    (void)mkdir(folder, 0700);
    sthi_top_page copy = *page;
    memcpy((char *)copy.places[0].words, words, sizeof *words);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, &copy, bytes), (ssize_t)bytes);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    return fd;
}

/* How a page is taken: models, and pages that were passed over. */
static void expect(const sthi_top_page *page, const sthi_top_words *words, uint32_t count, uint32_t passed_over) {
    int fd = put(page, words, PAGE_OF_NOBODY, sizeof *page);
    sth_top_list list = look(NOBODY);
    assert_int_equal(list.count, count);
    assert_int_equal(list.passed_over, passed_over);
    sth_top_free(&list);
    close(fd);
    assert_int_equal(seen(NOBODY), 0);
    assert_int_equal(count_files(), 0);
}

static void pages_that_lie_are_passed_over(void **state) {
    (void)state;
    sthi_top_page page;
    sthi_top_words words;
    fill(&page, &words);
    expect(&page, &words, 1, 0);
    page.header.version++;
    expect(&page, &words, 0, 1);
    fill(&page, &words);
    page.header.pid--;
    expect(&page, &words, 0, 1);
    fill(&page, &words);
    page.header.places = UINT32_MAX;
    expect(&page, &words, 0, 1);
    fill(&page, &words);
    words.taken = 2;
    expect(&page, &words, 0, 1);
    fill(&page, &words);
    words.figures.step.step_time_ms = NAN;
    expect(&page, &words, 0, 1);
    fill(&page, &words);
    words.figures.bound_by = 99;
    expect(&page, &words, 0, 1);
    fill(&page, &words);
    page.places[0].sequence = 3; /* stored into for ever */
    expect(&page, &words, 0, 1);
    fill(&page, &words);
    words.stored_ns = UINT64_MAX;
    expect(&page, &words, 1, 0);
}

static void other_files_are_left_alone(void **state) {
    (void)state;
    static const char *const names[] = {"77.page", "077-1.page", "77-.page", "77-1.page.x", "-1-1.page", "x-1.page",
                                        "99999999999-1.page", ".77-1.page"};
    sthi_top_page page;
    sthi_top_words words;
    fill(&page, &words);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) close(put(&page, &words, names[i], sizeof page));
    close(put(&page, &words, "77-2.page", sizeof page - 1)); /* not as large as a page */
    (void)seen(0);
    assert_int_equal(count_files(), (int)(sizeof names / sizeof *names) + 1);
}

static void texts_are_cleaned(void **state) {
    (void)state;
    static const struct { const char *from, *to; } cases[] = {
        {"plain", "plain"}, {"\033[2Jx\n", "?[2Jx?"}, {"\xc3\xa9", "\xc3\xa9"}, {"\xff\xfe", "??"},
        {"\x9b" "2J", "?2J"}, {"\xc2\x9b", "??"}, {"a\xe2\x82", "a"}, {"\xf0\x9f\x92\xa1", "\xf0\x9f\x92\xa1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[32];
        memset(text, 'x', sizeof text);
        snprintf(text, sizeof text, "%s", cases[i].from);
        sthi_top_clean(text, sizeof text);
        assert_string_equal(text, cases[i].to);
    }
    char endless[8] = {'a', 'a', 'a', 'a', 'a', 'a', (char)0xc3, (char)0xa9};
    sthi_top_clean(endless, sizeof endless);
    assert_string_equal(endless, "aaaaaa");
}

/* ---- a runtime ---- */

static void a_runtime_is_seen_from_seal_to_destroy(void **state) {
    (void)state;
    sth_sim_options sim;
    sth_runtime_options options;
    sth_device *device;
    sth_runtime *runtime;
    sth_sim_options_init(&sim);
    sim.virtual_time = true;
    sth_runtime_options_init(&options);
    options.budget = 4 * 4096;
    options.name = "unet";
    static char image[8][4096];
    assert_ok(sth_device_open("sim", &sim, &device));
    assert_ok(sth_runtime_create(device, &options, &runtime));
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t unit;
        sth_unit_desc desc = {.name = "unit", .bytes = sizeof image[i], .host = image[i]};
        assert_ok(sth_runtime_add_unit(runtime, &desc, &unit));
    }
    assert_int_equal(seen(getpid()), 0);
    assert_ok(sth_runtime_seal(runtime));
    assert_int_equal(seen(getpid()), 1);
    for (int step = 0; step < 5; step++) {
        assert_ok(sth_step_begin(runtime));
        for (uint32_t unit = 0; unit < 8; unit++) {
            sth_lease lease;
            assert_ok(sth_unit_acquire(runtime, unit, 0, &lease));
            assert_ok(sth_sim_compute(device, 0, 20000));
            sth_lease_release(runtime, &lease);
        }
        assert_ok(sth_step_end(runtime));
    }
    sth_step_metrics newest;
    sth_runtime_stats stats;
    sth_prediction prediction;
    sth_top_list list = look(getpid());
    assert_ok(sth_runtime_step_metrics(runtime, 0, &newest));
    assert_ok(sth_runtime_stats_get(runtime, &stats));
    assert_ok(sth_runtime_prediction(runtime, &prediction));
    sth_top_figures *f = &list.runtimes[0].figures;
    assert_string_equal(f->name, "unet");
    assert_string_equal(f->device, "sim:0");
    assert_int_equal(f->steps, 5);
    assert_int_equal(f->budget, options.budget);
    assert_int_equal(f->device_bytes, stats.device_bytes);
    assert_int_equal(f->h2d_bytes, stats.h2d_bytes);
    assert_int_equal(f->resident_bytes, prediction.resident_bytes);
    assert_int_equal(f->ring_bytes, prediction.ring_bytes);
    assert_true(f->planned && !f->parked && f->step.step_time_ms > 0);
    assert_memory_equal(&f->step, &newest, sizeof newest);
    sth_top_free(&list);
    assert_ok(sth_runtime_set_budget(runtime, 5 * 4096));
    list = look(getpid());
    assert_int_equal(list.runtimes[0].figures.budget, 5 * 4096);
    sth_top_free(&list);
    sth_runtime_destroy(runtime);
    sth_device_close(device);
    assert_int_equal(seen(getpid()), 0);
    assert_int_equal(count_files(), 0);
}

static void wrong_calls_are_refused(void **state) {
    (void)state;
    sth_top_list list;
    assert_status(sth_top_read(-1, &list), STH_INVALID_ARGUMENT);
    assert_status(sth_top_read(0, NULL), STH_INVALID_ARGUMENT);
    sth_top_free(NULL);
    sthi_top_place *place = sthi_top_open("model", "sim:0");
    sthi_fault_arm(STHI_FAULT_ALLOC, 1, false);
    assert_status(sth_top_read(0, &list), STH_OUT_OF_HOST_MEMORY);
    sthi_top_close(place);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(void) {
    const struct CMUnitTest cases[] = {
        CASE(stored_figures_are_read),
        CASE(the_page_goes_with_the_last_place),
        CASE(a_process_may_turn_it_off_or_fail_to_make_its_file),
        CASE(a_folder_that_others_may_enter_is_not_used),
        CASE(a_child_has_a_page_of_its_own),
        CASE(a_page_without_its_process_is_removed),
        CASE(a_child_does_not_keep_its_parents_page),
        CASE(figures_are_of_one_store),
        CASE(pages_that_lie_are_passed_over),
        CASE(other_files_are_left_alone),
        CASE(texts_are_cleaned),
        CASE(a_runtime_is_seen_from_seal_to_destroy),
        CASE(wrong_calls_are_refused),
    };
    return cmocka_run_group_tests(cases, NULL, NULL);
}
