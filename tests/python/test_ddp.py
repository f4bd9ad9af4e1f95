"""DistributedDataParallel over managed models: two ranks with gloo give what one process gives."""

import subprocess
import sys

import ddp_ranks
import pytest
import torch

WORLD = 2

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


@pytest.mark.parametrize("name", ddp_ranks.CASES)
def test_ranks_train_as_one_process_with_the_same_batch(found, name):
    options, optimizer, how = ddp_ranks.CASES[name]
    model = ddp_ranks.net(trained=options.get("trained", "adapters"))
    params = ddp_ranks.trained_of(model)
    ddp_ranks.by_hand(params, model, ddp_ranks.OPTIMIZERS[optimizer](params), WORLD, **how)
    for rank in range(WORLD):
        weights, h2d_bytes = found[rank][name]
        assert all(torch.equal(mine, param) for mine, param in zip(weights, params, strict=True))
        assert h2d_bytes > 0  # they stream


def test_ranks_with_other_frozen_weights_are_refused_together(found):
    for rank in range(WORLD):
        assert "differ between ranks" in found[rank]["other weights"] and "0.base" in found[rank]["other weights"]


def test_a_model_that_is_wrapped_behind_ddp_is_refused(found):
    for rank in range(WORLD):
        assert "stagehand.layer(model) first, then DistributedDataParallel" in found[rank]["wrapped behind"]
        assert found[rank]["plain constructor"].startswith("torch.")
