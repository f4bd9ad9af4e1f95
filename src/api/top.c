/* Exported functions of stagehand/top.h: check the arguments, then hand over to src/telemetry. */
#include "stagehand/top.h"

#include "api/arguments.h"
#include "base/memory.h"
#include "telemetry/top.h"

sth_status sth_top_read(int32_t pid, sth_top_list *out_list) {
    if (!out_list) return null_argument("out_list");
    if (pid < 0) return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "pid", "pid %d is negative; 0 means all", (int)pid);
    return sthi_top_read_all(pid, out_list);
}

void sth_top_free(sth_top_list *list) {
    if (!list) return;
    sthi_free(list->runtimes);
    *list = (sth_top_list){0};
}
