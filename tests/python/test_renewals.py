"""Copies on the device that are made anew while the optimizer works: the same bits as the resident run, fewer bytes in
the next pass, and what is left to the next use."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagehand import _core, activation
from stagehand.errors import StagehandError
from stagehand.optim import OffloadedAdamW
from support import Stack, aligned_copy, made, nbytes, runtime, tight_budget, wrap


class Checkpointed(Stack):
    def __init__(self):
        super().__init__(wide=6)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class Slow:
    """An optimizer's threads that are still at work whenever they are asked. fails: the update that fails, from 1."""

    busy = True

    def __init__(self, core, fails=0) -> None:
        self.core, self.fails, self.waits = core, fails, 0

    def __getattr__(self, name):
        return getattr(self.core, name)

    def wait(self, ticket=0):
        self.core.wait(ticket)
        self.waits += bool(ticket)
        if ticket and self.waits == self.fails:
            raise StagehandError("an update failed on purpose", "IO")


def slow_adamw(params, **options) -> OffloadedAdamW:
    optimizer = OffloadedAdamW(params, lr=1e-3, threads=1, **options)
    optimizer._core = Slow(optimizer._core)
    return optimizer


def model_of(dtype=torch.bfloat16, build=Checkpointed):
    """Its largest weights are not hashed whole when they are looked at for writes, but sampled."""
    model = made(build, frozen=False).to(dtype)
    assert max(p.nbytes for p in model.parameters()) > 16 << 10
    return model


class Pair(nn.Linear):
    """Two weights in one unit."""

    def __init__(self, d):
        super().__init__(d, d, bias=False)
        self.back = nn.Parameter(torch.randn(d, d) / d)

    def forward(self, x):
        return x + torch.tanh(super().forward(x)) @ self.back


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair(96) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def budget_of(model):
    return tight_budget(model) + 3 * nbytes(model.blocks[0])


def train_step(model, optimizer, overlap=False, micro=1, example=(16, 48), around=contextlib.nullcontext):
    with around():
        for i in range(micro):
            x = torch.randn(example).to(next(model.parameters()).dtype)
            loss = model(x).float().square().mean()
            with optimizer.last_backward() if overlap and i == micro - 1 else contextlib.nullcontext():
                loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def moved(model):
    return runtime(model).stats["h2d_bytes"]


def same_answer(model, reference):
    x = torch.randn(4, 96 if isinstance(model, Pairs) else 48).to(next(model.parameters()).dtype)
    with torch.no_grad():
        return torch.equal(model(x), reference(x))


def spilled():
    return activation.offload(24 << 10, device="sim")


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("how", [
    {}, {"overlap": True}, {"micro": 3}, {"overlap": True, "micro": 3}, {"max_grad_norm": 0.5},
    {"overlap": True, "around": spilled}, {"overlap": True, "state_path": True},
], ids=lambda how: "+".join(how) or "after")  # fmt: skip
def test_twenty_steps_are_the_resident_runs(how, tmp_path):
    options = {key: how[key] for key in ("max_grad_norm",) if key in how}
    if "state_path" in how:
        options["state_path"] = tmp_path
    loop = {key: how[key] for key in ("overlap", "micro") if key in how}
    model = model_of()
    reference = aligned_copy(model)
    wrap(model, budget_of(model))
    optimizers = slow_adamw(model.parameters(), **options), OffloadedAdamW(reference.parameters(), lr=1e-3, **options)
    for step in range(20):
        torch.manual_seed(step)
        train_step(model, optimizers[0], around=how.get("around", contextlib.nullcontext), **loop)
        torch.manual_seed(step)
        train_step(reference, optimizers[1], **loop)
    assert same_answer(model, reference)
    runtime(model).shutdown()
    activation.shutdown()
    assert same(model, reference)


