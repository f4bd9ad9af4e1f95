#!/usr/bin/env python3
"""The host's part of a training step with adapters: what Stagehand adds for each adapted layer, in instructions.

    training.py MARKS            prints instructions for each layer and phase of a step, and what is beyond the resident
                                 model's (make bench-cpu). MARKS: the shared object of marks.c
    training.py MARKS --top N    and the N functions of the package and of its extension that took most
    training.py --times          CPU time of the phases instead, resident and streamed by turns; no valgrind

The model is transformers' Llama with PEFT's LoRA on each linear layer, non-reentrant checkpoints round its blocks, and
matrices of a few kilobytes on the simulated device, so that the host's work is what counts. "held": the budget has room
for all weights. "streamed": for a third. Counted is one settled step of models of two sizes; of their difference each
layer has its share, so that what a step costs once cancels out. Phases: forward; backward, with recomputation; the
optimizer's step.
"""

import argparse
import ctypes
import gc
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

PHASES = ("forward", "backward", "update")
SYSTEMS = {"resident": None, "held": 4.0, "streamed": 1 / 3}  # budget, in frozen bytes
BLOCKS = (2, 6)
LAYERS = 7  # of a block
SETTLED = 9  # steps before the counted one


def built(blocks: int, share: float | None):
    """A model, streamed where a share is given."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import stagehand

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=blocks, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=64, use_cache=False)
    model = LlamaForCausalLM(config).requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()
    if share is not None:
        frozen, trained = (sum(p.nbytes for p in model.parameters() if p.requires_grad is takes)
                           for takes in (False, True))
        stagehand.layer(model, vram_budget=int(frozen * share) + 4 * trained, device="sim")
    return model


class Step:
    """One step of training, phase by phase."""

    def __init__(self, model) -> None:
        import torch

        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
        self.ids = torch.arange(8)[None]
        self.loss = None

    def forward(self) -> None:
        self.loss = self.model(input_ids=self.ids, labels=self.ids).loss

    def backward(self) -> None:
        self.loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> None:
        for phase in PHASES:
            getattr(self, phase)()


# ---------------------------------------------------------------------- instructions


def counted(marks) -> None:
    """Under callgrind: a dump for each system, size and phase."""
    for system, share in SYSTEMS.items():
        for blocks in BLOCKS:
            step = Step(built(blocks, share))
            for _ in range(SETTLED):
                step.run()
            gc.collect()
            gc.disable()
            for phase in PHASES:
                marks.count()
                getattr(step, phase)()
                marks.dump(f"{system} {blocks} {phase}".encode())
            gc.enable()
    os._exit(0)  # threads need not be waited for under callgrind


def dumps(marks: str, folder: str) -> dict:
    """(system, blocks, phase) -> file."""
    out = pathlib.Path(folder) / "out"
    done = subprocess.run(["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}",
                           sys.executable, __file__, marks, "--counted"],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1",
                                                               "PYTHONHASHSEED": "0"})
    assert done.returncode == 0, done.stderr
    found = {}
    for path in out.parent.iterdir():
        if name := re.search(r"^desc: Trigger: Client Request: (\w+) (\d+) (\w+)$", path.read_text(), re.M):
            found[name[1], int(name[2]), name[3]] = path
    return found


def total(path: pathlib.Path) -> int:
    return int(re.search(r"^totals: (\d+)$", path.read_text(), re.M)[1])


def for_each_layer(found: dict, system: str, phase: str) -> float:
    small, large = (total(found[system, blocks, phase]) for blocks in BLOCKS)
    return (large - small) / (LAYERS * (BLOCKS[1] - BLOCKS[0]))


def show(marks: str, top: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = dumps(marks, folder)
        print(f"{'instructions for each adapted layer':36}{'all':>12}{'beyond resident':>18}")
        for phase in PHASES:
            resident = for_each_layer(found, "resident", phase)
            for system in SYSTEMS:
                now = for_each_layer(found, system, phase)
                print(f"{phase + ', ' + system:36}{now:12,.0f}{now - resident:18,.0f}")
        for phase in PHASES[:2] if top else ():
            print(f"\n{phase}, held: functions with those that they call, in all")
            said = subprocess.run(["callgrind_annotate", "--inclusive=yes", "--threshold=100",
                                   str(found["held", BLOCKS[1], phase])], capture_output=True, text=True).stdout
            ours = [line for line in said.splitlines() if "stagehand" in line]
            print("\n".join(line[:100] for line in ours[:top]))


# ---------------------------------------------------------------------- times


def timed(blocks: int, tries: int) -> None:
    """The least CPU time of a phase; the systems take turns, since other work on the machine makes it larger."""
    steps = {system: Step(built(blocks, share)) for system, share in SYSTEMS.items()}
    best = {}
    for number in range(SETTLED + tries):
        for system, step in steps.items():
            for phase in PHASES:
                start = time.process_time_ns()
                getattr(step, phase)()
                took = (time.process_time_ns() - start) / 1000
                if number >= SETTLED:
                    best[system, phase] = min(took, best.get((system, phase), took))
    print(f"{'us of CPU for each adapted layer':36}{'all':>12}{'beyond resident':>18}{'ratio':>8}")
    for phase in PHASES:
        resident = best["resident", phase]
        for system in SYSTEMS:
            now = best[system, phase]
            each = LAYERS * blocks
            print(f"{phase + ', ' + system:36}{now / each:12.1f}{(now - resident) / each:18.1f}{now / resident:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("marks", nargs="?")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.times:
        import torch

        torch.set_num_threads(1)
        return timed(blocks=8, tries=20)
    if not given.marks:
        parser.error("the shared object of marks.c is missing: without valgrind/callgrind.h it is not built")
    return counted(ctypes.CDLL(given.marks)) if given.counted else show(given.marks, given.top)


if __name__ == "__main__":
    main()
