/* Tensors of bytes as DLPack capsules.
 *
 * Life: new -> (set release, object, lease) -> capsule -> a consumer renames the capsule to
 * "used_dltensor" and calls the deleter when its last storage goes; an unconsumed capsule calls it itself.
 * Either way `release` runs exactly once. The record is from malloc, since deleters run without the GIL and
 * after the interpreter's end, where the allocators of Python may not be used. */
#include "core.h"

#include <stdlib.h>

static const char capsule_name[] = "dltensor";

byte_tensor *byte_tensor_new(void) {
    byte_tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor) PyErr_NoMemory();
    return tensor;
}

void byte_tensor_drop(byte_tensor *tensor) { free(tensor); }

static void delete_managed(dl_managed *managed) {
    byte_tensor *tensor = managed->context;
    tensor->release(tensor);
    free(tensor);
}

static void capsule_gone(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, capsule_name)) return; /* consumed */
    delete_managed(PyCapsule_GetPointer(capsule, capsule_name));
}

PyObject *byte_tensor_capsule(byte_tensor *tensor, uint64_t address, uint64_t bytes, dl_device device) {
    PyObject *capsule = NULL;
    tensor->length = (int64_t)bytes;
    tensor->stride = 1;
    tensor->managed = (dl_managed){
        .tensor = {.data = (void *)(uintptr_t)address,
                   .device = device,
                   .rank = 1,
                   .dtype = {DL_UINT, 8, 1},
                   .shape = &tensor->length,
                   .strides = &tensor->stride},
        .context = tensor,
        .deleter = delete_managed,
    };
    if (bytes > INT64_MAX)
        PyErr_Format(PyExc_ValueError, "a tensor of %llu bytes is too large", (unsigned long long)bytes);
    else
        capsule = PyCapsule_New(&tensor->managed, capsule_name, capsule_gone);
    if (!capsule) delete_managed(&tensor->managed);
    return capsule;
}
