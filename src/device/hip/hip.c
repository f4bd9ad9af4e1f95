/* The HIP back end, for AMD's GPUs: the library and symbols of the HIP runtime, whose state is the process's: it must
 * be the one that PyTorch has loaded, where it has. A device is current by its number, there are no contexts to hold.
 * Names and numbers follow AMD's documentation of ROCm 6 and 7. No AMD card has run it yet: what is known of it is
 * known from a stand-in for the library. Locks: none; load.c has one. */
#include "device/hip/hip.h"

#include "device/device.h"

static gpu_driver driver;

static struct {
    gpu_result (*get)(int *out);
    gpu_result (*set)(int index);
} devices;

static const gpu_symbol symbols[] = {
    {"hipInit", &driver.init},
    {"hipDriverGetVersion", &driver.driver_version},
    {"hipDrvGetErrorName", &driver.error_name},
    {"hipDrvGetErrorString", &driver.error_text},
    {"hipGetDeviceCount", &driver.device_count},
    {"hipDeviceGet", &driver.device_get},
    {"hipDeviceGetName", &driver.device_name},
    {"hipDeviceGetAttribute", &driver.device_attribute},
    {"hipGetDevice", &devices.get},
    {"hipSetDevice", &devices.set},
    {"hipDeviceSynchronize", &driver.synchronize},
    {"hipMemGetInfo", &driver.memory_info},
    {"hipMalloc", &driver.memory_alloc},
    {"hipFree", &driver.memory_free},
    {"hipHostRegister", &driver.host_register},
    {"hipHostUnregister", &driver.host_unregister},
    {"hipHostGetDevicePointer", &driver.host_device_pointer},
    {"hipMemcpyHtoDAsync", &driver.copy_h2d},
    {"hipMemcpyDtoHAsync", &driver.copy_d2h},
    {"hipMemcpyDtoDAsync", &driver.copy_d2d},
    {"hipModuleLoadData", &driver.module_load},
    {"hipModuleUnload", &driver.module_unload},
    {"hipModuleGetFunction", &driver.module_function},
    {"hipModuleLaunchKernel", &driver.launch},
    {"hipStreamCreateWithPriority", &driver.stream_create},
    {"hipStreamDestroy", &driver.stream_destroy},
    {"hipStreamSynchronize", &driver.stream_synchronize},
    {"hipStreamWaitEvent", &driver.stream_wait},
    {"hipEventCreateWithFlags", &driver.event_create},
    {"hipEventDestroy", &driver.event_destroy},
    {"hipEventRecord", &driver.event_record},
    {"hipEventQuery", &driver.event_query},
    {"hipEventSynchronize", &driver.event_synchronize},
    {"hipEventElapsedTime", &driver.event_elapsed},
    {"hipMemGetAllocationGranularity", &driver.granularity},
    {"hipMemAddressReserve", &driver.address_reserve},
    {"hipMemAddressFree", &driver.address_free},
    {"hipMemCreate", &driver.memory_create},
    {"hipMemRelease", &driver.memory_release},
    {"hipMemMap", &driver.memory_map},
    {"hipMemUnmap", &driver.memory_unmap},
    {"hipMemSetAccess", &driver.memory_access},
};
enum { SYMBOLS = sizeof symbols / sizeof *symbols };
_Static_assert(SYMBOLS == (sizeof driver + sizeof devices) / sizeof(void *), "each function has its symbol");

static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", NULL};
static const gpu_library library = {
    .what = "the HIP runtime",
    .domain = "hip",
    .variable = "STAGEHAND_HIP_LIBRARY",
    .names = names,
    .loaded_as = "/libamdhip64.so",
    .advice = "install ROCm, give the container access to /dev/kfd and /dev/dri",
    .too_old = "Stagehand needs ROCm 6 or later",
    .symbols = symbols,
    .symbol_count = SYMBOLS,
};

static _Thread_local struct {
    bool changed;
    int device;
} before;

/* Asks first, for that is quicker than setting; setting does not need the answer. */
static gpu_result make_current(const gpu_device *d) {
    int current = -1;
    bool known = devices.get(&current) == GPU_OK;
    if (known && current == d->handle) return GPU_OK;
    gpu_result r = devices.set(d->handle);
    if (r == GPU_OK && known && !before.changed) before.changed = true, before.device = current;
    return r;
}

static void put_back(void) {
    if (before.changed) (void)devices.set(before.device);
    before.changed = false;
}

static gpu_result retain(gpu_device *d) { return make_current(d); }

static gpu_result release(gpu_device *d) {
    (void)d;
    return GPU_OK;
}

const gpu_vendor sthi_hip_vendor = {
    .name = "hip",
    .ops = &sthi_hip_ops,
    .library = &library,
    .driver = &driver,
    /* hipDeviceAttributeHostRegisterSupported, ..CanMapHostMemory, ..Integrated, ..VirtualMemoryManagementSupported */
    .attributes = {.register_host = 90, .map_host = 3, .integrated = 16, .mappings = 89},
    .proves_rings = true,
    .start_advice = "check that rocm-smi lists a GPU, that HIP_VISIBLE_DEVICES is not empty, and that this process was "
                    "not forked from one that used HIP",
    .find_advice = "see rocm-smi, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
    .retain = retain,
    .release = release,
    .make_current = make_current,
    .put_back = put_back,
    .compile = sthi_hip_compile,
    .prelude = sthi_hip_prelude,
};

static int count(void) { return sthi_gpu_count(&sthi_hip_vendor); }

static sth_status open_device(int index, const sth_sim_options *sim, sth_backend_device **out) {
    (void)sim;
    return sthi_gpu_open(&sthi_hip_vendor, index, out);
}

const sth_backend_ops sthi_hip_ops = {STHI_GPU_ENTRIES, .backend = "hip", .count = count, .open = open_device};
