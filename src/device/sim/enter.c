/* The way into a call of the simulated device: refused in a forked child, and the fault points
 * of calls and waits. Takes no lock. */
#include "base/error.h"
#include "base/fault.h"
#include "device/sim/sim.h"

sth_status sthi_sim_check_fork(const sim_device *d) {
    if (d->fork_depth == sthi_fork_depth()) return STH_OK;
    return sthi_fail(STH_INVALID_STATE, "sim", 0, "sim",
                     "the device was opened before this process was forked; open it again in the child");
}

sth_status sthi_sim_enter(const sim_device *d) {
    STHI_TRY(sthi_sim_check_fork(d));
    if (sthi_fault_hit(STHI_FAULT_DEVICE_CALL))
        return sthi_fail(STH_DEVICE_ERROR, "sim", 0, "sim",
                         "a fault point made this device call fail on purpose");
    return STH_OK;
}

sth_status sthi_sim_enter_wait(const sim_device *d) {
    STHI_TRY(sthi_sim_enter(d));
    if (sthi_fault_hit(STHI_FAULT_DEVICE_WAIT))
        return sthi_fail(STH_DEVICE_ERROR, "sim", 0, "sim", "a fault point made this wait fail on purpose");
    return STH_OK;
}
