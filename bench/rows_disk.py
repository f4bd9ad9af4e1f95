"""Experts from a file, read by rows, against the disk's own rate, in one run.

usage: rows_disk.py --dir DIR [--device cuda|sim] [--layers 8] [--experts 64] [--hidden 2048] [--intermediate 768]
                    [--per-token 8] [--tokens 24] [--slots 0.1] [--ram 0.5] [--skew 0] [--keep] [--json FILE]

Writes experts as the hub has them, three tensors each (bf16), to DIR; then routes random tokens through all layers, as
decoding does, with a pool of `slots` of the rows and host memory for `ram` of them. skew: exponent of Zipf's law; 0:
all experts are as likely. Plain reads of the file around the page cache, in the best of a few ways, run between the
rounds of tokens. A round is judged by its bytes from the file over the mean of the rates before and behind it, which is
the least time that these reads can take. The bytes of a sample of slots are compared with the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time

import torch
from common import NO_CARD, Where, lacks_card, table
from disk import Plain, best_rate, drop_cache, write

from stagehand import _core
from stagehand.files.checkpoint import Checkpoint

FILE, LIMIT, ROUNDS = "stagehand-rows.safetensors", 2 << 30, 6


def shapes(args) -> dict[str, tuple[int, int]]:
    small, large = (args.hidden, args.intermediate), (args.intermediate, args.hidden)
    return {f"layers.{layer}.experts.{expert}.{part}": shape for layer in range(args.layers)
            for expert in range(args.experts) for part, shape in (("down", small), ("gate", large), ("up", large))}


def open_rows(args, device, checkpoint: Checkpoint) -> _core.Rows:
    """Two parts a row: gate behind up, and down."""
    each = 2 * args.hidden * args.intermediate
    row_bytes = 3 * each
    rows = _core.Rows(device, [2 * each, each], read_only=True, name="experts",
                      ram_bytes=int(args.ram * args.layers * args.experts * row_bytes))
    begin = args.experts * 2 * each  # of the second part
    for layer in range(args.layers):
        ranges = []
        for expert in range(args.experts):
            for part, at in (("gate", 2 * expert * each), ("up", (2 * expert + 1) * each),
                             ("down", begin + expert * each)):
                record = checkpoint.records[f"layers.{layer}.experts.{expert}.{part}"]
                ranges.append((record.file, record.offset, record.nbytes, at))
        rows.add_file_table(f"layer {layer}", args.experts, checkpoint.core, ranges, [0, begin])
    return rows


def route(args, rng: random.Random, orders: list) -> list[int]:
    weights = [(i + 1) ** -args.skew for i in range(args.experts)]
    picked: set[int] = set()
    while len(picked) < args.per_token:
        picked.add(rng.choices(orders, weights)[0])
    return sorted(picked)


def same(args, checkpoint: Checkpoint, pool, lease, layer: int, expert: int, slot: int) -> bool:
    gate_up = pool[0][lease[3] + slot].cpu()
    want = torch.cat([checkpoint[f"layers.{layer}.experts.{expert}.{part}"].reshape(-1) for part in ("gate", "up")])
    return torch.equal(gate_up, want)


def measure(args, where: Where, path: str) -> dict:
    checkpoint = Checkpoint(path)
    rows = open_rows(args, _core.Device("cuda:0") if where.cuda else where.target(1 << 34), checkpoint)
    each, total = args.hidden * args.intermediate, args.layers * args.experts
    slots = max(args.per_token, int(args.slots * total))
    pool = [torch.empty(slots, count, dtype=torch.bfloat16, device=where.torch) for count in (2 * each, each)]
    stream = torch.cuda.current_stream().cuda_stream if where.cuda else 0
    rows.open(slots, [part.data_ptr() for part in pool], stream)
    rng = random.Random(1)
    orders = [rng.sample(range(args.experts), args.experts) for _ in range(args.layers)]
    drop_cache(path)
    best = best_rate(path, True, LIMIT)
    plain = Plain(path, best, LIMIT)
    plain()
    rounds, wrong = [], 0
    for number in range(ROUNDS):
        before, begin = rows.stats(), time.perf_counter()
        for token in range(args.tokens):
            for layer in range(args.layers):
                ids = torch.tensor(route(args, rng, orders[layer]))
                places = torch.empty_like(ids)
                lease = rows.acquire(layer, ids.data_ptr(), 8, len(ids), len(ids), stream, places.data_ptr())
                if token == 0:
                    where.synchronize()
                    wrong += not same(args, checkpoint, pool, lease, layer, int(ids[0]), int(places[0]))
                rows.release(lease, stream)
        where.synchronize()
        took = time.perf_counter() - begin
        plain()
        after = rows.stats()
        nbytes = after["read_bytes"] - before["read_bytes"]
        rounds.append({"round": number, "seconds": took, "read": nbytes, "rate": plain.beside(number),
                       "ratio": took / (nbytes / plain.beside(number)) if nbytes else 0.0,
                       "hits": (after["hits"] - before["hits"]) / (after["asked"] - before["asked"]),
                       "ram_hits": (after["ram_hits"] - before["ram_hits"])
                       / max(1, after["brought"] - before["brought"])})
    stats = rows.stats()
    rows.close()
    checkpoint.close()
    return {"rounds": rounds, "wrong": wrong, "best": best["how"], "row_bytes": stats["row_bytes"],
            "ram_bytes": stats["ram_bytes"], "slots": slots}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--device", default="cuda")
    for name, value in (("layers", 8), ("experts", 64), ("hidden", 2048), ("intermediate", 768), ("per-token", 8),
                        ("tokens", 24), ("slots", 0.1), ("ram", 0.5), ("skew", 0.0)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if lacks_card(args.device):
        return NO_CARD
    path = os.path.join(args.dir, FILE)
    write(path, shapes(args))
    try:
        found = measure(args, Where(args.device), path)
    finally:
        if not args.keep:
            os.remove(path)
    table([("round", "round", ""), ("s", "seconds", ".2f"), ("bytes read", "read", ".3e"), ("disk B/s", "rate", ".3e"),
           ("x disk", "ratio", ".3f"), ("hits", "hits", ".2f"), ("RAM hits", "ram_hits", ".2f")], found["rounds"])
    ratios = [each["ratio"] for each in found["rounds"][1:] if each["read"]]
    if ratios:
        print(f"reads take {statistics.median(ratios):.3f} x (median; {min(ratios):.3f} to {max(ratios):.3f}) of "
              f"bytes / disk rate; rows of {found['row_bytes'] / 1e6:.1f} MB; {found['wrong']} wrong")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**vars(args), **found}, file)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
