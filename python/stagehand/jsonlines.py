"""A telemetry file of Python's: JSON lines, by the rules of the core's own (src/telemetry/jsonl.c). It is opened for
each append, so that nothing of it is left to a forked child."""

from __future__ import annotations

import json
import os

from . import _core
from .telemetryfile import claim, release

MAX_BYTES = 64 << 20  # the last line of a file that is full says so


class Appending:
    """Telemetry that appends its records to `_file`, a JsonLines."""

    _file: JsonLines

    def release(self) -> None:
        """Its runtime has ended: a file that nobody gave a path of may be the next one's."""
        self._file.release()

    @property
    def path(self) -> str | None:
        """The file to which records are appended; None: none."""
        return self._file.path

    @property
    def lost(self) -> int:
        """Lines that the file was to have and does not have."""
        return self._file.lost


class JsonLines:
    """path: None: nothing is written. After an OSError from `append` nothing is tried any more; `lost` counts the lines
    that the file does not have. A new file has mode 0600. Refused are symbolic links, files with more than one name,
    what is no regular file, files that hold something else than telemetry, and files that another run writes."""

    def __init__(self, path: str | os.PathLike | None, max_bytes: int = MAX_BYTES) -> None:
        self.path = self._claimed = claim(path, self)
        self.max_bytes = max_bytes
        self.lost = 0
        self._wanted = path is not None

    def release(self) -> None:
        """Its writer has ended: a file that nobody gave a path of may be the next one's."""
        release(self._claimed, self)

    def append(self, lines: list[dict]) -> None:
        path, self.path = self.path, None
        self.lost += len(lines) if self._wanted else 0
        if path is None:
            return
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        if not lines or _core.append_lines(path, text, self.max_bytes):
            self.path = path
            self.lost -= len(lines)
