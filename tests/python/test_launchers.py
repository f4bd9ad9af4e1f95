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
from test_trainers import one_thread  # noqa: E402, F401: the fixture

ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no",
              "--dynamo_backend=no", "--main_process_port=0", f"--num_processes={launched.WORLD}"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launched.WORLD}"]


def launch(launcher: list, *args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *launcher, launched.__file__, *args], env=env, capture_output=True,
                          text=True, timeout=280)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder, what each rank found) of accelerate's launcher."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(ACCELERATE, "train", str(folder))
    assert done.returncode == 0, done.stderr[-6000:]
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(launched.WORLD)]


def same(mine: dict, theirs: dict) -> None:
    assert mine.keys() == theirs.keys()
    for name, param in mine.items():
        assert s.same(param, theirs[name]), name


@pytest.mark.parametrize("build", launched.BUILDS)
@pytest.mark.parametrize("run", launched.RUNS)
def test_ranks_train_what_one_process_trains(ranks, run, build, tmp_path):
    """And, from a checkpoint in the middle, the ranks again and one process alone."""
    folder, found = ranks
    want = launched.RUNS[run](build, tmp_path, managed=False, parts=launched.WORLD)["weights"]
    for rank in found:
        for resumes in (False, True):
            assert rank[run, build, resumes]["ranks"] == launched.WORLD
            assert rank[run, build, resumes]["streamed"] > 20_000
            same(rank[run, build, resumes]["weights"], want)
    alone = launched.RUNS[run](build, folder / f"{run} {build}", managed=True, parts=launched.WORLD, resumes=True)
    assert alone["ranks"] == 1
    same(alone["weights"], want)
