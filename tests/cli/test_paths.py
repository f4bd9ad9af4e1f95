#!/usr/bin/env python3
"""Every argument that is a path, of every command, with pipes, sockets, devices and folders: an error that names it, at
once, in little memory."""

import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, OK, stagehand, write_safetensors
from support import tap

folder = pathlib.Path()
MIB = 1 << 20
ROOM = 300 * MIB  # of addresses


def model() -> pathlib.Path:
    path = folder / "model.safetensors"
    if not path.exists():
        write_safetensors(path, {f"h.{i}.weight": ("F32", [64, 64]) for i in range(4)})
    return path


def readers() -> dict[str, list]:
    """What reads the path that is put in the place of None."""
    plan = ["plan", model(), "--device", "sim", "--budget", "1MiB"]
    return {
        "plan": ["plan", None, "--device", "sim", "--budget", "1MiB"], "telemetry": [*plan, "--telemetry", None],
        "inspect": ["inspect", None], "verify": ["verify", None], "original": ["verify", model(), None],
        "stream": ["stream", None, "--device", "sim", "--budget", "1MiB", "--steps", 1], "replay": ["replay", None],
        "pack": ["pack", None, folder / "out", "--format", "layer-index"],
        "unpack": ["unpack", None, folder / "out.safetensors"], "backend": ["doctor", "--backend", None],
        "disk": ["doctor", "--disk", None], "report": ["report", None, "-o", folder / "page.html"],
    }


def writers() -> dict[str, list]:
    stream = ["stream", model(), "--budget", "1MiB", "--steps", 1, "--device"]
    return {"telemetry": [*stream, "sim", "--telemetry", None], "trace": [*stream, "trace(file={})+sim"],
            "json": ["bench", "--rates", "--device", "sim", "--json", None]}


def odd_files() -> dict[str, pathlib.Path]:
    fifo, sock = folder / "fifo", folder / "socket"
    if not fifo.exists():
        os.mkfifo(fifo)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(sock))
        (folder / "empty folder").mkdir()
    return {"fifo": fifo, "socket": sock, "zeros": pathlib.Path("/dev/zero"), "null": pathlib.Path("/dev/null"),
            "folder": folder / "empty folder"}


def told(words: list, path, room: int = ROOM) -> subprocess.CompletedProcess:
    command = [str(path if word is None else word).replace("{}", str(path)) for word in words]
    return subprocess.run([sys.argv[1], *command], capture_output=True, timeout=300, stdin=subprocess.DEVNULL,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (room, room)))


def test_what_is_no_plain_file_is_refused_by_every_reader() -> None:
    for kind, path in odd_files().items():
        for name, words in readers().items():
            done = told(words, path)
            text = done.stderr.decode()
            assert done.returncode not in (0, 1) and done.returncode > 0, (kind, name, done)
            assert str(path) in text, (kind, name, text)


def test_what_is_no_plain_file_is_refused_by_every_writer() -> None:
    for kind, path in odd_files().items():
        for name, words in writers().items():
            done = told(words, path)
            assert done.returncode > 1 and str(path) in done.stderr.decode(), (kind, name, done)


def test_a_log_that_is_a_pipe_nobody_reads_is_not_waited_for() -> None:
    words = ["stream", model(), "--budget", "1MiB", "--steps", 1, "--device", "check(log={})+sim"]
    done = told(words, odd_files()["fifo"])
    assert done.returncode > 1 and "fifo" in done.stderr.decode(), done
    assert told(words, "/dev/null").returncode == OK


def test_lines_without_an_end_take_no_memory() -> None:
    """Sparse files of 1 GiB: one endless line of zeros, and one line of that length in front of a record."""
    endless, long = folder / "endless", folder / "long"
    with open(endless, "wb") as file:
        file.truncate(1024 * MIB)
    with open(long, "wb") as file:
        file.seek(1024 * MIB)
        file.write(b'\n{"step":0,"compute_time_ms":4}\n')
    for path in (endless, long):
        for name, words in readers().items():
            done = told(words, path) if name != "disk" else None  # whose rate may be measured
            assert not done or done.returncode > 1 and str(path) in done.stderr.decode(), (path, name, done)
    done = told(readers()["telemetry"], long)
    assert done.returncode == DATA and "line 1 has more than 1048576 bytes" in done.stderr.decode(), done


def test_telemetry_with_torn_lines_and_bytes_that_are_no_text_is_read() -> None:
    path = folder / "torn"
    path.write_bytes(b'{"step":0,"compute_time_ms":4}\n\x00\xff\xfe\n{"step":1,"comp\n' + b"\x00" * 5000
                     + b'\n{"step":2,"compute_time_ms":6}')
    done = told(readers()["telemetry"] + ["--json"], path)
    assert done.returncode == OK and b'"compute_ms"' in done.stdout, done
    (folder / "binary").write_bytes(os.urandom(1 << 16))
    done = told(readers()["telemetry"], folder / "binary")
    assert done.returncode == DATA and "no line with compute_time_ms" in done.stderr.decode(), done


def test_every_command_is_tried() -> None:
    """A command that is new here wants its paths above; top takes none."""
    listed = stagehand("--help").stdout.partition("commands:\n")[2].partition("\n\n")[0]
    tried = {words[0] for words in (*readers().values(), *writers().values())}
    assert tried | {"top"} == {line.split()[0] for line in listed.splitlines()}, listed


def main() -> int:
    global folder
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        return tap.run([(test.__name__[5:], test) for test in (
            test_what_is_no_plain_file_is_refused_by_every_reader,
            test_what_is_no_plain_file_is_refused_by_every_writer,
            test_a_log_that_is_a_pipe_nobody_reads_is_not_waited_for, test_lines_without_an_end_take_no_memory,
            test_telemetry_with_torn_lines_and_bytes_that_are_no_text_is_read, test_every_command_is_tried)])


if __name__ == "__main__":
    sys.exit(main())
