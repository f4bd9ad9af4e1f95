"""Layer mode: bit-equal to an aligned deep copy, within the budget, in whatever order layers are called."""

import random

import pytest
import torch
from support import (
    Crossed, Experts, HostMasterGuard, RawNet, RecurrentNet, Router, Stack, TinyLM, aligned_copy, made, nbytes,
    random_model, runtime, same, smallest_budget, tight_budget, wrap)
from torch import nn

import stagehand


def run(model, inputs, guard=True):
    """Outputs of the wrapped model under the guard."""
    if not guard:
        return [model(*x) for x in inputs]
    with HostMasterGuard(model):
        return [model(*x) for x in inputs]


# ---------------------------------------------------------------------- equality


@pytest.mark.parametrize("seed", range(20))
def test_random_models_and_budgets_are_bit_equal(seed):
    rng = random.Random(seed)
    model = random_model(rng)
    if rng.random() < 0.5:
        model.requires_grad_(False)
    ref = aligned_copy(model)
    least, whole = smallest_budget(model), nbytes(model)
    budget = rng.choice([least, least, least + (whole - least) // 4, least + (whole - least) // 2, 2 * whole])
    inputs = [model.example() for _ in range(5)]
    context = rng.choice([torch.no_grad, torch.inference_mode])
    with context():
        wanted = [ref(*x) for x in inputs]
    wrap(model, budget, rng.choice([None, 3e8]), inference_mode=rng.random() < 0.3)
    with context():
        got = run(model, inputs)
    assert all(same(a, b) for a, b in zip(got, wanted))
    stats = runtime(model).stats
    assert stats["steps"] == len(inputs)
    assert stats["device_peak"] + stats["reserved_bytes"] <= budget
    if budget < whole // 2:
        assert stats["h2d_bytes"] > 2 * (whole - budget)
    runtime(model).shutdown()
    for (name, mine), theirs in zip(model.state_dict().items(), ref.state_dict().values()):
        assert same(mine, theirs), name


@pytest.mark.parametrize("kind", [Stack, TinyLM, RawNet, RecurrentNet])
def test_a_slow_link_shows_no_missing_wait(kind):
    """Copies take far longer than compute: whatever runs without waiting for its weights computes with NaN."""
    model = made(kind)
    ref = aligned_copy(model)
    inputs = [model.example() for _ in range(4)]
    wrap(model, smallest_budget(model), 5e7)
    with torch.no_grad():
        wanted = [ref(*x) for x in inputs]
        assert all(same(a, b) for a, b in zip(run(model, inputs), wanted))


def test_frozen_weights_under_grad_mode_give_the_reference_and_its_input_gradient():
    model = made(Stack, 6, 48)
    ref = aligned_copy(model)
    wrap(model, 4 * nbytes(model))
    for _ in range(4):
        x = model.example()[0]
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with HostMasterGuard(model):
            out = model(mine)
            out.sum().backward()
        wanted = ref(theirs)
        wanted.sum().backward()
        assert same(out, wanted) and same(mine.grad, theirs.grad)
        del out


def test_small_neighbours_come_together():
    """Layers that follow each other lie side by side in the arena, whoever of them streams."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(320) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(4, 64)
    ref = aligned_copy(model)
    wrap(model, nbytes(model) // 2, 4e9, inference_mode=True)
    with torch.no_grad():
        for _ in range(4):
            assert same(model(x), ref(x))
    stats = runtime(model).stats
    assert stats["demand_loads"] == 0
    assert 2 * stats["joined_copies"] > stats["copies"]


def test_a_large_budget_moves_every_byte_once():
    model = made(Stack, 6, 48)
    wrap(model, 2 * nbytes(model))
    with torch.no_grad():
        for _ in range(6):
            model(*model.example())
    stats = runtime(model).stats
    assert stats["h2d_bytes"] <= nbytes(model)


def test_tables_are_read_in_place_and_their_rows_counted():
    model = made(TinyLM, 4000, 32)
    model.head = nn.Linear(32, 8)
    model.requires_grad_(False)
    ref = aligned_copy(model)
    inputs = [model.example() for _ in range(3)]
    table = model.embed.weight.numel() * 4
    wrap(model, table // 2)
    with torch.no_grad():
        assert all(same(a, b) for a, b in zip(run(model, inputs), [ref(*x) for x in inputs]))
    stats = runtime(model).stats
    assert stats["mapped_bytes"] == 3 * inputs[0][0].numel() * 32 * 4
    assert stats["h2d_bytes"] < table


# ---------------------------------------------------------------------- steps


def test_steps_are_recognised_and_scheduled():
    model = made(Stack, 8, 48)
    wrap(model, tight_budget(model))
    own = runtime(model)
    assert own.mode == "trace" and not own.traced and own.step == 0
    with torch.no_grad():
        for i in range(5):
            model(*model.example())
            assert own.step == i + 1
    assert own.mode == "scheduled" and own.traced
    assert own.stats["deviations"] == 0
    assert own.plan["step_ns"] > 0
    own.synchronize()
    history = own.telemetry.history
    assert [int(record.step) for record in history] == sorted(int(record.step) for record in history)
    own.shutdown()
    assert own.mode == "shutdown" and own.telemetry.history == history


def test_another_order_than_that_of_registration_is_right_from_the_first_forward():
    """Field case 33."""
    model = made(Crossed)
    ref = aligned_copy(model)
    inputs = [model.example() for _ in range(6)]
    wrap(model, nbytes(model) // 3)
    with torch.no_grad():
        assert all(same(a, b) for a, b in zip(run(model, inputs), [ref(*x) for x in inputs]))
    own = runtime(model)
    assert own.traced and own.stats["deviations"] == 1
    before = own.stats["demand_loads"]
    with torch.no_grad():
        run(model, inputs)
    assert own.stats["demand_loads"] == before


@pytest.mark.parametrize("seed", range(3))
def test_deviations_stay_right(seed):
    """Other orders, skipped, repeated and missing layers, early exits, in the middle of regular steps."""
    rng = random.Random(seed)
    model = made(Router, 7, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model), rng.choice([None, 2e8]))
    with torch.no_grad(), HostMasterGuard(model):
        for _ in range(16):
            order = list(range(7))
            kind = rng.choice(["regular", "regular", "shuffled", "skipped", "repeated", "short", "none"])
            if kind == "shuffled":
                rng.shuffle(order)
            elif kind == "skipped":
                order = [i for i in order if rng.random() < 0.6]
            elif kind == "repeated":
                order = [rng.randrange(7) for _ in range(12)]
            elif kind == "short":
                order = order[: rng.randint(0, 6)]
            elif kind == "none":
                order = []
            x = model.example()[0]
            assert same(model(x, order=order), ref(x, order=order)), kind
    stats = runtime(model).stats
    assert stats["device_peak"] + stats["reserved_bytes"] <= tight_budget(model)


def test_a_new_order_that_stays_is_planned():
    model = made(Router, 8, 40)
    wrap(model, tight_budget(model))
    with torch.no_grad():
        for order in (list(range(8)), list(reversed(range(8)))):
            for _ in range(6):
                model(*model.example(), order=order)
            before = runtime(model).stats
            for _ in range(3):
                model(*model.example(), order=order)
            after = runtime(model).stats
            assert after["demand_loads"] == before["demand_loads"]
            assert after["deviations"] == before["deviations"]


def test_experts_cost_no_more_than_those_that_are_used():
    """Field case 35: which experts run depends on the data."""
    model = made(Experts, 32, 4, 6)
    ref = aligned_copy(model)
    wrap(model, nbytes(model) // 3)
    costs = []
    with torch.no_grad(), HostMasterGuard(model):
        for _ in range(16):
            x = model.example()[0]
            before = runtime(model).stats["copies"]
            assert same(model(x), ref(x))
            costs.append((runtime(model).stats["copies"] - before, model.used + len(model.layers)))
    assert all(copies <= bound for copies, bound in costs[8:]), costs


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", [0, 3, 6])
def test_after_an_exception_the_next_step_is_right(error, where):
    """Field case 67. The traceback is kept, and must not keep weights on the device."""
    model = made(Router, 7, 40)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model), 2e8)
    kept = []
    with torch.no_grad():
        for _ in range(3):
            x = model.example()[0]
            assert same(model(x), ref(x))
            with pytest.raises(error) as info:
                model(x, fail=where, error=error)
            kept.append(info)
            assert same(model(x), ref(x))
    assert runtime(model).stats["device_peak"] <= tight_budget(model)


@pytest.mark.parametrize("inside", [False, True])
def test_an_exception_inside_a_layer_lets_go_of_its_place(inside):
    class Sometimes(nn.Linear):
        fail = False

        def forward(self, x):
            weight = self.weight  # kept by the traceback
            if self.fail:
                raise KeyboardInterrupt
            return nn.functional.linear(x, weight, self.bias)

    torch.manual_seed(0)
    model = nn.Sequential(*(Sometimes(64, 64) for _ in range(8))).eval().requires_grad_(False)
    ref = aligned_copy(model)
    wrap(model, smallest_budget_of(model))
    x, kept = torch.randn(2, 64), []
    with torch.no_grad():
        for i in range(8):
            model[i].fail = True
            try:
                model[i](x) if inside else model(x)
            except KeyboardInterrupt as error:
                kept.append(error)
            model[i].fail = False
            assert same(model(x), ref(x))
    assert len(kept) == 8


def smallest_budget_of(model):
    model.example = lambda: (torch.randn(2, 64),)
    try:
        return smallest_budget(model)
    finally:
        del model.__dict__["example"]


def test_nested_recursive_and_shared_modules():
    class Tree(nn.Module):
        """Calls itself, and one child module several times."""

        def __init__(self, d=48):
            super().__init__()
            self.mix = nn.Parameter(torch.randn(600, 600) / 600)  # of its own: managed, and entered again
            self.up, self.down = nn.Linear(d, 600), nn.Linear(600, d)
            self.shared = nn.Linear(d, d)
            self.again = nn.ModuleList([self.shared, nn.Linear(d, d), self.shared])

        def forward(self, x, depth=2):
            for layer in self.again:
                x = torch.tanh(layer(x))
            x = x + self.down(self.up(x) @ self.mix)
            if depth:
                x = x + self(x, depth=depth - 1)
                x = x + self.down(self.up(x) @ self.mix)
            return x

    model = made(Tree)
    model.example = lambda: (torch.randn(2, 48),)
    least = smallest_budget(model)
    ref = aligned_copy(model)
    wrap(model, least)
    with torch.no_grad(), HostMasterGuard(model):
        for _ in range(4):
            x = torch.randn(2, 48)
            assert same(model(x), ref(x))


def test_parts_called_alone_outside_the_root():
    model = made(Stack, 6, 48)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model), 2e8)
    with torch.no_grad(), HostMasterGuard(model):
        for _ in range(4):
            x = model.example()[0]
            assert same(model.blocks[3](x), ref.blocks[3](x))
            assert same(model.blocks[2].up(x), ref.blocks[2].up(x))
            assert same(model(x), ref(x))
            mine = theirs = x
            for i in range(6):
                mine, theirs = model.blocks[i](mine), ref.blocks[i](theirs)
            assert same(mine, theirs)


def test_a_forward_that_was_bound_before_wrapping_sees_the_device():
    class Bound(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)
            self.call = self.fc.forward

        def forward(self, x):
            return self.call(x)

    model = made(Bound)
    ref = aligned_copy(model)
    ref.call = ref.fc.forward
    wrap(model, 40000)
    with torch.no_grad(), HostMasterGuard(model):
        x = torch.randn(2, 64)
        assert same(model(x), ref(x))


def test_the_budget_can_change_between_steps():
    model = made(Stack, 8, 48)
    ref = aligned_copy(model)
    budgets = [tight_budget(model), nbytes(model), 2 * nbytes(model), tight_budget(model)]
    wrap(model, 3 * nbytes(model))
    own = runtime(model)
    with torch.no_grad():
        for budget in budgets:
            own.set_vram_budget(budget)
            for _ in range(3):
                x = model.example()[0]
                assert same(model(x), ref(x))
            stats = own.stats
            assert stats["device_bytes"] + stats["reserved_bytes"] <= budget
        with pytest.raises(stagehand.StagehandOOMError, match="smallest"):
            own.set_vram_budget(1000)
        own.set_vram_budget("1MB")
        own.free(200_000)
        assert own.stats["budget"] == 800_000
        assert same(model(x), ref(x))


# ---------------------------------------------------------------------- torch.compile


def test_a_model_that_is_compiled_around_the_wrapping_runs_uncompiled_and_says_so():
    """test_compiled.py has what is compiled below it."""
    model = made(Stack, 4, 48)
    ref = aligned_copy(model)
    wrap(model, tight_budget(model))
    call = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="torch.compile has no effect"):
        for batch in (4, 4, 7, 4, 7):
            x = model.example(batch)[0]
            assert same(call(x), ref(x))
    stats = runtime(model).stats
    assert stats["copies"] > 0 and stats["device_peak"] + stats["reserved_bytes"] <= tight_budget(model)


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # PyTorch's, where the setting has no effect any more
def test_blocks_whose_graphs_would_keep_their_weights_run_uncompiled_and_are_named():
    """PyTorch 2.4 makes such graphs, others do where they are told to."""
    from torch._dynamo import config

    model = made(Stack, 4, 48, frozen=False)
    ref = aligned_copy(model)
    with config.patch(inline_inbuilt_nn_modules=False):
        for block in model.blocks:
            block.compile(backend="eager")
        with pytest.warns(RuntimeWarning, match="blocks.0.*graphs of this compiler keep the weights") as warned:
            wrap(model, tight_budget(model))
        assert not any("has room for it" in str(warning.message) for warning in warned)
        for batch in (4, 4, 7):
            x = model.example(batch)[0]
            for net in (model, ref):
                net.zero_grad()
                net(x).pow(2).sum().backward()
            assert same([p.grad for p in model.parameters()], [p.grad for p in ref.parameters()])
        assert runtime(model).compiled == []
        runtime(model).shutdown()
