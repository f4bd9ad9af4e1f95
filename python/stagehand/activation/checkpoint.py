"""Regions that are computed again in backward where that is cheaper than to move what they save.

A region's first run is plain and counts the bytes that it saves again; from then on it is checkpointed where they
were at most the threshold: it saves so little for the link, or so much for the arithmetic, that only the user can
tell, hence a number of bytes and no guess.
"""

from __future__ import annotations

import threading
import weakref

from torch.utils.checkpoint import checkpoint

from .._torch import torch


class CheckpointCoordinator:
    """Decides for each region. threshold: bytes; 0: nothing is computed again. Threads: any."""

    def __init__(self, saver, threshold: int) -> None:
        self._saver = saver
        self.threshold = threshold
        self._saved: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # owner -> {function: bytes of records}
        self._lock = threading.Lock()

    def run(self, function, *args, **kwargs):
        """function(*args, **kwargs), checkpointed without reentering where what it saves is at most the threshold."""
        if not self.threshold or self._saver is None or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        owner = getattr(function, "__self__", function)  # a bound method is made again each time
        method = getattr(function, "__func__", None)
        with self._lock:
            saved = self._saved.setdefault(owner, {}).get(method)
        if saved is not None and saved <= self.threshold:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        before = self._saver.saved_bytes
        out = function(*args, **kwargs)
        with self._lock:
            self._saved.setdefault(owner, {}).setdefault(method, self._saver.saved_bytes - before)
        return out
