/* Between C values and Python objects: argument converters for PyArg_Parse, and dicts from structs. */
#ifndef STAGEHAND_PYTHON_CONVERT_H
#define STAGEHAND_PYTHON_CONVERT_H
#include "core.h" /* first: Python.h sets what the system's headers offer */

#include <stddef.h>

/* Converters for "O&": integers from 0 to the type's limit, ValueError beyond. */
int to_u64(PyObject *value, void *out_uint64);
int to_u32(PyObject *value, void *out_uint32);
int to_u64_or_none(PyObject *value, void *out_uint64); /* None leaves the default */

PyObject *text_or_empty(const char *utf8); /* NULL is ""; bytes that are not UTF-8 are replaced */

/* For a callable that the library called: its exception, which is set, cannot be raised there. Ctrl-C is raised again
 * once the library has returned; another exception goes to sys.unraisablehook. */
void cannot_raise(PyObject *callable);

typedef enum field_kind {
    FIELD_U64,
    FIELD_U32,
    FIELD_I64,
    FIELD_INT,
    FIELD_BOOL,
    FIELD_DOUBLE,
    FIELD_COUNT, /* a double that holds a whole number */
    FIELD_CHARS, /* an array of char */
    FIELD_TEXT   /* a pointer to char */
} field_kind;

typedef struct field {
    const char *name;
    field_kind kind;
    size_t offset;
} field;
#define FIELD(type, member, kind) {#member, FIELD_##kind, offsetof(type, member)}
#define FIELD_END {NULL, FIELD_INT, 0}

/* A new dict of the listed members; NULL with an exception. */
PyObject *dict_of(const void *record, const field *fields);
#endif
