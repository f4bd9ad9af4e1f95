"""full.py: the cases that `make test` leaves to `make test-full`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import full

TESTS = '''
import pytest

@pytest.fixture(params=["p", "q"])
def kind(request):
    return request.param

@pytest.mark.parametrize("a, b", [(1, 2), (1, 3), (4, 5)])
@pytest.mark.parametrize("c", ["x", "y"])
def test_product(a, b, c): pass

@pytest.mark.parametrize("a", [1, 2, 3])
def test_with_a_fixture(a, kind): pass

@pytest.mark.parametrize("a", [1, 2, 3])
def test_one_parameter(a): pass

@pytest.mark.combinations("each is its own behavior")
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_all(a, b): pass

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_two_by_two(a, b): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.full("1"))])
def test_marked_case(a): pass

@pytest.mark.full("test_all")
def test_marked(): pass
'''
CONFTEST = "import full\ndef pytest_collection_modifyitems(config, items): full.leave_out(config, items)\n"


def collected(folder, *arguments) -> list[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    markers = "\n  full(why): -\n  combinations(why): -"
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers ={markers}\n")
    here = str(pathlib.Path(full.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": here}, capture_output=True, text=True)
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_each_value_of_each_parameter_is_in_one_case(tmp_path):
    assert collected(tmp_path) == [
        "test_product[x-1-2]", "test_product[x-4-5]", "test_product[y-1-3]",
        "test_with_a_fixture[p-1]", "test_with_a_fixture[p-3]", "test_with_a_fixture[q-2]",
        "test_one_parameter[1]", "test_one_parameter[2]", "test_one_parameter[3]",
        *(f"test_all[{b}-{a}]" for b in (1, 2) for a in (1, 2, 3)),
        *(f"test_two_by_two[{b}-{a}]" for b in (1, 2) for a in (1, 2)), "test_marked_case[1]"]


def test_a_case_that_is_named_is_never_left_out(tmp_path):
    cases = ["test_product[y-1-2]", "test_marked_case[2]"]
    assert collected(tmp_path, *(f"test_it.py::{case}" for case in cases)) == cases
