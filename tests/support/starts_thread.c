/* For test_one_thread.py: a program that starts a thread. */
#include "base/thread.h"

static void *nothing(void *arg) { return arg; }

int main(void) {
    sthi_thread thread;
    if (sthi_thread_start(&thread, "nothing", nothing, NULL) != STH_OK) return 2;
    sthi_thread_join(thread);
    return 0;
}
