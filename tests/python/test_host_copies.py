"""Host memory of several processes on one node that stream the same files: the page cache has one copy for all."""

import os

import card
import children
import pytest
import torch
from file_support import save
from torch import nn

RANKS, WIDTH, LAYERS, BUDGET = 4, 1024, 16, 20 << 20

RANK = """
import torch
import stagehand
from stagehand import _core
from test_host_copies import BUDGET, build


def pss() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


def run(model):
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, model[0].in_features))
    return stagehand.runtime(model)


small = torch.nn.Sequential(torch.nn.Linear(64, 64))
stagehand.layer(small, vram_budget="1MB", device="sim")
run(small).shutdown()
before = pss()
device = _core.Device("sim", memory_bytes=BUDGET)
runtime = run(stagehand.load(build, {path!r}, vram_budget=BUDGET, device=device))
assert runtime.plan["bytes_per_step"] > 0
print("loaded", flush=True)
open({gate!r}).close()  # until all have loaded
stats = runtime.stats
print("took", pss() - before, "ring", stats["device_peak"] + stats["staging_bytes"], flush=True)
open({end!r}).close()
"""


def build():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@card.simulated_only  # a card's own memory counts there, and what its driver takes of the host's does not
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="this kernel tells no PSS")
def test_ranks_that_stream_the_same_files_share_one_copy(tmp_path):
    """The memory of the simulated device is host memory, too, and counts as ring."""
    model = build()
    weights = sum(param.nbytes for param in model.parameters())
    save(tmp_path / "w.safetensors", {name: param.detach() for name, param in model.named_parameters()})
    gates = [tmp_path / "gate", tmp_path / "end"]
    for gate in gates:
        os.mkfifo(gate)
    script = RANK.format(path=str(tmp_path / "w.safetensors"), gate=str(gates[0]), end=str(gates[1]))
    ranks = [children.start(script) for _ in range(RANKS)]
    for rank in ranks:
        rank.said("loaded")
    with open(gates[0], "w"):
        for rank in ranks:
            rank.said("took")
    with open(gates[1], "w"):
        done = [rank.wait() for rank in ranks]
    assert [each.status for each in done] == [0] * RANKS
    words = [each.stdout.split() for each in done]  # loaded took N ring N
    took, rings = (sum(int(each[number]) for each in words) for number in (2, 4))
    assert took <= 1.05 * weights + rings
    assert took < RANKS * weights  # as with a copy in each
