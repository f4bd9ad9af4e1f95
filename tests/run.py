#!/usr/bin/env python3
"""Runs every test suite and ends with one line: `N passed, N failed, N skipped`.

Suites: the C tests in a plain build, again under the address and undefined-behaviour sanitizers and under the
thread sanitizer, then the Python tests, spread over the processors; those marked `alone` come last, one by one.
Single test cases are counted. The exit status is 0 only when every suite ran, something ran in each, and nothing
failed. However a run ends, what it started ends with it.

    tests/run.py            what `make test` runs
    tests/run.py --full     also slow C tests under sanitizers, a build with clang, and a minute of each fuzz target;
                            STH_TEST_FULL=1 is set, which tests may read to try more cases
    tests/run.py c asan     only these suites: c asan tsan clang fuzz python; oldest and newest are the Python tests
                            with another PyTorch (after `make wheel`), which --full runs, too

Run it with the interpreter of .venv, from anywhere.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
STEP_LIMIT_S = 1800  # one build or one run of a suite, on a machine that others use; four times as long with --full
FUZZ_S = 60  # for each target
OTHERS = {"oldest": "torch==2.4.1", "newest": "torch==2.15.0"}  # PyTorch, beside that of .venv
HANG_S = 240  # then a Python test shows where its threads are
MOST_WORKERS = 8  # for the Python tests: each has a PyTorch of its own in memory
SPREAD = ["--numprocesses=auto", f"--maxprocesses={MOST_WORKERS}", "--dist=worksteal"]
NOT_INSTALLED = 3  # tools/test_torch.sh
# Warnings are judged in the plain build: instrumented code makes gcc see variables as uninitialised. -g1: lines are
# what a report names, and gcc takes half as long again for the rest.
SANITIZED = ["-Db_lundef=false", "-Doptimization=1", "-Ddebug=true", "-Dc_args=-g1", "-Dwerror=false"]
PATIENT = ["--timeout-multiplier", "8"]  # a busy machine takes long
# A failed allocation gives NULL, as it does elsewhere, so that tests may ask for too much.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "halt_on_error=1:abort_on_error=1:print_summary=1:allocator_may_return_null=1",
    "TSAN_OPTIONS": "halt_on_error=1:allocator_may_return_null=1",
}

PLAN = re.compile(r"1\.\.(\d+)")
CASE = re.compile(r"(not ok|ok) \d+\s*(?:-\s*)?(.*)")
SKIP = re.compile(r"#\s*SKIP\b\s*(.*)", re.IGNORECASE)
REASON = re.compile(r"# skip: (.*)")


@dataclasses.dataclass
class Tally:
    """What a suite, or all of them, came to."""

    passed: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    skips: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (test, reason)

    def add(self, other: "Tally") -> None:
        self.passed += other.passed
        self.failures += other.failures
        self.skips += other.skips

    def line(self) -> str:
        return f"{self.passed} passed, {len(self.failures)} failed, {len(self.skips)} skipped"


class CannotRun(Exception):
    """A suite did not get as far as running its tests."""


def call(command: list, **options) -> subprocess.CompletedProcess:
    """`options`: of subprocess.Popen."""
    try:
        # A group of its own, so that all of it can be ended.
        child = subprocess.Popen([str(part) for part in command], cwd=ROOT, text=True, errors="replace",
                                 stdin=subprocess.DEVNULL, start_new_session=True, **options)
    except FileNotFoundError as error:
        raise CannotRun(f"{error.filename} is not there") from error
    try:
        limit = STEP_LIMIT_S * (4 if "STH_TEST_FULL" in os.environ else 1)
        stdout, stderr = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"{pathlib.Path(command[0]).name} took longer than {limit} s") from error
    finally:
        end_group(child)
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def end_group(child: subprocess.Popen) -> None:
    """Ends what is left of a child and of all that it started."""
    with contextlib.suppress(ProcessLookupError):  # nothing is
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def check(command: list, what: str) -> None:
    """Runs a step whose output matters only when it fails."""
    done = call(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise CannotRun(f"{what} failed:\n{done.stdout[-8000:]}")


def read_tap(name: str, output: str, result: str) -> Tally:
    """Counts the cases of one C test program. `result` is Meson's word for how the program ended."""
    tally, planned, seen, reason = Tally(), None, 0, ""
    for line in output.splitlines():
        if match := REASON.match(line):
            reason = match[1]
        elif match := PLAN.fullmatch(line.strip()):
            planned = int(match[1])
        elif match := CASE.match(line):
            seen += 1
            skip = SKIP.search(match[2])
            if skip:
                # cmocka writes the case's name behind the word, others before it.
                case = match[2][: skip.start()].strip() or skip[1]
                tally.skips.append((f"{name}: {case}", reason or "no reason given"))
            elif match[1] == "ok":
                tally.passed += 1
            else:
                tally.failures.append(f"{name}: {match[2]}")
            reason = ""
    if planned is None:
        tally.failures.append(f"{name}: reported no test cases ({result})")
    elif result != "OK" and not tally.failures:
        tally.failures.append(f"{name}: {result} after {seen} of {planned} cases")
    elif result == "OK" and seen != planned:
        tally.failures.append(f"{name}: only {seen} of {planned} cases were reported")
    return tally


