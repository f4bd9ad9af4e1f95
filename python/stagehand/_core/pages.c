/* Which pages of a private mapping of a file were written. The kernel gives the process a page of its own at the first
 * write, and says so in /proc/self/pagemap: this is no guess, and no page is read for it. PAGEMAP_SCAN (Linux 6.7)
 * skips memory that was never touched; before it each page is asked for, 3 ms for a GB. */
#include "convert.h"

#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

typedef struct scan { /* struct pm_scan_arg of linux/fs.h */
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
} scan;
typedef struct region {
    uint64_t start, end, categories;
} region;

#define SCAN _IOWR('f', 16, scan)
enum { IS_FILE = 1 << 2, IS_PRESENT = 1 << 3, IS_SWAPPED = 1 << 4 }; /* of a scan */
enum { ENTRY_FILE = 61, ENTRY_SWAPPED = 62, ENTRY_PRESENT = 63 };    /* bits of an entry */
enum { REGIONS = 64, ENTRIES = 4096 };

static bool add(PyObject *list, uint64_t begin, uint64_t end) {
    PyObject *item = Py_BuildValue("(KK)", (unsigned long long)begin, (unsigned long long)end);
    bool ok = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return ok;
}

/* 1: done, 0: this kernel cannot, -1: a Python error. */
static int by_scan(int fd, uint64_t begin, uint64_t end, PyObject *list) {
    while (begin < end) {
        region found[REGIONS];
        scan s = {.size = sizeof s, .start = begin, .end = end, .vec = (uintptr_t)found, .vec_len = REGIONS,
                  .category_inverted = IS_FILE, .category_mask = IS_FILE,
                  .category_anyof_mask = IS_PRESENT | IS_SWAPPED, .return_mask = IS_PRESENT | IS_SWAPPED};
        int count = ioctl(fd, SCAN, &s);
        if (count < 0 || s.walk_end <= begin) return 0;
        for (int i = 0; i < count; i++)
            if (!add(list, found[i].start, found[i].end)) return -1;
        begin = s.walk_end;
    }
    return 1;
}

static int by_entries(int fd, uint64_t begin, uint64_t end, PyObject *list) {
    uint64_t entries[ENTRIES], page = (uint64_t)sysconf(_SC_PAGESIZE);
    while (begin < end) {
        uint64_t left = (end - begin) / page, count = left < ENTRIES ? left : ENTRIES;
        ssize_t got = pread(fd, entries, count * sizeof *entries, (off_t)(begin / page * sizeof *entries));
        if (got < (ssize_t)sizeof *entries) return 0;
        count = (uint64_t)got / sizeof *entries;
        for (uint64_t i = 0; i < count; i++) {
            bool there = entries[i] >> ENTRY_PRESENT & 1 || entries[i] >> ENTRY_SWAPPED & 1;
            if (!there || entries[i] >> ENTRY_FILE & 1) continue;
            if (!add(list, begin + i * page, begin + (i + 1) * page)) return -1;
        }
        begin += count * page;
    }
    return 1;
}

PyObject *written_pages(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t begin, bytes;
    if (!PyArg_ParseTuple(args, "O&O&:written_pages", to_u64, &begin, to_u64, &bytes)) return NULL;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = (begin + bytes + page - 1) / page * page;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), done = 0;
    PyObject *list = PyList_New(0);
    if (list && fd >= 0) done = by_scan(fd, begin, end, list);
    if (list && fd >= 0 && done == 0) {
        Py_DECREF(list);
        list = PyList_New(0);
        done = list ? by_entries(fd, begin, end, list) : -1;
    }
    if (fd >= 0) close(fd);
    if (list && done == 1) return list;
    Py_XDECREF(list);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* No other thread gets the interpreter on the way: the function is PyTorch's, and no class has a __setattr__. */
PyObject *exchange_unless(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *list, *function, *a, *b, *class_a, *class_b;
    if (!PyArg_ParseTuple(args, "O!OOOOO:exchange_unless", &PyList_Type, &list, &function, &a, &b, &class_a, &class_b))
        return NULL;
    if (PyList_Size(list)) Py_RETURN_FALSE;
    PyObject *done = PyObject_CallFunctionObjArgs(function, a, b, NULL);
    if (!done) return NULL;
    Py_DECREF(done);
    if (PyObject_SetAttrString(a, "__class__", class_a) != 0 || PyObject_SetAttrString(b, "__class__", class_b) != 0)
        return NULL;
    Py_RETURN_TRUE;
}

PyObject *tells_writes(PyObject *module, PyObject *none) {
    static char here;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)&here / page * page;
    (void)module, (void)none;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    PyObject *list = fd < 0 ? NULL : PyList_New(0);
    int done = list ? by_scan(fd, begin, begin + page, list) : 0;
    if (list && done == 0) done = by_entries(fd, begin, begin + page, list);
    Py_XDECREF(list);
    if (fd >= 0) close(fd);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done == 1);
}

PyObject *same_memory(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t a, b, bytes;
    int differ;
    if (!PyArg_ParseTuple(args, "O&O&O&:same_memory", to_u64, &a, to_u64, &b, to_u64, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    differ = memcmp((const void *)(uintptr_t)a, (const void *)(uintptr_t)b, bytes);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(differ == 0);
}
