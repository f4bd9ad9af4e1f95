/* The store of saved tensors; stagehand/activation.h is the manual. */
#ifndef STHI_ACTIVATION_STORE_H
#define STHI_ACTIVATION_STORE_H
#include "stagehand/activation.h"
#include "stagehand/conductor.h"

void sthi_activation_options_init(sth_activation_options *options);
sth_status sthi_activation_create(sth_device *device, const sth_activation_options *options, sth_activation **out);
void sthi_activation_destroy(sth_activation *a);
sth_status sthi_activation_close(sth_activation *a);
sth_status sthi_activation_set_marks(sth_activation *a, uint64_t high, uint64_t low);
sth_status sthi_activation_set_pinned_limit(sth_activation *a, uint64_t bytes);
sth_status sthi_activation_set_caps(sth_activation *a, uint32_t max_d2h, uint32_t max_h2d);
sth_status sthi_activation_set_conductor(sth_activation *a, sth_conductor *c);
sth_status sthi_activation_pass(sth_activation *a, uint64_t step);
sth_status sthi_activation_save(sth_activation *a, uint64_t bytes, bool passing, sth_record *out);
sth_status sthi_activation_recomputable(sth_activation *a, sth_record record);
sth_status sthi_activation_set_held(sth_activation *a, sth_record record, bool held);
sth_status sthi_activation_drop(sth_activation *a, sth_record record);
sth_status sthi_activation_relieve(sth_activation *a, uint64_t used, uint64_t need, sth_stream stream,
                                   sth_record *out, sth_relief *out_relief);
sth_status sthi_activation_spill(sth_activation *a, sth_record record, sth_devptr source, sth_stream stream);
sth_status sthi_activation_ask(sth_activation *a, sth_record record, sth_activation_state *out);
sth_status sthi_activation_ahead(sth_activation *a, uint64_t used, sth_record *out);
sth_status sthi_activation_restore(sth_activation *a, sth_record record, sth_devptr target, sth_stream stream);
sth_status sthi_activation_arrive(sth_activation *a, sth_record record, sth_stream stream);
sth_status sthi_activation_recomputed(sth_activation *a, sth_record record);
sth_status sthi_activation_let_go(sth_activation *a, sth_record record, sth_stream stream);
sth_status sthi_activation_release(sth_activation *a, sth_record record, sth_stream stream);
sth_status sthi_activation_state_get(sth_activation *a, sth_record record, sth_activation_state *out);
sth_status sthi_activation_stats_get(sth_activation *a, sth_activation_stats *out);
#endif
