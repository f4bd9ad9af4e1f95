"""Random models and random programs, each run under Stagehand and beside it, compared bit for bit.

    python tests/python/random_models.py --seed 1 --trials 1000        trials 1 to 1000
    python tests/python/random_models.py --seed 7 --trials 1           one of them again; a failure is made smaller
    options: --minutes M, --device sim|cuda:0, --mode layer,block,..., --without topic,topic, --log FILE, --no-shrink

A trial is a spec that a seed decides: see random_trial.py. `--topics` lists what --without takes. What is refused
as the documents say is counted by its kind; anything else that differs is printed with its seed and its smallest spec.
"""

from __future__ import annotations

import argparse
import collections
import copy
import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import time
import traceback

import card
from random_actions import ACTIONS, OPTIMIZERS
from random_layers import LAYERS, SEVERAL_USES, WRAPPERS
from random_trial import Result, run

MODES = ("layer", "layer", "layer", "block", "block", "file_source", "file_load")
CALL_AGAIN = ("loop", "recursion", "dropped")
TABLES = (LAYERS, WRAPPERS, ACTIONS)
HANG_S = 60  # a trial takes a tenth of a second


def topics() -> list[str]:
    return sorted({entry[0] for table in TABLES for entry in table.values()} - {""}
                  | {"offload", "offload_double", "inference_first", "shared", "small_owned", "file_writes", "sums"})


def spec_of(seed: int, without=(), modes=MODES, device="sim") -> dict:
    """The trial that a seed decides. without: topics that are left out."""
    on_card = {"vector"} if device != "sim" else set()  # masters and what stays on the card are not one vector
    rng, without = random.Random(seed), frozenset(without) | on_card
    mode = rng.choice([m for m in MODES if m in modes] or list(modes))
    files = mode.startswith("file")
    setup = {
        "mode": mode, "device": device, "without": sorted(without), "d": rng.choice([4, 6, 8, 16, 18]),
        "budget": rng.choice(["least", "least", "half", "all"]),
        "link": rng.choice([None, None, 10**7, 10**8]), "latency": rng.choice([0, 0, 20_000]),
        "owned": rng.choice([1 << 20, 256]) if "small_owned" not in without else 1 << 20,
        "offload": rng.choice([0, 0, 1000, 20_000]) if "offload" not in without else 0,
        "optimizer": rng.choice(sorted(OPTIMIZERS)), "optimizer_first": rng.random() < 0.3,
        "trained": rng.choice(["none", "some"]) if files else rng.choice(["all", "all", "some", "none"]),
        "train": rng.random() < 0.5, "tied": rng.random() < 0.2, "shared": [], "repeats": True,
        "config": {"policy": rng.choice(["planned", "static"])} if mode == "block" else {},
        "trainables": rng.choice(["auto", "auto", "device", "host"]),
    }
    layers = [_layer(rng, without) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.2 and "shared" not in without:
        setup["shared"] = [[rng.randrange(len(layers)), rng.randrange(len(layers))]]
    program = _program(rng, without, files)
    if any("casting_hooks" in layer["wrap"] for layer in layers):
        # PyTorch crashes where a transform casts Parameters; the plain side of "vector" runs a copy, which hooks cast.
        program = [entry for entry in program if entry["do"] not in ("func_grad", "vector")]
    several = any(layer["kind"] in SEVERAL_USES for layer in layers) or any(e["do"] == "penalty" for e in program)
    if "sums" in without and several:
        setup["repeats"], setup["shared"] = False, []
        layers = [{**layer, "wrap": [w for w in layer["wrap"] if w not in CALL_AGAIN]} for layer in layers]
    setup["double"] = device != "sim" or not files and rng.random() < 0.2
    kinds = {layer["kind"] for layer in layers}
    if "embedding_sparse" in kinds:
        setup["optimizer"] = "sgd"
    if device != "sim":
        low = any({"cast", "casting_hooks", "autocast"} & set(layer["wrap"]) for layer in layers)
        if low or any(entry["do"] == "cast_model" for entry in program):
            setup["optimizer"] = "sgd"  # others make the rounding of a gradient near 0 a step of full length
        elif setup["optimizer"] == "fused" and any(kind.startswith("recurrent") for kind in kinds):
            setup["optimizer"] = "adamw"  # fused ones write unseen: a backward of cuDNN's takes weights of any version
    return {"setup": setup, "layers": layers, "program": program}


def _allowed(table: dict, without) -> list[str]:
    return [name for name, entry in table.items() if entry[0] not in without]


def _layer(rng, without) -> dict:
    wrappers = _allowed(WRAPPERS, without)
    wrap = [rng.choice(wrappers) for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))]
    kind = rng.choice(_allowed(LAYERS, without))
    if kind in ("writer", "buffers"):  # not computed again where backward needs the weight alone (docs/training.md)
        wrap = [name for name in wrap if name not in ("checkpoint", "selective")]
    if "casting_hooks" in wrap:  # a recomputation of PyTorch's ends early, and may leave out the hook that casts back
        wrap = [name for name in wrap if name != "checkpoint"]
    return {"kind": kind, "seed": rng.randrange(1 << 30), "wrap": wrap}


