/* What units and rows read from: checkpoints, which are kept open, and ranges of their files. */
#ifndef STAGEHAND_CORE_SOURCES_H
#define STAGEHAND_CORE_SOURCES_H
#include "core.h"

/* From a sequence of (file index, file offset, bytes, offset in the place). *out_ranges is from PyMem_Malloc; NULL for
 * none. False with an exception set. */
bool parse_ranges(PyObject *given, sth_file_range **out_ranges, uint32_t *out_count);
bool is_listed(PyObject *list, PyObject *object);
/* The list has the Checkpoint, which stays open until let_checkpoints_go; None is fine. False with an exception set. */
bool keep_checkpoint(PyObject *list, PyObject *checkpoint);
/* *list may be NULL, and is then. */
void let_checkpoints_go(PyObject **list);
#endif
