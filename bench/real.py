"""Real models, as people run them: the released libraries' architectures at true size (released.py), held on the card,
streamed, and offloaded by others, in one process.

usage: real.py [CASE,CASE] [--systems NAME,NAME] [--budgets GB,GB] [--link GB/S,GB/S] [--steps N] [--small]
               [--out FILE] [--trace FOLDER]

CASE: of released.CASES; all of them where none is given. Systems: resident, ours, lossless and auto (once for each
budget; weights cross the link as they are, packed, or packed where it pays), leaf (diffusers' group offloading, leaf
level with a stream), model (a pipeline's model offload), accelerate (cpu_offload).
--link: our rows once for each of these rates of the link, as ordinary computers have them (12 and 25 GB/s): bytes cross
a faster one so often that it takes as long (the decorator `slow`, docs/backends.md). Others are not slowed.
--small: a few layers of each, on the simulated device; times say nothing then.

Each row is a JSON line in --out: ms of the first, second and third step and the median of the rest, what a step was
predicted to take, set-up, host memory, the most that was allocated and reserved on the card (rings of streamed weights
included), and the outputs beside the first system's. A row that is there already, and did not fail, is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

import peers
import torch
from common import NO_CARD, SIM_LINK, Where, lacks_card, link_rate, nbytes, rss, timed, version_of
from released import CASES, Case

import stagehand

SYSTEMS = ("resident", "ours", "lossless", "auto", "leaf", "model", "accelerate")
OURS = ("ours", "lossless", "auto")
PACKAGES = ("diffusers", "transformers", "peft", "accelerate")


def models_of(made) -> list:
    if isinstance(made, torch.nn.Module):
        return [made]
    return [part for part in made.components.values() if isinstance(part, torch.nn.Module)]


# ---------------------------------------------------------------------- systems: each returns what undoes it


def resident(made, case: Case, where: Where, budget):
    made.to(where.torch)
    return lambda: made.to("cpu")


def device_for(where: Where, link: float | None):
    """link: GB/s that it is to have; None: what it has."""
    name = "cuda" if where.cuda else "sim"
    if link is None:
        return name
    own = link_rate(where)
    percent = round(own / (link * 1e9) * 100)
    if percent < 100:
        raise ValueError(f"--link {link:g}: the link of this machine has {own / 1e9:.1f} GB/s")
    name = f"slow(percent={percent})+{name}"
    return name if where.cuda else stagehand.Device(name, link_bytes_per_s=SIM_LINK)


def ours(made, case: Case, where: Where, budget, link=None, transfer="plain"):
    device = device_for(where, link)
    if case.pipeline:
        from stagehand.integrations.diffusers import offload

        return offload(made, vram_budget=budget, device=device, transfer=transfer).shutdown
    stagehand.layer(made, vram_budget=budget, device=device, inference_mode=not case.trains, transfer=transfer)
    return lambda: stagehand.shutdown(made)


def lossless(made, case: Case, where: Where, budget, link=None):
    return ours(made, case, where, budget, link, "lossless")


def auto(made, case: Case, where: Where, budget, link=None):
    return ours(made, case, where, budget, link, "auto")


def leaf(made, case: Case, where: Where, budget):
    prepare = peers.diffusers_leaf if case.trains else peers.infer_diffusers_leaf
    for model in models_of(made):
        prepare(model)

    def undo():
        from diffusers.hooks import HookRegistry

        for model in models_of(made):
            HookRegistry.check_if_exists_or_initialize(model).remove_hook("group_offloading", recurse=True)
            model.to("cpu")

    return undo


def model(made, case: Case, where: Where, budget):
    if not case.pipeline:
        raise NotImplementedError("a pipeline's alone")
    made.enable_model_cpu_offload()

    def undo():
        made.remove_all_hooks()
        made.to("cpu")

    return undo


def accelerate(made, case: Case, where: Where, budget):
    if case.trains:
        raise NotImplementedError("it has no gradients")
    for part in models_of(made):
        peers.infer_accelerate(part)

    def undo():
        from accelerate.hooks import remove_hook_from_module

        for part in models_of(made):
            remove_hook_from_module(part, recurse=True)
            part.to("cpu")

    return undo


PREPARE = {"resident": resident, "ours": ours, "lossless": lossless, "auto": auto, "leaf": leaf,
           "model": model, "accelerate": accelerate}


# ---------------------------------------------------------------------- rows


def plan_of(runtime) -> dict:
    """Empty where the model is not on the device now."""
    try:
        return runtime.plan
    except stagehand.StagehandError:
        return {}


def ring_bytes(made) -> int:
    """Of streamed weights that lie outside of PyTorch's allocator."""
    return sum(plan_of(stagehand.runtime(part)).get("ring_bytes", 0) for part in models_of(made) if managed(part))


