/* The runtime's record in the device's account: what it holds, charges and gives back. Takes the
 * account's lock, a leaf. */
#ifndef STHI_LOAD_CHARGE_H
#define STHI_LOAD_CHARGE_H
#include "state/state.h"

uint64_t sthi_this_thread(void);                     /* which is never 0 */
uint64_t sthi_hold(sth_runtime *rt, uint64_t want);  /* see sthi_account_hold; sets `limit` */
void sthi_settle(sth_runtime *rt);
uint64_t sthi_account_most(sth_runtime *rt);         /* that one runtime may have of the device */
sth_status sthi_charge(sth_runtime *rt, uint64_t bytes);
void sthi_uncharge(sth_runtime *rt, uint64_t bytes);
void sthi_note_step(sth_runtime *rt, bool busy);     /* this thread is in a step of it from now on, or no more */
void sthi_note_begin(sth_runtime *rt);               /* of a step; it may ask for more than it did before */
static inline void sthi_account_lock(sth_runtime *rt) { sthi_lock(&rt->device->account_lock); }
static inline void sthi_account_unlock(sth_runtime *rt) { sthi_unlock(&rt->device->account_lock); }
/* Others may go on: memory was given back, a protection or a step has ended. */
static inline void sthi_account_unlock_changed(sth_runtime *rt) {
    sthi_cond_broadcast(&rt->device->account_changed);
    sthi_unlock(&rt->device->account_lock);
}
#endif
