#!/usr/bin/env python3
"""`stagehand top` beside `stagehand stream` on the simulated device: one look as text and as JSON, and the live screen
in a pseudo-terminal. Folders of pages are the test's own, and pages of others are looked past by PID."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, OK, USAGE, expect, stagehand, write_safetensors
from support import tap

folder = pathlib.Path()
PATIENCE = 60  # until something that comes at once on an idle machine is given up


def pages(pid: int) -> list[pathlib.Path]:
    return list((folder / "session/stagehand").glob(f"{pid}-*.page"))


def model() -> pathlib.Path:
    path = folder / "model.safetensors"
    if not path.exists():
        write_safetensors(path, {f"h.{i}.weight": ("U8", [65536]) for i in range(8)})
    return path


def look(*words: object) -> dict:
    done = stagehand("top", "--once", "--json", *words)
    expect(done, OK)
    return json.loads(done.stdout)


@contextlib.contextmanager
def running(*words: object, steps: int = 3, **environment: str):
    """A model that is streamed until the block ends; its process. It has made some steps."""
    command = [sys.argv[1], "stream", model(), "--device", "sim", "--budget", "300KiB", "--steps", 2000000000, *words]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL,
                               env={**os.environ, **environment})
    try:
        end = time.monotonic() + PATIENCE
        while steps and not any(shown["steps"] >= steps for shown in look_if_there(process.pid)):
            assert process.poll() is None and time.monotonic() < end, "the model does not appear"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def look_if_there(pid: int) -> list[dict]:
    done = stagehand("top", pid, "--once", "--json")
    return json.loads(done.stdout)["runtimes"] if done.returncode == OK else []


# ---- one look ----


def test_a_running_model_as_json() -> None:
    with running("--compute-ms", 2) as process:
        told = look(process.pid)
        assert told["passed_over"] == 0
        (shown,) = told["runtimes"]
        assert shown["pid"] == process.pid and "stream" in shown["program"] and shown["device"] == "sim:0"
        assert 0 < shown["device_bytes"] <= shown["budget"] == 300 * 1024
        assert shown["streamed_bytes"] > 0 and shown["bound_by"] in ("compute", "link", "ring", "disk")
        step = shown["step"]
        assert step["step_time_ms"] > 0 and step["prefetch_hits"] + step["prefetch_misses"] == 8
        assert look(process.pid)["runtimes"][0]["steps"] >= shown["steps"] >= 3


def test_a_running_model_as_text() -> None:
    with running() as process:
        done = stagehand("top", process.pid, "--once")
        expect(done, OK, "1 model in 1 process", f"\n{process.pid} ", " on sim:0  step ", "\n    link    ",
               "\n    memory ", "\n    uses ")
        assert "\033" not in done.stdout
        assert stagehand("top", process.pid).stdout.startswith("stagehand top: 1 model")  # no terminal: one look


def test_two_processes() -> None:
    with running() as first, running() as second:
        shown = [runtime["pid"] for runtime in look()["runtimes"]]
        assert [pid for pid in shown if pid in (first.pid, second.pid)] == sorted([first.pid, second.pid])


def test_a_killed_process_leaves_nothing() -> None:
    with running() as process:
        (page,) = pages(process.pid)
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.parent.stat().st_mode & 0o777 == 0o700
    assert pages(process.pid)
    expect(stagehand("top", process.pid, "--once"), DATA, f"process {process.pid} shows no model")
    assert not pages(process.pid)


def test_a_process_that_ends_takes_its_page_along() -> None:
    before = set((folder / "session/stagehand").glob("*"))
    expect(stagehand("stream", model(), "--device", "sim", "--budget", "300KiB"), OK)
    assert not set((folder / "session/stagehand").glob("*")) - before


def test_a_process_may_stay_out() -> None:
    told, end = folder / "steps.jsonl", time.monotonic() + PATIENCE
    with running("--telemetry", told, steps=0, STAGEHAND_TOP="0") as process:
        while not (told.exists() and told.stat().st_size):  # then it has made steps
            assert time.monotonic() < end
            time.sleep(0.02)
        assert not pages(process.pid)
        expect(stagehand("top", process.pid, "--once"), DATA, "STAGEHAND_TOP=0")


def test_a_process_outside_the_session_is_found() -> None:
    with running(XDG_RUNTIME_DIR="") as process:
        assert not pages(process.pid) and len(look(process.pid)["runtimes"]) == 1


def test_wrong_words() -> None:
    expect(stagehand("top", "x"), USAGE, "'x'")
    expect(stagehand("top", "-5"), USAGE)
    expect(stagehand("top", "99999999999"), USAGE)
    expect(stagehand("top", "--json"), USAGE, "--once")
    expect(stagehand("top", "--interval", "0"), USAGE, "0.1 to 3600")


def test_a_folder_of_somebody_else_is_not_entered() -> None:
    with running() as process:
        os.chmod(folder / "session/stagehand", 0o755)
        try:
            expect(stagehand("top", process.pid, "--once"), DATA)
        finally:
            os.chmod(folder / "session/stagehand", 0o700)


def test_any_bytes_in_a_page_are_survived() -> None:
    """Bytes of a live page are exchanged, a few at a time, while its process keeps its lock."""
    numbers = iter(range(1 << 30))
    with running() as process:
        (page,) = pages(process.pid)
        sound = page.read_bytes()
        for at in [*range(0, 160, 4), *range(512, 1024, 8)]:
            for text in (b"\xff" * 8, b"\x1b[2J\x9b\x00\x07\n"):
                lie = bytearray(sound)
                lie[at:at + 8] = text
                name = page.with_name(f"{process.pid}-{next(numbers):x}.page")
                name.write_bytes(lie)
                with open(name, "rb") as held:
                    fcntl.flock(held, fcntl.LOCK_EX)
                    done = stagehand("top", process.pid, "--once")
                    expect(done, OK, "stagehand top: ")
                    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout), (at, text, done.stdout)
                name.unlink()


# ---- the live screen ----


class Terminal:
    """The tool in a pseudo-terminal, and all that it has written."""

    def __init__(self, *words: object, rows: int = 24, columns: int = 80, **environment: str):
        self.written = ""
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.execve(sys.argv[1], ["stagehand", "top", *map(str, words)],
                      {**os.environ, "TERM": "xterm", **environment})
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def wait_for(self, pattern: str) -> str:
        """What is written from here on, until it has the pattern."""
        begin, end = len(self.written), time.monotonic() + PATIENCE
        while not re.search(pattern, self.written[begin:], flags=re.DOTALL):
            assert time.monotonic() < end, f"{pattern!r} does not come: {self.written[begin:]!r}"
            if not self._read():
                break
        return self.written[begin:]

    def _read(self) -> bool:
        if not select.select([self.end], [], [], 1)[0]:
            return True
        try:
            self.written += (read := os.read(self.end, 65536)).decode(errors="replace")
        except OSError as error:
            assert error.errno == errno.EIO  # the other side has closed
            return False
        return bool(read)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def close(self) -> int:
        """Reads to the end; the exit code."""
        while self._read():
            pass
        os.close(self.end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


FRAME = r"\x1b\[H.*?\x1b\[J"  # a whole one


def frames(text: str) -> list[list[str]]:
    """Lines of each frame, without escapes."""
    found = re.findall(r"\x1b\[H(.*?)\x1b\[J", text, flags=re.DOTALL)
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).replace("\r", "").split("\n") for frame in found]


def test_live_screen_is_drawn_again_and_ended_by_q() -> None:
    with running() as process:
        terminal = Terminal(process.pid, "--interval", "0.1")
        text = terminal.wait_for(f"(?:{FRAME}.*?){{3}}")
        assert text.startswith("\x1b[?1049h\x1b[?25l") and "\x1b[1m" in text
        assert all(frame[0].endswith("q ends it") and frame[2].startswith(str(process.pid)) for frame in frames(text))
        steps = [int(re.search(r"step (\d+):", "\n".join(frame))[1]) for frame in frames(text)]
        assert steps == sorted(steps)
        terminal.type("q")
        assert terminal.close() == 0
        assert terminal.written.endswith("\x1b[?25h\x1b[?1049l")


def test_screen_follows_the_window() -> None:
    with running() as process:
        terminal = Terminal(process.pid, "--interval", "600", rows=24, columns=80)
        terminal.wait_for(FRAME)
        terminal.resize(5, 30)
        small = frames(terminal.wait_for(f"{FRAME}"))[-1]
        while len(small) > 5:  # a frame of the first size, that was on its way
            small = frames(terminal.wait_for(FRAME))[-1]
        assert len(small) == 5 and max(map(len, small)) < 30 and small[-1].startswith("... more")
        terminal.type("q")
        assert terminal.close() == 0


def test_without_color() -> None:
    with running() as process:
        terminal = Terminal(process.pid, NO_COLOR="1")
        terminal.wait_for(FRAME)
        terminal.type("q")
        assert terminal.close() == 0
        assert not re.search(r"\x1b\[[0-9;]*m", terminal.written)
        dumb = Terminal(process.pid, TERM="dumb")
        assert dumb.close() == 0 and "uses" in dumb.written and "\x1b" not in dumb.written


def test_signals_put_the_terminal_back() -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        terminal = Terminal("--interval", "600")
        terminal.wait_for(FRAME)
        if number == signal.SIGINT:
            terminal.type("\x03")
        else:
            os.kill(terminal.pid, number)
        assert terminal.close() == code
        assert terminal.written.endswith("\x1b[?25h\x1b[?1049l")


def test_a_model_that_ends_leaves_the_screen() -> None:
    with running() as process:
        terminal = Terminal(process.pid, "--interval", "0.1")
        terminal.wait_for(FRAME)
        process.kill()
        process.wait()
        terminal.wait_for("0 models in 0 processes")
        terminal.type("q")
        assert terminal.close() == 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        (folder / "session").mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(folder / "session")
        os.environ.pop("STAGEHAND_TOP", None)
        os.environ.pop("NO_COLOR", None)
        sys.exit(tap.run([(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]))
