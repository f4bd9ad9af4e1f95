"""A process for test_endings.py: it has PyTorch and Stagehand ready and forks a child for each case, which makes a
model of its own, works, and ends in the way and at the moment that the case says.

Reads one JSON list of cases, {"how", "where", "seed"}; writes one JSON object for each: the case, its code and what it
wrote. A child ends as a script does: what is raised in it reaches the top, and the interpreter is taken down.
"""

import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time

import torch

import stagehand
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig
from stagehand.optim import OffloadedAdamW
from support import Stack, device, made, runtime, tight_budget

LIMIT_S = 240
CODES = {"exit": 3, "raise": 1, "os._exit": 4, "SIGTERM": -15, "SIGINT": -2}
LINK = 3e6  # bytes/s: most of a step is spent waiting for bytes
SPREAD_S = 0.12  # about two steps


def act(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("on purpose")
    if how == "os._exit":
        os._exit(4)
    os.kill(os.getpid(), getattr(signal, how))


class Work:
    """A model that is trained, its activations spilled, beside one that is only run, on one device."""

    def __init__(self, width=32) -> None:
        self.device = device(4 << 20, LINK)
        self.model = made(Stack, 3, width, frozen=False)
        self.other = made(Stack, 3, width, seed=1)
        stagehand.layer(self.model, vram_budget=tight_budget(self.model), device=self.device)
        stagehand.layer(self.other, vram_budget=tight_budget(self.other), device=self.device, inference_mode=True)
        self.optimizer = OffloadedAdamW(self.model.parameters(), lr=1e-3, threads=2)
        config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, recompute_cheap=False)
        self.spiller = ActivationRuntime(config, self.device, smallest=256, high=8 << 10, low=4 << 10)
        self.x = torch.randn(8, width)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.spiller.managed_forward():
            self.model(self.x).pow(2).mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.other(self.x)

    def go_on(self) -> None:
        """Until the end of the process, or of its main thread."""
        while threading.main_thread().is_alive():
            self.step()


def later(rng, call) -> None:
    """`call` in a signal's handler, at a random moment; again if what it raised was lost, as in a destructor."""
    signal.signal(signal.SIGALRM, lambda number, frame: call())
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, SPREAD_S), 0.2)


def in_a_step(how, rng):
    work = Work()
    work.step()
    later(rng, lambda: act(how))
    work.go_on()


def in_a_hook(how, rng):
    """Of a forward or of a backward."""
    work = Work()
    work.step()
    block = work.model.blocks[rng.randrange(3)]
    if rng.random() < 0.5:
        block.up.register_forward_hook(lambda *args: act(how))
    else:
        block.up.register_full_backward_hook(lambda *args: act(how))
    work.go_on()


def beside_a_worker(how, rng):
    """The main thread ends while another one is in a step and goes on."""
    work = Work()
    threading.Thread(target=work.go_on, daemon=rng.random() < 0.5).start()
    time.sleep(rng.uniform(0.05, 0.05 + SPREAD_S))
    act(how)
    time.sleep(LIMIT_S)  # where a signal comes a moment later


def in_a_worker(how, rng):
    """A thread ends the process while the main one is in a step."""
    work = Work()

    def end():
        time.sleep(rng.uniform(0.01, SPREAD_S))
        act(how)

    threading.Thread(target=end, daemon=True).start()
    work.go_on()


def while_it_opens(how, rng):
    later(rng, lambda: act(how))
    while True:
        model = made(Stack, 6, 96)
        stagehand.layer(model, vram_budget=tight_budget(model), device=device(8 << 20, 1e8),
                        inference_mode=rng.random() < 0.5)


def while_it_closes(how, rng):
    model = made(Stack, 6, 96)
    later(rng, lambda: act(how))
    while True:
        stagehand.layer(model, vram_budget=tight_budget(model), device=device(8 << 20, 1e8))
        runtime(model).shutdown()


PLACES = {place.__name__.replace("_", " "): place for place in (
    in_a_step, in_a_hook, beside_a_worker, in_a_worker, while_it_opens, while_it_closes)}


def warm_up() -> None:
    """What is imported at first use is there before the forks. Nothing stays open."""
    work = Work()
    work.step()
    work.spiller.shutdown()
    for model in (work.model, work.other):
        runtime(model).shutdown()
    del work, model
    gc.collect()
    gc.freeze()


def child(case: dict, output) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    try:
        PLACES[case["where"]](case["how"], random.Random(case["seed"]))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def wait_for(pid: int):
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGABRT)  # its threads' places go to its output
    os.waitpid(pid, 0)
    return "no end"


def main() -> None:
    import faulthandler

    cases = json.load(sys.stdin)
    torch.set_num_threads(1)
    warm_up()
    for case in cases:
        with tempfile.TemporaryFile() as output:
            sys.stdout.flush()
            begin = time.monotonic()
            pid = os.fork()
            if pid == 0:
                faulthandler.enable()
                return child(case, output)
            code = wait_for(pid)
            output.seek(0)
            text = output.read().decode(errors="replace")
        print(json.dumps({**case, "code": code, "seconds": round(time.monotonic() - begin, 2),
                          "wanted": CODES[case["how"]], "text": text}), flush=True)


if __name__ == "__main__":
    main()
