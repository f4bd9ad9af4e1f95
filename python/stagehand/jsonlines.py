"""A telemetry file of Python's: JSON lines, with the rules of the core's own (src/telemetry/jsonl.c). It is opened for each
append, so that nothing of it is left to a forked child."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat

MAX_BYTES = 64 << 20  # the last line of a file that is full says so
_TRUNCATED = b'{"truncated":true}\n'
_STARTS = (b'{"step', b'{"event', b'{"truncated')  # of a file that telemetry wrote


class JsonLines:
    """path: None: nothing is written. After an OSError from `append` nothing is tried any more. A new file has mode 0600.
    Refused are symbolic links, files with more than one name, what is no regular file, files that hold something else than
    telemetry, and files that another run writes."""

    def __init__(self, path: str | os.PathLike | None, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes

    def append(self, lines: list[dict]) -> None:
        path, self.path = self.path, None
        if path is None:
            return
        if not lines or _write(path, b"".join(json.dumps(line).encode() + b"\n" for line in lines), self.max_bytes):
            self.path = path


def _write(path, text: bytes, limit: int) -> bool:
    """False: the file is full."""
    try:  # O_RDWR: opening a pipe must not wait for a reader, and its head is looked at
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _refuse(path, "telemetry is not written through a symbolic link; name the file itself", errno.ELOOP)
        raise
    try:
        size = _examine(fd, path)
        if size + len(text) + len(_TRUNCATED) <= limit:
            _all_or_nothing(fd, text, size)
            return True
        if size + len(_TRUNCATED) <= limit:
            _all_or_nothing(fd, _TRUNCATED, size)
        return False
    finally:
        os.close(fd)


def _examine(fd: int, path) -> int:
    """Bytes in the file, which is one to write to."""
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        _refuse(path, "telemetry is written to regular files only")
    if about.st_nlink > 1:
        _refuse(path, "the file has another name, where telemetry would be written too; name a new file")
    head = os.pread(fd, 16, 0)
    if about.st_size and not head.startswith(_STARTS):
        _refuse(path, "the file holds something else than telemetry; name a new file, or one that telemetry wrote")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _refuse(path, "another run is writing its telemetry there; give each its own file", errno.EBUSY)
    except OSError:
        pass  # a file system without locks is taken as it is
    return os.fstat(fd).st_size


def _all_or_nothing(fd: int, text: bytes, size: int) -> None:
    try:
        done = 0
        while done < len(text):
            done += os.write(fd, text[done:])
    except OSError:
        os.ftruncate(fd, size)
        raise


def _refuse(path, why: str, number: int = errno.EINVAL) -> None:
    raise OSError(number, why, os.fspath(path))