def managed(part) -> bool:
    try:
        return stagehand.runtime(part) is not None
    except stagehand.StagehandError:
        return False


def shown(runtime) -> dict:
    """Since wrapping, of a model of a pipeline."""
    stats = runtime.stats
    found = stats["budget_found"] or {}
    return {"h2d_gb": round(stats["h2d_bytes"] / 1e9, 2), "budget_gb": round(stats["budget"] / 1e9, 2),
            "others_gb": round(found.get("others", 0) / 1e9, 2), "steps": stats["steps"], "replans": stats["replans"],
            "yields": stats["yields"]}


def reserved(where: Where) -> int:
    return torch.cuda.max_memory_reserved() if where.cuda else 0


def measured(step, times: int, where: Where) -> dict:
    outputs: list = []
    spent = timed(lambda: outputs.append(step().float().cpu()), times, where)
    tail = spent[2:] or spent
    return {"first": spent[0], "second": spent[1], "third": tail[0], "ms": statistics.median(tail[1:] or tail),
            "all": [round(ms, 2) for ms in spent], "output": outputs[-1]}


def prepare_libraries(steps: dict, times: int) -> None:
    """cuDNN makes a plan for each length of a cache when it comes first: not at the cost of the first system."""
    for step in steps.values():
        for _ in range(times):
            step()


def compared(found: torch.Tensor, want: torch.Tensor) -> dict:
    scale = want.abs().max().item() or 1.0
    return {"equal": bool(torch.equal(found, want)), "difference": (found - want).abs().max().item() / scale}


def rows_of(name: str, case: Case, made, system: str, budget: int | None, link, args, where: Where, wanted: dict):
    """One row for each phase of the case."""
    where.clean()
    where.reset_peak()
    begin = time.perf_counter()
    undo = PREPARE[system](made, case, where, budget, **({} if link is None else {"link": link}))
    where.synchronize()
    setup = time.perf_counter() - begin
    try:
        steps = case.steps(made, where.torch, args.small)
        if not (wanted or case.trains):
            prepare_libraries(steps, args.steps)
        for phase, step in steps.items():
            row = {"setup_s": setup, **measured(step, args.steps, where)}
            if args.trace and system in OURS:
                os.makedirs(args.trace, exist_ok=True)
                rate = "" if link is None else f"-{link:g}"
                place = f"{name}-{system}-{budget / 1e9:g}{rate}-{phase}".replace(" ", "-")
                with stagehand.trace(os.path.join(args.trace, f"{place}.json.gz")):
                    step()
                    where.synchronize()
            row.update(compared(row["output"], wanted.setdefault(phase, row["output"])))
            del row["output"]
            ring = ring_bytes(made)
            row.update(peak_gb=(where.peak() + ring) / 1e9, reserved_gb=(reserved(where) + ring) / 1e9,
                       taken_gb=where.taken() / 1e9, rss_gb=rss()["VmRSS"] / 1e9)
            if system in OURS and case.pipeline:
                row["models"] = {stagehand.runtime(part).name: shown(stagehand.runtime(part))
                                 for part in models_of(made) if managed(part)}
            elif system in OURS:
                runtime = stagehand.runtime(made)
                plan = runtime.plan
                row.update(predicted=plan["step_ns"] / 1e6, bytes_per_step=plan["bytes_per_step"],
                           link_gb_s=runtime.stats["link_bytes_per_s"] / 1e9)
            yield phase, row
    finally:
        undo()
        where.clean()


