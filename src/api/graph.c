/* The public functions of stagehand/graph.h: check the arguments, then hand over to src/runtime. */
#include "api/arguments.h"
#include "runtime/graph.h"
#include "runtime/runtime.h"
#include "state/state.h"

sth_status sth_graph_prepare(sth_runtime *runtime) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_graph_prepare(runtime);
}

sth_status sth_graph_fork(sth_runtime *runtime, sth_stream stream) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_graph_fork(runtime, stream);
}

sth_status sth_graph_join(sth_runtime *runtime, sth_stream stream) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_graph_join(runtime, stream);
}

sth_status sth_graph_settle(sth_runtime *runtime, sth_graph_info *out_info) {
    if (!out_info) return null_argument("out_info");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_graph_settle(runtime, out_info);
}

sth_status sth_graph_replay_begin(sth_runtime *runtime, uint64_t edition, sth_stream stream,
                                  bool *out_current) {
    if (!out_current) return null_argument("out_current");
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_graph_replay_begin(runtime, edition, stream, out_current);
}

sth_status sth_graph_replay_end(sth_runtime *runtime, sth_stream stream) {
    STHI_TRY(sthi_runtime_usable(runtime));
    return sthi_graph_replay_end(runtime, stream);
}
