"""What the cases of training.py share: models, a training loop, comparisons, rows."""

from __future__ import annotations

import contextlib
import sys
import time

import torch
import torch.nn as nn
from common import Stack, Where, fill, linear, nbytes, spread, timed

import stagehand

RANK = 16


class Lora(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = linear(inputs, outputs)
        self.a = nn.Parameter(torch.randn(RANK, inputs, dtype=torch.bfloat16) * 0.01)
        self.b = nn.Parameter(torch.randn(outputs, RANK, dtype=torch.bfloat16) * 0.01)

    def forward(self, x):
        return self.base(x) + (x @ self.a.t()) @ self.b.t()


def lora_model(args, checkpointed: bool = True) -> Stack:
    """The same model each time."""
    torch.manual_seed(0)
    return fill(Stack(args.blocks, args.hidden, Lora, checkpointed=checkpointed), args.hidden)


def full_model(args) -> Stack:
    torch.manual_seed(0)
    return fill(Stack(args.blocks, args.hidden, checkpointed=True), args.hidden, trainable=True)


class Loop:
    """Training on one batch. optimizer: made of the trainable parameters; None where none is to run. context: makes
    what forward and backward run in."""

    def __init__(self, model, x, optimizer=None, context=contextlib.nullcontext) -> None:
        self.model = model
        self.x = x
        self.context = context
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.trained) if optimizer is not None else None

    def loss(self) -> torch.Tensor:
        return self.model(self.x.detach().requires_grad_()).float().pow(2).mean()

    def clear(self) -> None:
        for param in self.trained:
            param.grad = None

    def step(self) -> torch.Tensor:
        with self.context():
            loss = self.loss()
            loss.backward()
        self.optimizer.step()
        self.clear()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        """Copies on the host."""
        self.clear()
        with self.context():
            self.loss().backward()
        got = [p.grad.to("cpu", copy=True) for p in self.trained]
        self.clear()
        return got

    def state_bytes(self, where: Where) -> int:
        """Bytes on the device that are not the model's: the batch, the optimizer's state."""
        if not where.cuda:
            return 0
        found = [self.x]
        for state in (self.optimizer.state.values() if self.optimizer is not None else ()):
            found += [t for t in state.values() if isinstance(t, torch.Tensor) and t.is_cuda]
        return nbytes(found)


def agreement(mine: list[torch.Tensor], theirs: list[torch.Tensor], where: Where) -> dict:
    """norm: largest relative difference of norms. max: largest difference of elements over the largest element
    of the same gradient."""
    norm = most = 0.0
    for a, b in zip(mine, theirs):
        a, b = a.to(where.torch).float(), b.to(where.torch).float()
        norm = max(norm, abs(a.norm() - b.norm()).item() / b.norm().item())
        most = max(most, ((a - b).abs().max() / b.abs().max()).item())
    return {"grad_norm": norm, "grad_max": most}


def worst(rows) -> dict:
    rows = list(rows)
    return {key: max(row[key] for row in rows) for key in ("grad_norm", "grad_max")}


@contextlib.contextmanager
def streamed(model, budget: str, where: Where):
    """The model under `stagehand.layer`; yields its runtime. Afterwards it is plain again, on the host."""
    stagehand.layer(model, vram_budget=budget, device=where.target(stagehand.parse_size(budget)))
    runtime = stagehand.runtime(model)
    try:
        yield runtime
    finally:
        runtime.shutdown()
        where.clean()


def down_bytes(stats: dict) -> int | None:
    """Bytes from the device to the host since the start."""
    return stats.get("d2h_bytes")


class Counted:
    """What a runtime moved in a number of steps, for a row."""

    def __init__(self, runtime, where: Where) -> None:
        self.runtime, self.where = runtime, where
        where.synchronize()
        self.before = runtime.stats

    def per_step(self, steps: int) -> dict:
        self.where.synchronize()
        after, row = self.runtime.stats, {}
        row["h2d"] = (after["h2d_bytes"] - self.before["h2d_bytes"]) / steps
        if down_bytes(after) is not None:
            row["d2h"] = (down_bytes(after) - down_bytes(self.before)) / steps
        row["waits"] = (after["host_waits"] - self.before["host_waits"]) / steps
        row["demand"] = (after["demand_loads"] - self.before["demand_loads"]) / steps
        row["plan"] = self.runtime.plan
        row["predicted"] = row["plan"]["step_ns"] / 1e6
        row["last_step"] = after["last_step"]
        return row


def attempt(name: str, rows: list[dict], make) -> dict | None:
    """Runs `make`, which returns a row; a failure is a row as well."""
    try:
        row = {"row": name, **make()}
    except Exception as error:  # noqa: BLE001 - a row that fails must not end the run
        row = {"row": name, "failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    rows.append(row)
    said = row.get("failed") or (f"{row['ms']:.1f} ms" if "ms" in row else "done")
    print(f"  {name}: {said}", file=sys.stderr, flush=True)
    return None if "failed" in row else row


def measured(loop: Loop, where: Where, steps: int, warm: int) -> dict:
    timed(loop.step, warm, where)
    where.reset_peak()
    rest = where.allocated()
    begin = time.perf_counter()
    times = timed(loop.step, steps, where)
    wall = (time.perf_counter() - begin) * 1e3 / steps
    return {**spread(times), "wall_ms": wall, "peak": where.peak(), "rest": rest}


TURN = 5  # steps


def in_turns(steps, times: int, where: Where) -> list[dict]:
    """At least `times` of each of the steps, in turns of a few back to back, of which the first does not count: what
    the machine is doing, and how warm it is, changes while a bench runs."""
    spent: list[list[float]] = [[] for _ in steps]
    while len(spent[-1]) < times:
        for step, found in zip(steps, spent):
            found += timed(step, TURN + 1, where)[1:]
    return [spread(found) for found in spent]


def halves(loop: Loop, where: Where, steps: int) -> tuple[float, float]:
    """Medians of forward and backward, ms, the device idle at each border."""
    forward, backward = [], []
    for _ in range(steps):
        kept: list = []
        forward += timed(lambda kept=kept: kept.append(loop.loss()), 1, where)
        backward += timed(lambda kept=kept: kept.pop().backward(), 1, where)
        loop.clear()
    return spread(forward)["ms"], spread(backward)["ms"]


def adamw(params):
    """Steps of size 0: every run computes the same gradients."""
    return torch.optim.AdamW(params, lr=0.0)


def batch(args, where: Where) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, args.tokens, args.hidden, dtype=torch.bfloat16).to(where.torch)


def ratios(row: dict, base: dict | None) -> dict:
    if base:
        row["x_resident"] = row["ms"] / base["ms"]
    if row.get("bound"):
        row["x_bound"] = row["ms"] / row["bound"]
    return row
