"""Lets go of large tensors beside the work that goes on."""

from __future__ import annotations

import queue
import threading


class Dropper:
    """A thread that empties boxes (lists that hold the last reference to a tensor): giving 100 MB back to the
    system takes about as long as copying them. One box waits at most, so that no more than two tensors are held
    for longer than they are needed. A context manager; leaving it waits for the last box."""

    def __init__(self) -> None:
        self._boxes: queue.Queue = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="stagehand-drop", daemon=True)

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
            box.clear()
