"""`python -m pytest tests`: the programs in cli/ and examples/ run as Meson runs them, each as one test."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "examples")  # of scripts that Meson gives the names of the programs they test


class Script(pytest.File):
    def collect(self):
        yield Run.from_parent(self, name="main")


class Run(pytest.Item):
    def runtest(self) -> None:
        build = ROOT / "build" / "lib"
        if not (build / "build.ninja").exists():
            pytest.skip("build/lib is not there: `make build` makes the programs that this tests")
        name = f"{self.path.parent.name}/{self.path.stem.removeprefix('test_')}"
        done = subprocess.run([sys.executable, "-m", "mesonbuild.mesonmain", "test", "-C", build, "--no-rebuild",
                               "--print-errorlogs", name], capture_output=True, text=True)
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.parent.name in FOLDERS and module_path.parent.parent == ROOT / "tests":
        return Script.from_parent(parent, path=module_path)
    return None
