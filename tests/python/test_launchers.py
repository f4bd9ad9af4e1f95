"""Two ranks with gloo that a launcher has started, on the simulated device: accelerate, transformers' Trainer and
Lightning train what one process trains with the same global batch, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import launched
import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)
for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

import support as s  # noqa: E402
from card import simulated_only  # noqa: E402
from test_trainers import one_thread  # noqa: E402, F401: the fixture

ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no",
              "--dynamo_backend=no", "--main_process_port=0", f"--num_processes={launched.WORLD}"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launched.WORLD}"]
LAUNCHERS = {("accelerate", "trainer"): ACCELERATE, ("lightning",): TORCHRUN}
found: dict = {}  # name of a run -> (folder, what each rank found)


def launch(launcher: list, *args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *launcher, launched.__file__, *args], env=env, capture_output=True,
                          text=True, timeout=300)


def of_ranks(run: str, folder) -> tuple:
    """Each launcher starts once."""
    for names, launcher in LAUNCHERS.items():
        if run in names and run not in found:
            done = launch(launcher, "train", str(folder), *names)
            assert done.returncode == 0, done.stderr[-6000:]
            ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(launched.WORLD)]
            found.update((name, (folder, ranks)) for name in names)
    return found[run]


def same(mine: dict, theirs: dict) -> None:
    assert mine.keys() == theirs.keys()
    for name, param in mine.items():
        assert s.same(param, theirs[name]), name


@simulated_only  # the launchers are told to use the CPU
@pytest.mark.parametrize("run, build", [(run, build) for run in launched.RUNS for build in launched.BUILDS])
def test_ranks_train_what_one_process_trains(run, build, tmp_path_factory, tmp_path):
    """And, from a checkpoint in the middle, the ranks again and one process alone."""
    folder, ranks = of_ranks(run, tmp_path_factory.mktemp(run))
    want = launched.RUNS[run](build, tmp_path, managed=False, parts=launched.WORLD)
    for number, rank in enumerate(ranks):
        for resumes in (False, True):
            mine = rank[run, build, resumes]
            assert mine["ranks"] == launched.WORLD and mine["streamed"] > 20_000
            same(mine["weights"], want["weights"])
            if run == "lightning":
                assert s.same(mine["predicted"], want["predicted"][number::launched.WORLD])
    alone = launched.RUNS[run](build, folder / f"{run} {build}", managed=True, parts=launched.WORLD, resumes=True)
    assert alone["ranks"] == 1
    same(alone["weights"], want["weights"])


@pytest.mark.parametrize("where, says", [("budget", "smallest budget"), ("backward", "Error: rank 1 fails")])
def test_a_rank_that_fails_ends_all(where, says):
    """The others wait for it in a collective when it does."""
    done = launch(TORCHRUN, "fails", where)
    assert done.returncode != 0 and says in done.stderr