def read_meson_log(log: pathlib.Path, label: str) -> Tally:
    total = Tally()
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        name = f"{label}/{entry['name'].rpartition(':')[2].strip()}"
        tally = read_tap(name, entry.get("stdout", ""), entry["result"])
        if tally.failures:
            print(f"--- {name} ({entry['result']}, {entry['duration']:.1f} s)")
            print((entry.get("stdout", "") + entry.get("stderr", ""))[-6000:])
        total.add(tally)
    return total


def run_c(label: str, folder: str, options: list[str], selection: list[str], compiler: str = "",
          wrapper: list[str] | None = None) -> Tally:
    """Builds the C tests in build/<folder> and runs those that `selection` (Meson's arguments) names."""
    path = BUILD / folder
    if not (path / "build.ninja").exists():
        chosen = ["env", f"CC={compiler}"] if compiler else []
        check([*chosen, "meson", "setup", path, *options], f"meson setup {folder}")
    if not selection:  # otherwise meson test builds what the chosen tests need
        check(["meson", "compile", "-C", path], f"building {folder}")
    log = path / "meson-logs" / "testlog.json"
    log.unlink(missing_ok=True)
    wrap = ["--wrapper", " ".join(wrapper)] if wrapper else []
    done = call(["meson", "test", "-C", path, *PATIENT, *wrap, *selection],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if not log.exists():
        raise CannotRun(f"meson test left no log:\n{done.stdout[-4000:]}")
    tally = read_meson_log(log, label)
    if done.returncode and not tally.failures:
        print(done.stdout[-4000:])
        tally.failures.append(f"{label}: meson test ended with {done.returncode}")
    return tally


def tsan_wrapper() -> list[str]:
    """The thread sanitizer cannot place its shadow where addresses are randomised too widely: setarch helps."""
    BUILD.mkdir(exist_ok=True)
    source, program = BUILD / "tsan-probe.c", BUILD / "tsan-probe"
    source.write_text("int main(void) { return 0; }\n")
    check([os.environ.get("CC", "cc"), "-fsanitize=thread", "-o", program, source],
          "building with the thread sanitizer")
    for wrapper in ([], ["setarch", "-R"]):
        if all(call([*wrapper, program], stderr=subprocess.PIPE).returncode == 0 for _ in range(10)):
            return wrapper
    raise CannotRun("a program built with the thread sanitizer does not start, not even under setarch -R")


def run_asan(selection: list[str]) -> Tally:
    return run_c("asan", "asan", ["-Db_sanitize=address,undefined", *SANITIZED], selection)


def run_tsan(selection: list[str]) -> Tally:
    return run_c("tsan", "tsan", ["-Db_sanitize=thread", *SANITIZED], selection, wrapper=tsan_wrapper())


def run_clang() -> Tally:
    if not shutil.which("clang"):
        return Tally(skips=[("clang", "clang is not installed")])
    return run_c("clang", "clang", [], ["--suite", "c"], compiler="clang")


def can_fuzz() -> bool:
    source = BUILD / "fuzz-probe.c"
    source.write_text("int LLVMFuzzerTestOneInput(const void *d, unsigned long n) { return d && n > 1 && 0; }\n")
    return bool(shutil.which("clang")) and not call(
        ["clang", "-fsanitize=fuzzer,address", "-o", BUILD / "fuzz-probe", source],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def read_fuzzer(target: str, output: str, code: int) -> Tally:
    count = re.search(r"^stat::number_of_executed_units: (\d+)", output, flags=re.MULTILINE)
    if code == 0 and count and int(count[1]):
        print(f"   fuzz/{target}: {int(count[1]):,} executions, nothing found", flush=True)
        return Tally(passed=1)
    print(f"--- fuzz/{target} ended with {code}\n{output[-6000:]}", flush=True)
    return Tally(failures=[f"fuzz/{target}: an input breaks it, or it did not run"])


def run_fuzz() -> Tally:
    """A minute of each fuzz target. What fails stays in build-fuzz/; nothing is added to the corpora."""
    script, tally = ROOT / "tests/fuzz/fuzz.sh", Tally()
    BUILD.mkdir(exist_ok=True)
    targets = call([script, "--list"], stdout=subprocess.PIPE).stdout.split()
    if not can_fuzz():
        return Tally(skips=[(f"fuzz/{target}", "clang with libFuzzer is not installed") for target in targets])
    for target in targets:
        done = call([script, target, str(FUZZ_S)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        tally.add(read_fuzzer(target, done.stdout, done.returncode))
    return tally


def run_pytest(name: str, tests: list[pathlib.Path], *options: str) -> Tally:
    """Runs pytest, which shows how far it is and what fails."""
    report = BUILD / f"{name}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    done = call([sys.executable, "-m", "pytest", "-q", "--no-header", "--disable-warnings", "-p", "no:cacheprovider",
                 "-o", f"faulthandler_timeout={HANG_S}", f"--junitxml={report}", *options, *tests])
    if done.returncode not in (0, 1) or not report.exists():
        raise CannotRun(f"pytest ended with {done.returncode}")
    tally = read_junit(report)
    if done.returncode and not tally.failures:
        tally.failures.append(f"{name}: pytest ended with {done.returncode}")
    return tally


def run_other(name: str) -> Tally:
    """The Python tests with another PyTorch, each case once; skipped where that cannot be installed."""
    report = BUILD / f"pytest-{name}.xml"
    report.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "STH_TEST_FULL"}
    done = call([ROOT / "tools/test_torch.sh", "-q", "--no-header", "--disable-warnings", "-p", "no:cacheprovider",
                 "-o", f"faulthandler_timeout={HANG_S}", "-m", "not alone", *SPREAD, f"--junitxml={report}",
                 ROOT / "tests/python"], env={**environment, "TORCH": OTHERS[name]})
    if done.returncode == NOT_INSTALLED:
        return Tally(skips=[(name, f"{OTHERS[name]} cannot be installed here")])
    if done.returncode not in (0, 1) or not report.exists():
        raise CannotRun(f"tools/test_torch.sh ended with {done.returncode}")
    tally = read_junit(report)
    tally.failures = [f"{name}: {failure}" for failure in tally.failures]
    return tally


def run_python() -> Tally:
    tests = ROOT / "tests/python"
    tally = run_pytest("pytest", [tests], "-m", "not alone", *SPREAD)
    # The others need not be imported again.
    marked = [path for path in sorted(tests.rglob("test_*.py")) if "mark.alone" in path.read_text()]
    alone = run_pytest("pytest-alone", marked, "-m", "alone")
    alone.skips = [skip for skip in alone.skips if skip not in tally.skips]  # modules that skip themselves do so twice
    tally.add(alone)
    return tally


def skip_reason(skipped: ElementTree.Element) -> str:
    """A module that skips itself leaves its reason in the text: ('path', line, 'Skipped: reason')."""
    if inner := re.search(r"Skipped: (.*?)['\"]\)\s*$", skipped.text or ""):
        return inner[1]
    return skipped.get("message") or "no reason given"


def read_junit(report: pathlib.Path) -> Tally:
    tally = Tally()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"python/{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            tally.failures.append(name)
        elif skipped is not None:
            tally.skips.append((name, skip_reason(skipped)))
        else:
            tally.passed += 1
    return tally


def run_suite(name: str, full: bool) -> Tally:
    quick = ["--suite", "c"] if full else ["--suite", "c", "--no-suite", "slow"]
    runners = {
        "c": lambda: run_c("c", "lib", [], []),
        "asan": lambda: run_asan(quick),
        "tsan": lambda: run_tsan(quick if full else [*quick, "--no-suite", "one-thread"]),
        "clang": run_clang,
        "fuzz": run_fuzz,
        "python": run_python,
        **{name: functools.partial(run_other, name) for name in OTHERS},
    }
    start = time.monotonic()
    print(f"== {name}", flush=True)
    try:
        tally = runners[name]()
        if not tally.passed and not tally.failures and not tally.skips:
            raise CannotRun("it has no tests")
    except CannotRun as error:
        print(error)
        tally = Tally(failures=[f"{name}: the suite could not run: {str(error).splitlines()[0]}"])
    print(f"   {tally.line()} in {time.monotonic() - start:.0f} s", flush=True)
    return tally


def print_skips(skips: list[tuple[str, str]]) -> None:
    by_reason: dict[str, list[str]] = {}
    for test, reason in skips:
        by_reason.setdefault(reason, []).append(test)
    for reason, tests in by_reason.items():
        print(f"skipped ({len(tests)}): {reason}")
        for test in tests:
            print(f"    {test}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the tests; see the top of this file.")
    parser.add_argument("suites", nargs="*", metavar="suite",
                        help="c, asan, tsan, clang, fuzz, python, oldest, newest; default: those of `make test`")
    parser.add_argument("--full", action="store_true", help="more cases, slow ones under sanitizers, clang, fuzzers")
    options = parser.parse_args()
    everything = ["c", "asan", "tsan", *(["clang", "fuzz"] if options.full else []), "python",
                  *(OTHERS if options.full else ())]
    unknown = set(options.suites) - {*everything, "clang", "fuzz", *OTHERS}
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    os.environ.update(SANITIZER_OPTIONS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests' tensors are small: more threads make PyTorch slower
    # Meson, Ninja and python3 are those that stand beside this interpreter.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    if options.full:
        os.environ["STH_TEST_FULL"] = "1"

    total = Tally()
    for name in options.suites or everything:
        total.add(run_suite(name, options.full))
    print_skips(total.skips)
    for failure in total.failures:
        print(f"failed: {failure.splitlines()[0]}")
    print(total.line())
    return 0 if total.passed and not total.failures else 1


if __name__ == "__main__":
    # Shells ignore SIGINT in what they start in the background, and children inherit that: tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted")
        sys.exit(130)
