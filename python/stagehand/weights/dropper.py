"""Frees large tensors beside the work that goes on."""

from __future__ import annotations

import ctypes
import queue
import threading

from .._torch import torch

HEAP_BYTES = 32 << 20  # what is smaller may lie in glibc's heap, which keeps the pages of what is freed
TRIM_BYTES = 16 << 20

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own


class Dropper:
    """A thread that empties boxes (lists that hold the last reference to a tensor): giving 100 MB back to the
    system takes about as long as copying them. One box waits at most, so that no more than two tensors are held
    for longer than they are needed; of smaller ones TRIM_BYTES together. A context manager; leaving it waits for the
    last box."""

    def __init__(self) -> None:
        self._boxes: queue.Queue = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="stagehand-drop", daemon=True)
        self._small = 0  # bytes that the heap may have kept

    def __enter__(self) -> "Dropper":
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._boxes.put(None)
        self._thread.join()

    def drop(self, box: list) -> None:
        """Takes the box over. Waits while another box waits."""
        self._boxes.put(box)

    def _run(self) -> None:
        while (box := self._boxes.get()) is not None:
            nbytes = sum(value.nbytes for value in box if isinstance(value, torch.Tensor))
            box.clear()
            self._small += nbytes if nbytes < HEAP_BYTES else 0
            if self._small >= TRIM_BYTES:
                self._give_back()
        if self._small >= TRIM_BYTES // 16:
            self._give_back()

    def _give_back(self) -> None:
        self._small = 0
        if _trim is not None:
            _trim(0)
