/* The way into a call of the driver: the device made current on the calling thread, and the
 * waits before something ends. The process's own context on the card is used, so that addresses,
 * streams and events are shared with PyTorch. Every call makes it current, since threads of
 * autograd have none. When the call ends, the former context is current again: PyTorch reads the
 * thread's device from it.
 * Locks: none; the driver has its own. */
#include "base/error.h"
#include "base/fault.h"
#include "base/thread.h"
#include "device/gpu/gpu.h"

sth_status sthi_gpu_attach(const gpu_device *d) {
    if (d->fork_depth != sthi_fork_depth())
        return sthi_fail(
            STH_INVALID_STATE, d->vendor->name, 0, d->name,
            "the device was opened before this process was forked, and its driver does not survive that; "
            "start workers with the spawn method");
    gpu_result r = d->vendor->make_current(d);
    if (r == GPU_OK) return STH_OK;
    return sthi_gpu_fail(d->vendor, r, d->name, "the GPU cannot be made current", NULL);
}

bool sthi_gpu_attach_to_end(const gpu_device *d) {
    if (d->fork_depth != sthi_fork_depth()) return false;
    gpu_result r = d->vendor->make_current(d);
    sthi_gpu_ended(d->vendor, r, d->name, "making the GPU current");
    return r == GPU_OK;
}

bool sthi_gpu_idle(const gpu_device *d) {
    gpu_result r = d->driver->synchronize();
    if (r == GPU_OK) return true;
    sthi_gpu_ended(d->vendor, r, d->name, "waiting for work that may use what ends");
    return d->driver->synchronize() == GPU_OK; /* the first may have told of work that failed before */
}

sth_status sthi_gpu_enter(const gpu_device *d) {
    STHI_TRY(sthi_gpu_attach(d));
    if (sthi_fault_hit(STHI_FAULT_DEVICE_CALL))
        return sthi_fail(STH_DEVICE_ERROR, d->vendor->name, 0, d->name,
                         "a fault point made this device call fail on purpose");
    return STH_OK;
}
