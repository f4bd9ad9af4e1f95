"""tests/run.py must not call a run good that was not: what it makes of each way a test program can end."""

import importlib.util
import os
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).resolve().parents[1] / "run.py"


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("stagehand_test_runner", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("output, result, passed, failures", [
    ("1..2\nok 1 - a\nok 2 - b\n", "OK", 2, []),
    ("1..2\nok 1 - a\nnot ok 2 - b\n", "FAIL", 1, ["t: b"]),
    ("1..3\nok 1 - a\nok 2 - b\n", "FAIL", 2, ["t: FAIL after 2 of 3 cases"]),
    ("1..3\nok 1 - a\n", "TIMEOUT", 1, ["t: TIMEOUT after 1 of 3 cases"]),
    ("1..2\nok 1 - a\n", "OK", 1, ["t: only 1 of 2 cases were reported"]),
    ("1..1\nok 1 - a\n", "FAIL", 1, ["t: FAIL after 1 of 1 cases"]),
    ("", "OK", 0, ["t: reported no test cases (OK)"]),
    ("", "FAIL", 0, ["t: reported no test cases (FAIL)"]),
    ("1..1\nnot ok 1 - c Could not run test: Test setup failed\n# not ok - tests\n", "FAIL", 0,
     ["t: c Could not run test: Test setup failed"]),
], ids=["good", "failed", "crashed", "hung", "stopped early", "leaked", "empty", "did not start", "no setup"])
def test_each_end_of_a_c_test_program(runner, output, result, passed, failures):
    tally = runner.read_tap("t", output, result)
    assert (tally.passed, tally.failures, tally.skips) == (passed, failures, [])


@pytest.mark.parametrize("output, code, passed", [
    ("Done 5 runs\nstat::number_of_executed_units: 5\n", 0, 1),
    ("broken: x\nstat::number_of_executed_units: 5\n", 77, 0),
    ("stat::number_of_executed_units: 0\n", 0, 0),
    ("cannot build\n", 0, 0),
], ids=["nothing found", "found", "nothing run", "no count"])
def test_each_end_of_a_fuzzer(runner, output, code, passed):
    tally = runner.read_fuzzer("t", output, code)
    assert (tally.passed, len(tally.failures)) == (passed, 1 - passed)


def test_skips_are_counted_with_their_own_reason(runner):
    output = "1..3\n# skip: no card\nnot ok 1 # SKIP a\nok 2 - b\nok 3 - c # SKIP\n"
    tally = runner.read_tap("t", output, "OK")
    assert tally.passed == 1 and not tally.failures
    assert tally.skips == [("t: a", "no card"), ("t: c", "no reason given")]


def test_pytest_reports_are_counted_by_case(runner, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text("""<testsuites><testsuite>
        <testcase classname="m" name="good"/>
        <testcase classname="m" name="bad"><failure message="x"/></testcase>
        <testcase classname="m" name="broken"><error message="x"/></testcase>
        <testcase classname="m" name="absent"><skipped message="no card">m.py:3: no card</skipped></testcase>
        <testcase classname="" name="n">
        <skipped message="collection skipped">('n.py', 9, 'Skipped: no driver')</skipped>
        </testcase>
        </testsuite></testsuites>""")
    tally = runner.read_junit(report)
    assert tally.passed == 1
    assert tally.failures == ["python/m::bad", "python/m::broken"]
    assert tally.skips == [("python/m::absent", "no card"), ("python/::n", "no driver")]


def test_a_suite_that_cannot_run_or_has_no_tests_is_a_failure(runner, monkeypatch):
    def cannot():
        raise runner.CannotRun("no compiler")

    monkeypatch.setattr(runner, "run_python", cannot)
    said = "python: the suite could not run: "
    assert runner.run_suite("python", full=False).failures == [said + "no compiler"]
    monkeypatch.setattr(runner, "run_python", runner.Tally)
    assert runner.run_suite("python", full=False).failures == [said + "it has no tests"]


def test_the_last_line_and_the_exit_status(runner, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "python"])
    monkeypatch.setenv("PATH", "unchanged")
    for tally, line, status in [
        (runner.Tally(passed=3, skips=[("x", "no card")]), "3 passed, 0 failed, 1 skipped", 0),
        (runner.Tally(passed=3, failures=["y"]), "3 passed, 1 failed, 0 skipped", 1),
        (runner.Tally(skips=[("x", "no card")]), "0 passed, 0 failed, 1 skipped", 1),
    ]:
        monkeypatch.setattr(runner, "run_python", lambda: tally)
        assert runner.main() == status
        assert capsys.readouterr().out.splitlines()[-1] == line


def test_a_worker_that_crashes_fails_one_test_alone(runner, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "BUILD", tmp_path / "build")
    (tmp_path / "test_it.py").write_text(
        "import os\nimport pytest\n@pytest.mark.parametrize('i', range(20))\n"
        "def test(i):\n    if i == 3: os.abort()\n    assert i != 7\n")
    tally = runner.run_pytest("report", [tmp_path], "--numprocesses=2", "--dist=worksteal")
    assert tally.passed == 18
    assert sorted(failure.rpartition("::")[2] for failure in tally.failures) == ["test[3]", "test[7]"]


def test_what_a_suite_started_ends_with_it(runner, monkeypatch):
    """Also where its time is over and it has children of its own, here one that holds a pipe open."""
    monkeypatch.setattr(runner, "STEP_LIMIT_S", 2)
    monkeypatch.delenv("STH_TEST_FULL", raising=False)  # which gives four times as long
    mine, held = os.pipe()
    child = "import time; time.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], pass_fds=[{held}])"
    try:
        with pytest.raises(runner.CannotRun, match="took longer than 2 s"):
            runner.call([sys.executable, "-c", script], pass_fds=[held])
    finally:
        os.close(held)
    with open(mine, "rb") as pipe:
        assert pipe.read() == b""  # the end of the pipe: nobody holds it
