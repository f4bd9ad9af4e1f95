"""Ranks that train adapters of one model, against one process with the whole batch.

usage: ranks.py [--device cuda|sim] [--ranks 2] [--one-card] [--layers 24] [--hidden 4096] [--rank 16] [--tokens 1024]
                [--steps 6] [--budget 0.3] [--own] [--json FILE]

Each rank wraps a stack of frozen Linears (float32) with an adapter beside each, and trains it in
DistributedDataParallel: with NCCL and a card for each rank, or with gloo where all have one card (--one-card) or the
simulated device. budget: share of the weights. Then rank 0 trains the same adapters resident, in one process, with the
gradients of all parts of the batch. It says how many adapters are equal bit for bit and the largest difference, what
each rank has more of host memory (PSS) than before it built the model, its ring and buffers of training among that, its
share of the memory in common, what of the weights another rank held already, and what is pinned. --own: a copy for each
rank. Exit status 1: a rank differs from another, or from the one process by more than 1e-4, or (without --own) the
memory in common is not that of the weights once, or some of it is not pinned.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from common import NO_CARD, Where, lacks_card, table
from torch import nn

import stagehand

SMALL = {"layers": 6, "hidden": 1024, "tokens": 32, "steps": 3}  # on the simulated device


class Lora(nn.Module):
    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(hidden, hidden).requires_grad_(False)
        self.down, self.up = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, hidden, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def build(args) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Lora(args.hidden, args.rank) for _ in range(args.layers)))


def part(args, step: int, rank: int) -> torch.Tensor:
    """The rank's part of the step's batch."""
    return torch.randn(args.tokens, args.hidden, generator=torch.Generator().manual_seed(step * 1000 + rank))


def pss(name: str = "") -> int:
    """Bytes of host memory, by the process's share of pages that several map; of mappings with the name alone."""
    total, counts = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for words in map(str.split, file):
            if not words[0].endswith(":"):
                counts = name in " ".join(words[5:])
            elif words[0] == "Pss:" and counts:
                total += int(words[1]) << 10
    return total


def trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def target(args, where, memory: int):
    """The simulated device keeps poisoned memory for a while, which would count as the ranks'."""
    return where.target(0) if where.cuda else stagehand.Device("sim", memory_bytes=memory, poison=False)


def trained(model) -> list:
    return [param for param in model.parameters() if param.requires_grad]


def optimizer_of(model):
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)


def together(args, model, device) -> None:
    """What the ranks do, in one process."""
    optimizer = optimizer_of(model)
    for step in range(args.steps):
        total = [torch.zeros_like(param) for param in trained(model)]
        for rank in range(args.ranks):
            model(part(args, step, rank).to(device)).pow(2).mean().backward()
            for found, param in zip(total, trained(model)):
                found += param.grad / args.ranks
                param.grad = None
        for found, param in zip(total, trained(model)):
            param.grad = found
        optimizer.step()
        optimizer.zero_grad()