@pytest.mark.parametrize("build", [Checkpointed, Pairs])
def test_a_pass_moves_what_has_no_place(build):
    """And no more, once the order is known: forward and backward move what the plan says."""
    model = model_of(build=build)
    wrap(model, budget_of(model))
    example = (16, 96 if build is Pairs else 48)
    optimizer = slow_adamw(model.parameters())
    beside = []  # bytes that passes and the optimizer moved, beside what they should; a new plan moves some more
    for _ in range(12):
        before = moved(model)
        model(torch.randn(example, dtype=torch.bfloat16)).float().square().mean().backward()
        between = moved(model)
        optimizer.step()
        plan = runtime(model).plan
        kept = plan["total_bytes"] - plan["bytes_per_step"] // 2
        beside.append((between - before - plan["bytes_per_step"], moved(model) - between - kept))
        optimizer.zero_grad()
    assert (0, 0) in beside[4:] and kept > 0, beside
    runtime(model).shutdown()


@pytest.mark.parametrize("second", [torch.float32, None], ids=["masters", "one without"])
def test_a_unit_of_two_optimizers(second):
    model = model_of(build=Pairs)
    reference = aligned_copy(model)
    wrap(model, nbytes(model) // 2)
    optimizers = []
    for net, make in ((model, slow_adamw), (reference, OffloadedAdamW)):
        parts = [block.weight for block in net.blocks], [block.back for block in net.blocks]
        optimizers.append([make(part, master_dtype=dtype) for part, dtype in zip(parts, (torch.float32, second))])
        for optimizer in optimizers[-1]:
            optimizer.param_groups[0]["lr"] = 1e-2
    for step in range(6):
        for net, both in zip((model, reference), optimizers):
            torch.manual_seed(step)
            net(torch.randn(4, 96, dtype=torch.bfloat16)).float().square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    assert same_answer(model, reference)
    runtime(model).shutdown()
    assert same(model, reference)


# ---------------------------------------------------------------------- writes of others


def streamed_weights(model):
    return [p for block in model.blocks for p in (block.up.weight, block.down.weight)]


def unsampled(weight):
    """Elements that a look at samples of the weight does not see: lines of 64 bytes, 192 and more apart."""
    return weight.view(-1)[80 // weight.itemsize : 180 // weight.itemsize]


def steps_beside(model, reference, write, steps=4):
    """Each step of both is followed by the write, of which the next pass must know."""
    wrap(model, budget_of(model))
    optimizers = slow_adamw(model.parameters()), OffloadedAdamW(reference.parameters(), lr=1e-3)
    for step in range(steps):
        for net, optimizer in zip((model, reference), optimizers):
            torch.manual_seed(step)
            train_step(net, optimizer)
            for weight in streamed_weights(net):
                write(weight)
        assert same_answer(model, reference)
    runtime(model).shutdown()
    assert same(model, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_write_behind_the_step_is_seen(dtype):
    model = model_of(dtype)

    def write(weight):
        with torch.no_grad():
            unsampled(weight).add_(1)

    steps_beside(model, aligned_copy(model), write)


def test_a_write_through_data_is_seen_where_there_are_no_masters():
    """Such a write leaves no trace in a version."""
    model = model_of(torch.float32)

    def write(weight):
        unsampled(weight.data).add_(1)

    steps_beside(model, aligned_copy(model), write)


def test_a_subclass_may_write_through_data():
    class Clamped(OffloadedAdamW):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for weight in (p for p in group["params"] if p.dim() == 2):
                    unsampled(weight.data).clamp_(-0.001, 0.001)

    model = model_of()
    reference = aligned_copy(model)
    wrap(model, budget_of(model))
    optimizers = [Clamped(net.parameters(), lr=1e-3) for net in (model, reference)]
    optimizers[0]._core = Slow(optimizers[0]._core)
    for step in range(4):
        for net, optimizer in zip((model, reference), optimizers):
            torch.manual_seed(step)
            train_step(net, optimizer)
        assert same_answer(model, reference)
    runtime(model).shutdown()


# ---------------------------------------------------------------------- failures


def test_copies_that_fail_come_at_the_next_use():
    model = model_of()
    reference = aligned_copy(model)
    wrap(model, budget_of(model))
    optimizers = slow_adamw(model.parameters()), OffloadedAdamW(reference.parameters(), lr=1e-3)
    for step in range(12):
        for net, optimizer in zip((model, reference), optimizers):
            torch.manual_seed(step)
            x = torch.randn(16, 48, dtype=torch.bfloat16)
            net(x).float().square().mean().backward()
            if net is model and step > 3:
                _core._fault_arm("device_call", 1 + 3 * (step - 4), False)
            try:
                optimizer.step()
            finally:
                seen = _core._fault_seen("device_call")
                _core._fault_disarm()
            assert net is reference or step <= 3 or seen > 3 * (step - 4)
            optimizer.zero_grad()
        assert same_answer(model, reference)
    runtime(model).shutdown()
    assert same(model, reference)


class Interrupted:
    """A core in which an interrupt comes before the n-th renewal."""

    def __init__(self, core, n) -> None:
        self.core, self.left = core, n

    def __getattr__(self, name):
        return getattr(self.core, name)

    def refresh(self, unit):
        self.left -= 1
        if not self.left:
            self.unit = unit
            raise KeyboardInterrupt
        self.core.refresh(unit)


@pytest.mark.parametrize("n", [1, 3, 7])
def test_an_interrupt_leaves_the_unit_to_its_next_use(n):
    model = model_of()
    reference = aligned_copy(model)
    wrap(model, budget_of(model))
    optimizers = slow_adamw(model.parameters()), OffloadedAdamW(reference.parameters(), lr=1e-3)
    for step in range(4):
        torch.manual_seed(step)
        train_step(reference, optimizers[1])
        torch.manual_seed(step)
        if step < 3:
            train_step(model, optimizers[0])
            continue
        session = runtime(model).session
        session.core = Interrupted(session.core, n)
        with pytest.raises(KeyboardInterrupt):
            train_step(model, optimizers[0])
        assert all(e.changed() for u in session.units if u.index == session.core.unit for e in u.entries)
        session.core = session.core.core
    optimizers[0].step()  # nothing is left to do
    assert same_answer(model, reference)
    runtime(model).shutdown()
    assert same(model, reference)


@pytest.mark.parametrize("overlap", [False, True], ids=["after", "overlap"])
def test_an_update_that_fails_in_the_middle(overlap):
    """Its unit is not taken for new; the device shows what the masters are, whatever that is."""
    model = model_of()
    wrap(model, budget_of(model))
    optimizer = slow_adamw(model.parameters())
    for step in range(3):
        train_step(model, optimizer, overlap)
    optimizer._core.fails = optimizer._core.waits + 4
    with pytest.raises(StagehandError, match="on purpose"):
        train_step(model, optimizer, overlap)
    with pytest.raises(RuntimeError, match="an update failed"):
        optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    reference = model_of()
    with torch.no_grad():
        for mine, value in zip(reference.parameters(), weights, strict=True):
            mine.copy_(value)
    assert same_answer(model, aligned_copy(reference))
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(3):
        train_step(model, optimizer, overlap)
    runtime(model).shutdown()


def test_a_runtime_that_is_shut_down_before_the_step():
    model = model_of()
    reference = aligned_copy(model)
    wrap(model, budget_of(model))
    optimizers = slow_adamw(model.parameters()), OffloadedAdamW(reference.parameters(), lr=1e-3)
    for net, optimizer in zip((model, reference), optimizers):
        torch.manual_seed(0)
        net(torch.randn(16, 48, dtype=torch.bfloat16)).float().square().mean().backward()
        if net is model:
            runtime(model).shutdown()
        optimizer.step()
    assert same(model, reference)
