"""DistributedDataParallel over managed models, and shards beside them: two ranks with gloo give what one process gives.
"""

import re
import subprocess
import sys

import ddp_ranks
import pytest
import torch

WORLD = 4

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [subprocess.Popen([sys.executable, ddp_ranks.__file__, str(rank), str(WORLD), str(folder / "meeting"),
                               str(folder / f"{rank}.pt")], stderr=subprocess.PIPE, text=True) for rank in range(WORLD)]
    said = [rank.communicate(timeout=280)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


# Weights that live on the device. One rank has less budget, and they still live where the others' do.
ON_DEVICE = {"adapters on the device": 5, "less budget on one rank before": 0, "less budget on one rank behind": 5}


@pytest.mark.parametrize("name", ddp_ranks.CASES)
def test_ranks_train_as_one_process_with_the_same_batch(found, name):
    options, optimizer, how = ddp_ranks.CASES[name]
    model = ddp_ranks.net(trained=options.get("trained", "adapters"), norms=options.get("norms", False))
    params = ddp_ranks.trained_of(model)
    ddp_ranks.by_hand(params, model, ddp_ranks.OPTIMIZERS[optimizer](params), WORLD, **how)
    for rank in range(WORLD):
        weights, h2d_bytes, there = found[rank][name]
        assert all(torch.equal(mine, param) for mine, param in zip(weights, params, strict=True))
        assert h2d_bytes > 0  # they stream
        assert there == ON_DEVICE.get(name, there)


REFUSALS = {
    "other weights": "0.base.* differ between ranks",
    "other homes": "down.weight.*the same place on all ranks.*device on rank 0, host on rank 1",
    "other budgets": "the same place on all ranks",
    "no backend for the host on one rank": "rank 1: .*0.base.*cuda:nccl.*cpu:gloo",
    "wrapped behind": "stagehand.layer.* first, then DistributedDataParallel",
    "its module wrapped behind": "Sequential is in a DistributedDataParallel",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_refuse(found, name):
    for rank in range(WORLD):
        assert re.search(REFUSALS[name], found[rank][name])


def test_the_constructor_of_ddp_is_put_back(found):
    for rank in range(WORLD):
        assert found[rank]["plain constructor"].startswith("torch.")


needs_shards = pytest.mark.skipif(not ddp_ranks.HAS_SHARDS, reason="this PyTorch has no fully_shard, or no DTensor")


@needs_shards
@pytest.mark.parametrize("name", ddp_ranks.SHARDED)
def test_fully_shard_works_around_and_beside_a_managed_block(found, name):
    model = ddp_ranks.outer()
    params = ddp_ranks.trained_of(model)
    ddp_ranks.by_hand(params, model, ddp_ranks.OPTIMIZERS["sgd"](params), WORLD)
    for rank in range(WORLD):
        assert all(torch.equal(mine, param) for mine, param in zip(found[rank][f"sharded {name}"], params, strict=True))


@needs_shards
@pytest.mark.parametrize("name", ddp_ranks.SHARDING)
def test_shards_of_a_managed_block_are_refused_before_anything_is_changed(found, name):
    for rank in range(WORLD):
        text, changed = found[rank]["shards"][name]
        assert not changed
        assert re.search(rf"{name.split()[0]}\(\) is refused.*shard of \d.base.weight of Sequential.*shutdown", text)