def be_rank(args) -> None:
    rank, dist, where = args.number, torch.distributed, Where(args.device)
    if where.cuda:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.set_device(0 if args.one_card else rank)
    backend = "cpu:gloo,cuda:nccl" if where.cuda and not args.one_card else "gloo"
    dist.init_process_group(backend, init_method=f"file://{args.meeting}", rank=rank, world_size=args.ranks)
    model = build(args)[:2]  # what a first pass takes beside weights and rings is none of theirs
    stagehand.layer(model, vram_budget=model[0].base.weight.nbytes * 4, device=target(args, where, 1 << 30))
    model(part(args, 0, rank).to(where.torch)).mean().backward()
    stagehand.runtime(model).shutdown()
    del model
    trim()
    before, model = pss(), build(args)
    nbytes = sum(param.nbytes for param in model.parameters())
    begin = time.monotonic()
    stagehand.layer(model, vram_budget=int(nbytes * args.budget), device=target(args, where, 1 << 30))
    wrapped_s = time.monotonic() - begin
    ddp, optimizer, step_s = nn.parallel.DistributedDataParallel(model), optimizer_of(model), []
    for step in range(args.steps):
        dist.barrier()
        where.synchronize()
        begin = time.monotonic()
        ddp(part(args, step, rank).to(where.torch)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        where.synchronize()
        step_s.append(time.monotonic() - begin)
    trim()
    dist.barrier()  # all have their memory now
    stats = stagehand.runtime(model).stats
    found = {"rank": rank, "memory": pss() - before, "common": pss("memfd:stagehand-weights"),
             "weights": sum(layer.base.weight.nbytes for layer in model), "found": stats["host_found_bytes"],
             "pinned": stats["pinned_bytes"], "host": stats["host_bytes"], "wrap_s": wrapped_s, "step_s": min(step_s),
             # The simulated device's memory is host memory, too.
             "ring": stats["staging_bytes"] + (0 if where.cuda else stats["device_peak"])}
    mine = [param.detach().cpu() for param in trained(model)]
    others: list = [None] * args.ranks
    dist.all_gather_object(others, [weight.double().sum().item() for weight in mine])
    found["ranks_agree"] = all(other == others[0] for other in others)
    if rank == 0:
        resident = build(args).to(where.torch)
        together(args, resident, where.torch)
        pairs = list(zip(mine, [param.detach().cpu() for param in trained(resident)]))
        found["equal"] = sum(map(torch.equal, *zip(*pairs)))
        found["adapters"] = len(pairs)
        found["difference"] = max((a - b).abs().max().item() for a, b in pairs)
    dist.barrier()
    stagehand.runtime(model).shutdown()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "sim"])
    for name, value in {"ranks": 2, "layers": 24, "hidden": 4096, "rank": 16, "tokens": 1024, "steps": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--one-card", action="store_true")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    if "sim" in sys.argv:
        parser.set_defaults(**SMALL)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.number is not None:
        be_rank(args)
        return 0
    cards = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.device == "cuda" and (lacks_card(args.device) or cards < (1 if args.one_card else args.ranks)):
        print(f"{args.ranks} ranks have {cards} cards: give --one-card, or --device sim", file=sys.stderr)
        return NO_CARD
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--meeting", os.path.join(folder, "meeting"), "--number"]
        env = {**os.environ, "STAGEHAND_HOST_COPY": "own" if args.own else "shared"}
        ranks = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True, env=env)
                 for number in range(args.ranks)]
        while any(rank.poll() is None for rank in ranks):
            if any(rank.returncode for rank in ranks):  # the others would wait for it
                for rank in ranks:
                    rank.kill()
            time.sleep(0.1)
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        return 1
    rows = [json.loads(text.splitlines()[-1]) for text in said]
    first = rows[0]
    titles = [("rank", "rank", "")]
    titles += [(f"{key} MB", key, ".0f") for key in ("memory", "ring", "common", "weights", "found", "pinned")]
    titles += [("wrap s", "wrap_s", ".2f"), ("step s", "step_s", ".4f")]
    sizes = {key for title, key, _ in titles if title.endswith(" MB")}
    table(titles, [{key: value / 1e6 if key in sizes else value for key, value in row.items()} for row in rows])
    share = sum(row["common"] for row in rows) / first["weights"]
    pinned = all(row["pinned"] >= row["host"] for row in rows)
    print(f"memory in common: {share:.3f} x the weights; all is pinned: {pinned}\n"
          f"adapters equal to one process bit for bit: {first['equal']} of {first['adapters']}, largest difference "
          f"{first['difference']:.3g}; ranks agree: {all(row['ranks_agree'] for row in rows)}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"ranks": rows, "share": share}, file, indent=1)
    agree = all(row["ranks_agree"] for row in rows) and first["difference"] <= 1e-4
    return 0 if agree and (args.own or (pinned and 0.95 <= share <= 1.05)) else 1


if __name__ == "__main__":
    sys.exit(main())
