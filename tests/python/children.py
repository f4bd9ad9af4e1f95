"""Children for the cases that need a process of their own. Importing torch takes seconds: one process imports it once
and forks a child for each script, before it has opened a device or begun a thread.

    done = children.run(script)          # status, stdout, stderr
    child = children.start(script)       # child.pid; child.said("line") waits for a line; child.wait() -> done
    done = children.run_bare(script)     # torch has been imported, and stagehand has not
    done = children.run_program("import transformers", path, *words)    # as `python path words` behind that import
"""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

LIMIT_S = 240

_ZYGOTE = """
import json, os, sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
{more}
parent, script = os.getpid(), ""
while os.getpid() == parent:
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    job = json.loads(line)
    if "wait" in job:
        answer = os.waitpid(job["wait"], os.WNOHANG)[1] if os.waitid(
            os.P_PID, job["wait"], os.WEXITED | os.WNOHANG | os.WNOWAIT) else None
    else:
        answer = os.fork()
        if answer == 0:
            script = job["script"]
            for number, name in enumerate((os.devnull, job["out"], job["err"])):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
            os.setpgid(0, 0)
            break
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
sys.stdin = open(os.devnull)
del parent, line, job, answer
exec(compile(script, "script", "exec"), globals())
"""


OPTIMIZERS = "torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)\n"  # imports much, once
_MORE = "import support, file_support, stagehand\n" + OPTIMIZERS


class Done:
    """status: as of subprocess, negative for a signal."""

    def __init__(self, status: int, stdout: str, stderr: str) -> None:
        self.status, self.stdout, self.stderr = status, stdout, stderr


class _Zygote:
    def __init__(self, more: str) -> None:
        path = [str(pathlib.Path(__file__).parent), *(p for p in sys.path if p)]
        self.folder = tempfile.TemporaryDirectory(prefix="stagehand-children-")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ZYGOTE.format(path=path, more=more)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.count = 0
        atexit.register(self.close)

    def ask(self, job):
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)
        self.folder.cleanup()


_zygotes: dict[str, _Zygote] = {}


class Child:
    def __init__(self, zygote: _Zygote, script: str) -> None:
        zygote.count += 1
        self.zygote = zygote
        self.out = os.path.join(zygote.folder.name, f"{zygote.count}.out")
        self.err = os.path.join(zygote.folder.name, f"{zygote.count}.err")
        self.pid = zygote.ask({"script": textwrap.dedent(script), "out": self.out, "err": self.err})

    def said(self, word: str, limit: float = LIMIT_S) -> None:
        """Until the child has printed `word`."""
        end = time.monotonic() + limit
        while not (os.path.exists(self.out) and word in pathlib.Path(self.out).read_text()):
            assert time.monotonic() < end and self.zygote.ask({"wait": self.pid}) is None, (
                word, pathlib.Path(self.err).read_text())
            time.sleep(0.005)

    def kill(self, number: int) -> "Child":
        os.kill(self.pid, number)
        return self

    def wait(self, limit: float = LIMIT_S) -> Done:
        """Its end; one that does not end within `limit` seconds fails the test with where its threads are."""
        end = time.monotonic() + limit
        while (status := self.zygote.ask({"wait": self.pid})) is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"no end after {limit} s: {pathlib.Path(self.err).read_text()}")
            time.sleep(0.002)
        return Done(os.waitstatus_to_exitcode(status), pathlib.Path(self.out).read_text(),
                    pathlib.Path(self.err).read_text())


def start(script: str) -> Child:
    """A child that runs `script` as the main program; torch, stagehand, support and file_support are imported."""
    return _start(_MORE, script)


def run(script: str, limit: float = LIMIT_S) -> Done:
    return start(script).wait(limit)


def run_bare(script: str, more: str = "", limit: float = LIMIT_S) -> Done:
    """For scripts that are about the import of stagehand: torch alone is imported, and `more` has run, such as
    OPTIMIZERS: what they import takes longer than the rest."""
    return _start(more, script).wait(limit)


def run_program(imports: str, path: str, *words: str, limit: float = LIMIT_S) -> Done:
    """The program at `path`, in a child of a process that has run `imports`, which take seconds."""
    return _start(_MORE + imports, f"""
        import runpy
        sys.argv = {[path, *words]!r}
        runpy.run_path({path!r}, run_name="__main__")
        """).wait(limit)


def _start(more: str, script: str) -> Child:
    if more not in _zygotes:
        _zygotes[more] = _Zygote(more)
    return Child(_zygotes[more], script)
