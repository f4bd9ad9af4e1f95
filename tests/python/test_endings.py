"""The process ends at any moment of a step, in any thread, or is forked there (endings.py has the cases).

The code is the one expected; nothing is written but the traceback of what was raised on purpose. The
tests of test_lifecycle.py end whole scripts at chosen places; here the moments come from seeds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import traceback

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import card  # noqa: E402
import stagehand  # noqa: E402
from endings import CODES, LIMIT_S, PLACES, wait_for  # noqa: E402
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig  # noqa: E402
from stagehand.optim import OffloadedAdamW  # noqa: E402
from support import Stack, aligned_copy, device, made, runtime, same, tight_budget  # noqa: E402

FULL = bool(os.environ.get("STH_TEST_FULL"))
SEEDS = 6 if FULL else 1
THREADS_MAY = ("os._exit", "SIGTERM", "SIGINT")  # what else a thread raises ends that thread alone
# What a handler raises inside a destructor or a callback of C is lost there, and Python says so: it is raised again.
LOST = re.compile(r"Exception ignored in.*?\n(?:SystemExit: 3|ValueError: on purpose|KeyboardInterrupt:?[^\n]*)\n?",
                  re.DOTALL)


def cases() -> list[dict]:
    found = [{"where": where, "how": how, "seed": seed} for where in PLACES for how in CODES for seed in range(SEEDS)
             if where != "in a worker" or how in THREADS_MAY]
    if FULL:
        return found
    return found[::3]


def complaint(result: dict) -> str:
    """What is wrong with an ending; "" for nothing."""
    text = LOST.sub("", result["text"]).strip()
    if result["code"] != result["wanted"]:
        return f"ended with {result['code']}"
    wanted = {"raise": "ValueError: on purpose", "SIGINT": "KeyboardInterrupt"}.get(result["how"])
    if wanted is None:
        return "wrote something" if text else ""
    if not text.startswith("Traceback") or not text.splitlines()[-1].startswith(wanted) or text.count("Traceback") > 2:
        return "wrote something else than its traceback"
    return ""


@card.forks
def test_the_process_ends_at_any_moment():
    asked = cases()
    done = subprocess.run(
        [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "endings.py")],
        input=json.dumps(asked), capture_output=True, text=True, timeout=LIMIT_S * (1 + len(asked)),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(asked), done.stderr
    wrong = [(complaint(result), result) for result in results if complaint(result)]
    assert not wrong, "\n\n".join(f"{what}: {r['where']}, {r['how']}, seed {r['seed']}\n{r['text']}"
                                  for what, r in wrong)


# ---------------------------------------------------------------------- forks


class Forker:
    """Forks once, where it is called for the n-th time. The child goes on in the same place."""

    def __init__(self, n: int) -> None:
        self.calls, self.n, self.pid = 0, n, None

    def __call__(self, *args) -> None:
        self.calls += 1
        if self.calls == self.n:
            self.pid = os.fork()

    @property
    def in_child(self) -> bool:
        return self.pid == 0


def train(model, optimizer, spiller, xs):
    losses = []
    for x in xs:
        optimizer.zero_grad()
        with spiller.managed_forward() if spiller else contextlib.nullcontext():
            loss = model(x).pow(2).mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


FORKS = {
    "in a forward": lambda model, optimizer, fork: model.blocks[1].up.register_forward_hook(fork),
    "in a backward": lambda model, optimizer, fork: model.blocks[1].up.register_full_backward_hook(fork),
    "before the optimizer": lambda model, optimizer, fork: optimizer.register_step_pre_hook(fork),
    "after the optimizer": lambda model, optimizer, fork: optimizer.register_step_post_hook(fork),
}


# On a card autograd's own thread runs that hook, and is the only one that the child has: no error reaches a caller.
@pytest.mark.parametrize("where", [where for where in FORKS if not card.ON_CARD or where != "in a backward"])
def test_a_fork_in_the_middle_of_a_step(where):
    """The child is told by name; the parent goes on, bit for bit."""
    model = made(Stack, 3, 32, frozen=False)
    xs = [torch.randn(8, 32) for _ in range(4)]
    ref = aligned_copy(model)
    want = train(ref, OffloadedAdamW(ref.parameters(), lr=1e-2, threads=1), None, xs)
    both = device(4 << 20, 1e8)
    stagehand.layer(model, vram_budget=tight_budget(model), device=both)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, threads=2)
    config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, recompute_cheap=False)
    spiller = ActivationRuntime(config, both, smallest=256, high=8 << 10, low=4 << 10)
    fork = Forker(2)
    FORKS[where](model, optimizer, fork)
    try:
        found = train(model, optimizer, spiller, xs)
    except stagehand.StagehandError as error:
        if fork.in_child:
            os._exit(0 if "fork" in str(error) else 7)
        raise
    finally:
        if fork.in_child:  # the whole run went on in the child, or something else was raised
            traceback.print_exc()
            os._exit(8)
    assert fork.pid and wait_for(fork.pid) == 0
    assert same(found, want)
    assert all(same(value, ref.state_dict()[name]) for name, value in model.state_dict().items())
    spiller.shutdown()
    runtime(model).shutdown()
