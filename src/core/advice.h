/* The budget of a model that has not run yet; include/stagehand/budget.h has the rules. Pure: no lock, no I/O. */
#ifndef STHI_CORE_ADVICE_H
#define STHI_CORE_ADVICE_H
#include "stagehand/budget.h"

/* Bytes of the largest piece of a whole tensor that crosses packed, in pieces of at most `piece_bytes` where that can
 * be: sthi_segment_piece (quant/segment.h), which lies above this room. More for larger pieces. */
typedef uint64_t sthi_largest_piece(const sth_segment *whole, uint64_t piece_bytes);

/* The same as sth_budget_advise and sth_budget_with_room. The segments of the model are right. */
sth_status sthi_budget_advise(const sth_budget_model *model, sthi_largest_piece *largest, uint64_t budget,
                              sth_budget_advice **out_advice);
void sthi_budget_advice_destroy(sth_budget_advice *advice);
sth_status sthi_budget_with_room(const sth_budget_model *model, sthi_largest_piece *largest, uint64_t room,
                                 uint64_t *out_budget);
#endif