def key_of(row: dict) -> tuple:
    return row["case"], row["system"], row.get("budget_gb"), row.get("link"), row["small"]


class Record:
    """The rows in a file, which are not run again."""

    def __init__(self, path: str | None) -> None:
        self.path, self.done = path, set()
        if path and os.path.exists(path):
            with open(path) as lines:
                self.done = {key_of(row) for row in map(json.loads, lines) if "failed" not in row}

    def add(self, row: dict) -> None:
        line = json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
        print(line, flush=True)
        if self.path:
            with open(self.path, "a") as out:
                out.write(line + "\n")


def trained_values(made) -> list:
    return [(p, p.detach().to("cpu", copy=True)) for part in models_of(made) for p in part.parameters()
            if p.requires_grad]


def run_case(name: str, args, where: Where, record: Record) -> int:
    """How many rows failed."""
    case, failed = CASES[name], 0
    budgets = [float(word) for word in args.budgets.split(",")] if args.budgets else case.budgets
    links = [float(word) for word in args.link.split(",")] if args.link else [None]
    rows = [(system, budget, link) for system in args.systems.split(",")
            for budget in (budgets if system in OURS else [None]) for link in (links if system in OURS else [None])]
    heads = [{"case": name, "system": system, "budget_gb": budget, "link": link, "small": args.small}
             for system, budget, link in rows]
    if all(key_of(head) in record.done for head in heads):
        return 0
    begin = time.perf_counter()
    made = case.build(args.small)
    weights = sum(nbytes(part.parameters()) for part in models_of(made))
    print(f"{name}: {weights / 1e9:.2f} GB of weights, made in {time.perf_counter() - begin:.0f} s", file=sys.stderr,
          flush=True)
    before, wanted = trained_values(made), {}
    for head in heads:
        # The first system's outputs are what others are compared with.
        if key_of(head) in record.done and wanted:
            continue
        budget = None if head["budget_gb"] is None else int(head["budget_gb"] * 1e9)
        if args.small and budget is not None:  # a part of the model: GB say nothing of a small one
            budget = int(weights * (0.9 if case.pipeline else 0.8)) + 100_000
        try:
            for phase, row in rows_of(name, case, made, head["system"], budget, head["link"], args, where, wanted):
                if key_of(head) not in record.done:
                    record.add({**head, "phase": phase, "weights_gb": weights / 1e9, **row})
        except NotImplementedError:
            continue
        except Exception as error:  # noqa: BLE001 - a row that fails must not end the run
            failed += 1
            record.add({**head, "failed": f"{type(error).__name__}: {str(error)[:300]}"})
            made = None  # it may be half prepared
            where.clean()
            made = case.build(args.small)
            before = trained_values(made)
        with torch.no_grad():
            for param, value in before:
                param.data = value.clone()
                param.grad = None
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", default=",".join(CASES))
    parser.add_argument("--systems", help="default: all on a card, resident and ours with --small")
    parser.add_argument("--budgets", help="GB, instead of the case's own")
    parser.add_argument("--link", help="GB/s of the link, for our rows")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--trace", help="a folder: one more step of each of our rows is recorded there")
    args = parser.parse_args()
    args.systems = args.systems or ("resident,ours" if args.small else ",".join(SYSTEMS))
    unknown = [*(set(args.cases.split(",")) - set(CASES)), *(set(args.systems.split(",")) - set(SYSTEMS))]
    if unknown:
        parser.error(f"no {', '.join(sorted(unknown))}: there are {', '.join(CASES)}; {', '.join(SYSTEMS)}")
    if not args.small and lacks_card("cuda"):
        return NO_CARD
    where = Where("sim" if args.small else "cuda")
    said = {**where.describe(), **{package: version_of(package) for package in PACKAGES}}
    print(", ".join(f"{key} {value}" for key, value in said.items()), file=sys.stderr)
    record = Record(args.out)
    return 1 if sum(run_case(name, args, where, record) for name in args.cases.split(",")) else 0


if __name__ == "__main__":
    sys.exit(main())