def _program(rng, without, files: bool) -> list[dict]:
    names = [name for name in _allowed(ACTIONS, without)
             if not (files and ACTIONS[name][2] and "file_writes" in without)]
    chosen = rng.choices(names, [ACTIONS[name][1] for name in names], k=rng.randint(3, 14))
    return [{"do": name, "seed": rng.randrange(1 << 30)} for name in chosen]


# ---------------------------------------------------------------------- making a failure smaller


def shrunk(spec: dict, result: Result, seconds: float = 60) -> tuple[dict, Result]:
    """The smallest spec that still fails in the same way, found by leaving things out."""
    end, kind = time.monotonic() + seconds, result.outcome
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in _smaller(spec):
            if time.monotonic() > end:
                break
            tried = run(copy.deepcopy(smaller))
            if tried.outcome == kind:
                spec, result, changed = smaller, tried, True
                break
    return spec, result


def _smaller(spec: dict):
    """Specs with one thing less, the largest steps first."""
    program, layers, setup = spec["program"], spec["layers"], spec["setup"]
    for size in (len(program) // 2, len(program) // 4, 1):
        for i in range(0, len(program), max(size, 1)):
            if size:
                yield {**spec, "program": program[:i] + program[i + size:]}
    for i in range(len(layers)):
        yield {**spec, "layers": layers[:i] + layers[i + 1:]}
    for i, layer in enumerate(layers):
        for j in range(len(layer["wrap"])):
            less = {**layer, "wrap": layer["wrap"][:j] + layer["wrap"][j + 1:]}
            yield {**spec, "layers": [*layers[:i], less, *layers[i + 1:]]}
        if layer["kind"] != "linear":
            yield {**spec, "layers": [*layers[:i], {**layer, "kind": "linear"}, *layers[i + 1:]]}
    plain = {"budget": "all", "link": None, "latency": 0, "owned": 1 << 20, "offload": 0, "optimizer": "sgd",
             "optimizer_first": False, "trained": "all", "train": False, "tied": False, "shared": [], "config": {},
             "trainables": "host"}
    for key, value in plain.items():
        if setup[key] != value and not (key == "trained" and setup["mode"].startswith("file")):
            yield {**spec, "setup": {**setup, key: value}}


def described(spec: dict) -> str:
    setup = {k: v for k, v in spec["setup"].items() if v not in (None, 0, False, [], {}) and k != "without"}
    layers = "\n".join(f"    {layer['kind']}, seed {layer['seed']}"
                       + (f", in {', '.join(layer['wrap'])}" if layer["wrap"] else "") for layer in spec["layers"])
    program = " ".join(f"{entry['do']}({entry['seed']})" for entry in spec["program"])
    return f"  setup {json.dumps(setup)}\n  layers\n{layers}\n  program {program}"


# ---------------------------------------------------------------------- many trials


def trial(seed: int, options: dict) -> Result:
    return run(spec_of(seed, **options))


def report(seed: int, options: dict, result: Result, smaller: bool = True) -> str:
    spec = spec_of(seed, **options)
    text = f"--- seed {seed}: {result.outcome} at {result.at}: {result.detail[:500]}\n"
    if smaller:
        spec, result = shrunk(spec, result)
        text += f"smallest: {result.outcome} at {result.at}: {result.detail[:500]}\n"
    return f"{text}{described(spec)}\n{result.trace[-3000:]}\nspec = {json.dumps(spec)}\n"


def _work(seeds, options, shrink, pipe, kinds) -> None:
    """In a child: one line of JSON before and one after each trial."""
    def say(message) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())

    faulthandler.enable()
    for seed in seeds:
        say({"begins": seed})
        faulthandler.dump_traceback_later(HANG_S / 2, exit=False)
        result = trial(seed, options)
        text = ""
        if result.failed:
            faulthandler.cancel_dump_traceback_later()
            say({"shrinks": seed})
            text = report(seed, options, result, shrink and kinds[result.kind] < 3)
            kinds[result.kind] += 1
        faulthandler.cancel_dump_traceback_later()
        say({"ends": seed, "outcome": result.outcome, "kind": result.kind if result.outcome != "passed" else "",
             "notes": result.notes, "text": text})
    os._exit(0)


