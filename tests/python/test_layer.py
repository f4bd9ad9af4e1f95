"""Layer mode: bit-equal to an aligned deep copy, within the budget, under a guard for host masters."""

import random

import pytest
import torch
from support import HostMasterGuard, aligned_copy, random_model, runtime, same, smallest_budget, wrap, nbytes


@pytest.mark.parametrize("seed", range(20))
def test_random_models_and_budgets_are_bit_equal(seed):
    rng = random.Random(seed)
    model = random_model(rng)
    if rng.random() < 0.5:
        model.requires_grad_(False)
    ref = aligned_copy(model)
    least = smallest_budget(model)
    budget = rng.choice([least, least, least + (nbytes(model) - least) // 4, least + (nbytes(model) - least) // 2,
                         2 * nbytes(model)])
    inputs = [model.example() for _ in range(5)]
    context = rng.choice([torch.no_grad, torch.inference_mode])
    link = rng.choice([None, 3e8])
    with context():
        wanted = [ref(*x) for x in inputs]
    wrap(model, budget, link, inference_mode=rng.random() < 0.3)
    with context(), HostMasterGuard(model):
        got = [model(*x) for x in inputs]
    assert all(same(a, b) for a, b in zip(got, wanted))
    stats = runtime(model).stats
    assert stats["steps"] == len(inputs)
    assert stats["device_peak"] + stats["reserved_bytes"] <= budget
    if budget < nbytes(model) // 2:
        assert stats["h2d_bytes"] > nbytes(model)
    runtime(model).shutdown()
    for (name, mine), theirs in zip(model.state_dict().items(), ref.state_dict().values()):
        assert same(mine, theirs), name
