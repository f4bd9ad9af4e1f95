#!/usr/bin/env python3
"""Runs the tests of other projects, unmodified, with stagehand in place of their own offloading.

    PEERS=folder tests/peers/run.py [accelerate diffusers torchtune ao DeepSpeed safetensors]

`folder` holds their checkouts by these names; nothing is fetched. One that is not there, or whose requirements are not
installed, is skipped by name. adapt_NAME.py substitutes the entry points, and lists the tests that do not apply, each
with its reason; a listed name that is not collected is an error. Ends with `N passed, N failed, N skipped`.
"""

import argparse
import importlib.util
import os
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import run as suites  # noqa: E402  tests/run.py

# Name -> (folders of the checkout that are imported from, tests, pytest's options, modules that they need).
PEERS = {
    "accelerate": (["src"], ["tests/test_big_modeling.py"], [],
                   ["psutil", "parameterized", "transformers"]),
    "diffusers": (["src", "."], ["tests/hooks/test_group_offloading.py", "tests/models"],
                  ["-k", "GroupOffload or test_group_offloading"],
                  ["accelerate", "httpx", "parameterized", "peft", "PIL", "requests_mock"]),
    "torchtune": (["."], ["tests/torchtune/training/test_activation_offloading.py"], ["--noconftest"], []),
    "ao": (["."], ["test/test_low_bit_optim.py"], ["-k", "offload"], ["expecttest"]),
    "DeepSpeed": ([".", "tests"], ["tests/unit/ops/adam/test_cpu_adam.py"], [],
                  ["cpuinfo", "einops", "hjson", "msgpack", "psutil"]),
    "safetensors": (["bindings/python/tests"], ["bindings/python/tests/test_simple.py",
                                               "bindings/python/tests/test_pt_comparison.py",
                                               "bindings/python/tests/test_pt_model.py",
                                               "bindings/python/tests/test_threadable.py"], [], ["fsspec"]),
}


def run_peer(name: str, folder: pathlib.Path) -> suites.Tally:
    root = folder / name
    if not root.is_dir():
        return suites.Tally(skips=[(name, f"{root} is not there")])
    paths, tests, options, needed = PEERS[name]
    if missing := [module for module in needed if importlib.util.find_spec(module) is None]:
        return suites.Tally(skips=[(name, f"its tests need what is not installed: {', '.join(missing)}")])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *(str(root / path) for path in paths)])
    report = suites.BUILD / f"peers-{name}.xml"
    suites.BUILD.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:  # some write files where they are run
            os.makedirs(f"{scratch}/tests/data")
            command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--disable-warnings", "-p",
                       "no:cacheprovider", "-o", "addopts=", "-p", f"adapt_{name.lower()}", f"--rootdir={root}",
                       f"--junitxml={report}", *options, *(root / test for test in tests)]
            done = suites.call(["env", "-C", scratch, *command])
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    if done.returncode not in (0, 1) or not report.exists():
        return suites.Tally(failures=[f"{name}: pytest ended with {done.returncode}"])
    return suites.read_junit(report)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs other projects' tests; see the top of this file.")
    parser.add_argument("peers", nargs="*", metavar="peer", help=", ".join(PEERS))
    chosen = parser.parse_args().peers or list(PEERS)
    if unknown := sorted({*chosen} - {*PEERS}):
        parser.error(f"no such peer: {', '.join(unknown)}")
    if not os.environ.get("PEERS"):
        parser.error("PEERS names the folder of the checkouts: make test-peers PEERS=/path")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(HF_HUB_OFFLINE="1")
    total = suites.Tally()
    for name in chosen:
        print(f"== {name}", flush=True)
        tally = run_peer(name, pathlib.Path(os.environ["PEERS"]).resolve())
        print(f"   {tally.line()}", flush=True)
        total.add(tally)
    suites.print_skips(total.skips)
    for failure in total.failures:
        print(f"failed: {failure}")
    print(total.line())
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
