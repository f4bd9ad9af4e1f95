"""DistributedDataParallel over managed models, and shards beside them: ranks with gloo give what one process gives.
With STH_TEST_DEVICE=cuda:0 they share that card.
"""

import os
import re
import subprocess
import sys

import card
import ddp_ranks
import pytest
import torch
from support import at_rest

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module", params=[2, 4] if os.environ.get("STH_TEST_FULL") else [2])
def found(request, tmp_path_factory):
    """What each rank found."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    ranks = [subprocess.Popen([sys.executable, ddp_ranks.__file__, str(rank), str(world), str(folder / "meeting"),
                               str(folder / f"{rank}.pt")], stderr=subprocess.PIPE, text=True) for rank in range(world)]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def equal(weights: list, params: list, world: int) -> bool:
    """Two ranks give the same bits. More add up in an order of their own, and an optimizer may step the other way where
    a gradient is next to nothing."""
    pairs = zip(weights, at_rest(params), strict=True)
    if world == 2 and not card.ON_CARD:
        return all(torch.equal(mine, param) for mine, param in pairs)
    return all((mine - param).abs().mean() < 2e-4 for mine, param in pairs)


# Weights that live on the device. One rank has less budget, and they still live where the others' do.
ON_DEVICE = {"adapters on the device": 5, "less budget on one rank before": 0, "less budget on one rank behind": 5}


@pytest.mark.parametrize("name", ddp_ranks.CASES)
def test_ranks_train_as_one_process_with_the_same_batch(found, name):
    options, optimizer, how = ddp_ranks.CASES[name]
    model = ddp_ranks.net(trained=options.get("trained", "adapters"), norms=options.get("norms", False))
    model = card.as_managed(model.to(card.TORCH))
    params = ddp_ranks.trained_of(model)
    ddp_ranks.by_hand(params, model, ddp_ranks.OPTIMIZERS[optimizer](params), len(found), **how)
    for rank in found:
        weights, h2d_bytes, there = rank[name]
        assert equal(weights, params, len(found))
        assert all(map(torch.equal, weights, found[0][name][0]))
        assert h2d_bytes > 0  # they stream
        assert there == ON_DEVICE.get(name, there) or card.ON_CARD  # where homes go by the link's rate


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
    for rank in found:
        assert re.search(REFUSALS[name], rank[name])


def test_the_constructor_of_ddp_is_put_back(found):
    for rank in found:
        assert rank["plain constructor"].startswith("torch.")


needs_shards = pytest.mark.skipif(not ddp_ranks.HAS_SHARDS or card.ON_CARD,
                                  reason="on the host, and not where PyTorch has no fully_shard or no DTensor")


@needs_shards
@pytest.mark.parametrize("name", ddp_ranks.SHARDED)
def test_fully_shard_works_around_and_beside_a_managed_block(found, name):
    model = ddp_ranks.outer()
    params = ddp_ranks.trained_of(model)
    ddp_ranks.by_hand(params, model, ddp_ranks.OPTIMIZERS["sgd"](params), len(found))
    for rank in found:
        assert equal(rank[f"sharded {name}"], params, len(found))


@needs_shards
@pytest.mark.parametrize("name", ddp_ranks.SHARDING)
def test_shards_of_a_managed_block_are_refused_before_anything_is_changed(found, name):
    for rank in found:
        text, changed = rank["shards"][name]
        assert not changed
        assert re.search(rf"{name.split()[0]}\(\) is refused.*shard of \d.base.weight of Sequential.*shutdown", text)
