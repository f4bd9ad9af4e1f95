/* The CUDA back end: the driver's library and symbols, and the device's primary context, which is shared with PyTorch.
 * Names and numbers follow NVIDIA's documentation of the driver API; the versioned symbols (_v2) are those that have
 * 64-bit sizes and addresses. All of them exist from CUDA 11 on. Locks: none; load.c has one. */
#include "device/cuda/cuda.h"

#include "device/device.h"

static gpu_driver driver;

typedef struct cu_context_opaque *cu_context;
static struct {
    gpu_result (*retain)(cu_context *out, gpu_card);
    gpu_result (*release)(gpu_card);
    gpu_result (*get)(cu_context *out);
    gpu_result (*set)(cu_context);
} contexts;

static const gpu_symbol symbols[] = {
    {"cuInit", &driver.init},
    {"cuDriverGetVersion", &driver.driver_version},
    {"cuGetErrorName", &driver.error_name},
    {"cuGetErrorString", &driver.error_text},
    {"cuDeviceGetCount", &driver.device_count},
    {"cuDeviceGet", &driver.device_get},
    {"cuDeviceGetName", &driver.device_name},
    {"cuDeviceGetAttribute", &driver.device_attribute},
    {"cuDevicePrimaryCtxRetain", &contexts.retain},
    {"cuDevicePrimaryCtxRelease_v2", &contexts.release},
    {"cuCtxGetCurrent", &contexts.get},
    {"cuCtxSetCurrent", &contexts.set},
    {"cuCtxSynchronize", &driver.synchronize},
    {"cuMemGetInfo_v2", &driver.memory_info},
    {"cuMemAlloc_v2", &driver.memory_alloc},
    {"cuMemFree_v2", &driver.memory_free},
    {"cuMemHostRegister_v2", &driver.host_register},
    {"cuMemHostUnregister", &driver.host_unregister},
    {"cuMemHostGetDevicePointer_v2", &driver.host_device_pointer},
    {"cuMemcpyHtoDAsync_v2", &driver.copy_h2d},
    {"cuMemcpyDtoHAsync_v2", &driver.copy_d2h},
    {"cuMemcpyDtoDAsync_v2", &driver.copy_d2d},
    {"cuModuleLoadData", &driver.module_load},
    {"cuModuleUnload", &driver.module_unload},
    {"cuModuleGetFunction", &driver.module_function},
    {"cuLaunchKernel", &driver.launch},
    {"cuStreamCreateWithPriority", &driver.stream_create},
    {"cuStreamDestroy_v2", &driver.stream_destroy},
    {"cuStreamSynchronize", &driver.stream_synchronize},
    {"cuStreamWaitEvent", &driver.stream_wait},
    {"cuEventCreate", &driver.event_create},
    {"cuEventDestroy_v2", &driver.event_destroy},
    {"cuEventRecord", &driver.event_record},
    {"cuEventQuery", &driver.event_query},
    {"cuEventSynchronize", &driver.event_synchronize},
    {"cuEventElapsedTime", &driver.event_elapsed},
    {"cuMemGetAllocationGranularity", &driver.granularity},
    {"cuMemAddressReserve", &driver.address_reserve},
    {"cuMemAddressFree", &driver.address_free},
    {"cuMemCreate", &driver.memory_create},
    {"cuMemRelease", &driver.memory_release},
    {"cuMemMap", &driver.memory_map},
    {"cuMemUnmap", &driver.memory_unmap},
    {"cuMemSetAccess", &driver.memory_access},
};
enum { SYMBOLS = sizeof symbols / sizeof *symbols };
_Static_assert(SYMBOLS == (sizeof driver + sizeof contexts) / sizeof(void *), "each function has its symbol");

static const char *const names[] = {"libcuda.so.1", NULL};
static const gpu_library library = {
    .what = "the CUDA driver",
    .domain = "cuda",
    .variable = "STAGEHAND_CUDA_LIBRARY",
    .names = names,
    .advice = "install the NVIDIA driver, give the container access to the GPU",
    .too_old = "Stagehand needs a driver for CUDA 11 or later",
    .symbols = symbols,
    .symbol_count = SYMBOLS,
};

static gpu_result retain(gpu_device *d) {
    cu_context context = NULL;
    gpu_result r = contexts.retain(&context, d->handle);
    d->context = context;
    return r;
}

static gpu_result release(gpu_device *d) { return contexts.release(d->handle); }

static _Thread_local struct {
    bool changed;
    cu_context context;
} before;

/* Asks first, for that is quicker than setting; setting does not need the answer. */
static gpu_result make_current(const gpu_device *d) {
    cu_context current = NULL;
    bool known = contexts.get(&current) == GPU_OK;
    if (known && current == d->context) return GPU_OK;
    gpu_result r = contexts.set(d->context);
    if (r == GPU_OK && known && !before.changed) before.changed = true, before.context = current;
    return r;
}

static void put_back(void) {
    if (before.changed) (void)contexts.set(before.context);
    before.changed = false;
}

const gpu_vendor sthi_cuda_vendor = {
    .name = "cuda",
    .ops = &sthi_cuda_ops,
    .library = &library,
    .driver = &driver,
    /* CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, ..CAN_MAP_HOST_MEMORY, ..INTEGRATED,
     * ..VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    .attributes = {.register_host = 99, .map_host = 19, .integrated = 18, .mappings = 102},
    .start_advice = "check that nvidia-smi lists a GPU, that CUDA_VISIBLE_DEVICES is not empty, and that this process "
                    "was not forked from one that used CUDA",
    .find_advice = "see nvidia-smi and CUDA_VISIBLE_DEVICES",
    .retain = retain,
    .release = release,
    .make_current = make_current,
    .put_back = put_back,
    .compile = sthi_cuda_compile,
    .prelude = sthi_cuda_prelude,
};

static int count(void) { return sthi_gpu_count(&sthi_cuda_vendor); }

static sth_status open_device(int index, const sth_sim_options *sim, sth_backend_device **out) {
    (void)sim;
    return sthi_gpu_open(&sthi_cuda_vendor, index, out);
}

const sth_backend_ops sthi_cuda_ops = {STHI_GPU_ENTRIES, .backend = "cuda", .count = count, .open = open_device};