def _batch(seeds, options, shrink, kinds, told) -> int | None:
    """Runs seeds in a child. Returns the seed at which it died or hung, or None."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            _work(seeds, options, shrink, write, kinds)
        except BaseException:  # an error of the fuzzer's own
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    now, limit, rest = seeds[0], HANG_S, b""
    while True:
        if not select.select([read], [], [], limit)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            told({"ends": now, "outcome": "hang", "kind": "hang", "notes": [], "text": f"--- seed {now}: hangs\n"})
            return now
        data = os.read(read, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            now = message.get("begins", now)
            limit = HANG_S + (120 if "shrinks" in message else 0)
            if "ends" in message:
                told(message)
    os.close(read)
    status = os.waitpid(pid, 0)[1]
    if status:
        told({"ends": now, "outcome": "crash", "kind": f"crash: status {status}", "notes": [],
              "text": f"--- seed {now}: the process ended with status {status}\n"})
        return now
    return None


class Tally:
    def __init__(self, log) -> None:
        self.outcomes, self.kinds, self.notes = (collections.Counter() for _ in range(3))
        self.log = log

    def __call__(self, message: dict) -> None:
        self.outcomes[message["outcome"]] += 1
        if message["kind"]:
            self.kinds[message["kind"]] += 1
        self.notes.update(message["notes"])
        if message["text"]:
            print(message["text"], file=self.log, flush=True)

    def print(self) -> None:
        print(dict(self.outcomes), file=self.log)
        for counter in (self.kinds, self.notes):
            for kind, count in counter.most_common(40):
                print(f"{count:7} {kind}", file=self.log)
        self.log.flush()

    @property
    def failed(self) -> bool:
        return bool(set(self.outcomes) - {"passed", "refused"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--device", default=card.NAME, help="that of STH_TEST_DEVICE")
    parser.add_argument("--mode", default=",".join(sorted(set(MODES))))
    parser.add_argument("--without", default="")
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--topics", action="store_true", help="lists what --without takes")
    parser.add_argument("--spec", help="runs one spec, as a report prints it")
    args = parser.parse_args()
    if args.topics:
        print(*topics())
        return 0
    if args.spec:
        result = run(json.loads(args.spec))
        print(result.outcome, result.at, result.detail, result.notes, result.trace, sep="\n")
        return result.failed
    options = {"without": [t for t in args.without.split(",") if t], "modes": args.mode.split(","),
               "device": args.device}
    unknown = set(options["without"]) - set(topics())
    if unknown:
        parser.error(f"no such topic: {', '.join(sorted(unknown))}; there are {', '.join(topics())}")
    gc.collect()
    gc.freeze()
    tally, end = Tally(args.log), time.monotonic() + 60 * args.minutes
    seeds = list(range(args.seed, args.seed + args.trials))
    while seeds and time.monotonic() < end:
        batch = seeds[:250]
        died = _batch(batch, options, not args.no_shrink, tally.kinds, tally)
        seeds = seeds[len(batch) if died is None else batch.index(died) + 1:]
    tally.print()
    return int(tally.failed)


if __name__ == "__main__":
    sys.exit(main())
