"""Field case 229: the commands that a Python programmer tries first."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
here = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="the repository is not here")
SCRIPTS = sorted(path for folder in ("cli", "examples") for path in (ROOT / "tests" / folder).glob("test_*.py"))


def pytest_says(*words):
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, words)],
                          cwd=ROOT, capture_output=True, text=True)


@here
def test_229_pytest_over_all_tests_collects_every_folder():
    others = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in ("python", "support")]
    done = pytest_says("--collect-only", *others, ROOT / "tests" / "python" / "test_pack.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for script in SCRIPTS:
        assert f"{script.parent.name}/{script.name}::main" in done.stdout
    assert "tests/python/test_pack.py::" in done.stdout  # tests/cli has a file of that name, too


@here
def test_229_a_script_runs_as_meson_runs_it():
    done = pytest_says("-rs", ROOT / "tests" / "cli" / "test_frame.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout or "make build" in done.stdout


@here
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_229_importing_a_test_does_not_end_the_program(script):
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='imported'); print('still here')"
    words = (ROOT / "docs" / "man").iterdir() if script.stem == "test_man" else ("two", "three")
    done = subprocess.run([sys.executable, "-c", code, "tool", *map(str, words)], capture_output=True, text=True,
                          cwd=ROOT)  # whose folder has no module of a test's name
    assert "still here" in done.stdout, done.stderr


def table(name: str) -> list[str]:
    """A list of the project's extras."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert found, f"pyproject.toml has no extra {name!r}"
    return re.findall(r"'([^']+)'", found.group(1))


@here
def test_229_the_extra_dev_has_what_the_setup_installs():
    setup = (ROOT / "tools" / "setup.sh").read_text()
    wanted = re.search(r"< <\(absent (meson [^$]*)\"\$torch\"", setup).group(1).replace("\\\n", " ").split()
    names = {re.split("[=<>]", requirement)[0] for requirement in table("dev")}
    assert names == {*wanted, "torch"}
