"""All workloads, one after the other, in one table and one JSON file: `make bench`.

usage: run.py [--only NAME[,NAME]] [--list] [--device cuda|sim] [--dir DIR] [--no-peers] [--json FILE] [--text FILE]

Each workload is a process of its own (a script of this folder with the arguments below), so that none meets what
another has left behind, and its host memory is its own. Peers run where they are installed. On "sim" sizes are small
and times say nothing: it shows that everything works. Every workload takes less than nine minutes on an H100.

Columns: medians and their spread, what bounds the row and how far it is from that, the most that was taken on the card
(PyTorch's peak and the ring of streamed weights), what the row's set-up took, and for the
whole workload the host's peak memory and the wall time. Status 1 when a row of ours failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from common import NO_CARD, Where, table, version_of

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = ("diffusers", "accelerate", "ramtorch", "mmgp", "deepspeed", "transformers", "peft")
LIMIT_S = 540

# name: (script, arguments on a card, arguments on the simulated device). {dir} is a folder for files.
BUDGETS = "966MB,2899MB,3GiB,5798MB,8697MB"  # of 9.66 GB: 10, 30, 33, 60 and 90 %
WORKLOADS = {
    "inference": ("inference", f"--budget {BUDGETS} --tokens 1024,4096,16384 --steps 10 --no-peers",
                  "--budget 200KB,400KB --no-peers"),
    "graph": ("inference", "--graph --budget 966MB,3GiB,5798MB --tokens 1024,16384 --steps 10 --no-peers",
              "--budget 200KB --no-peers"),
    "peers": ("inference", "--tokens 1024,16384 --steps 10", ""),
    "small": ("inference", "--case small", "--case small"),
    "dit": ("inference", "--case dit --compile", "--case dit"),
    "llama": ("inference", "--case llama", "--case llama"),
    "unet": ("inference", "--case unet", "--case unet"),
    "adapt": ("adapt", "", ""),
    "found": ("found", "", ""),
    "lora": ("training", "--case lora", "--case lora"),
    "full": ("training", "--case full", "--case full"),
    "micro": ("training", "--case micro", "--case micro --micro 4"),
    "steps": ("training", "--case steps", "--case steps"),
    "activation": ("activation", "", "--tokens 64 --peaks 0.0005,0.0002"),
    "combined": ("combined", "", ""),
    "conductor": ("conductor", "", ""),
    "quantised": ("quantised", "", "--blocks 4 --hidden 128 --tokens 16 --budget 1MB --steps 3"),
    "packed": ("packed", "", ""),
    "disk": ("disk", "--dir {dir}", "--dir {dir} --blocks 3 --hidden 256 --budget 1500KB --tokens 4 --steps 2"),
    "adamw": ("adamw", "", "--elements 1M --steps 3"),
}
ON_HOST = {"adamw"}  # take no --device
WITH_PEERS = {"peers", "small", "dit", "llama", "unet", "lora", "activation"}


def workloads() -> dict:
    """Those whose script is here."""
    return {name: spec for name, spec in WORKLOADS.items() if os.path.exists(os.path.join(HERE, spec[0] + ".py"))}


def command(name: str, args, out: str) -> list[str]:
    script, cuda, sim = WORKLOADS[name]
    words = (cuda if args.device == "cuda" else sim).format(dir=args.dir).split()
    if name not in ON_HOST:
        words += ["--device", args.device]
    if args.no_peers and name in WITH_PEERS:
        words.append("--no-peers")
    return [sys.executable, os.path.join(HERE, script + ".py"), *words, "--json", out]


def run(name: str, args, folder: str) -> dict:
    """Runs one workload; its record, with `status`, `wall_s` and the peak of its resident set in bytes."""
    out = os.path.join(folder, name + ".json")
    line = command(name, args, out)
    print(f"== {name}: {' '.join(os.path.basename(word) if i < 2 else word for i, word in enumerate(line[:-2]))}",
          flush=True)
    begin = time.perf_counter()
    child = subprocess.Popen(line, cwd=folder)
    status, usage = waited(child, LIMIT_S)
    found = {"status": status, "wall_s": time.perf_counter() - begin, "rss_peak": usage.ru_maxrss * 1024,
             "command": " ".join(line[1:-2])}
    with contextlib.suppress(OSError, ValueError), open(out) as file:
        found["record"] = json.load(file)
    return found


def waited(child: subprocess.Popen, limit: float):
    """Exit status and usage of a child, which is ended at the limit."""
    end = time.monotonic() + limit
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode, usage
        if time.monotonic() > end:
            print(f"   ended: it took more than {limit:.0f} s", file=sys.stderr, flush=True)
            child.kill()
            end = float("inf")
        time.sleep(0.05)


def sameness(row: dict) -> str | None:
    """How a row's outputs, or else its gradients, agree with the resident model's."""
    if row.get("equal"):
        return "yes" if row["equal"] is True else row["equal"]
    return f"{row['grad_max']:.0e}" if row.get("grad_max") is not None else None


def rows_of(name: str, found: dict) -> list[dict]:
    """The rows of a workload as the table shows them; one that says why where there are none."""
    rows = found.get("record", {}).get("rows") or []
    if not rows:
        return [{"row": name, "failed": f"status {found['status']}, no figures"}]
    shown = []
    for row in rows:
        line = {key: row.get(key) for key in ("ms", "min", "max", "steps", "bound", "x_bound", "x_resident",
                                              "predicted", "setup_s", "version")}
        line["row"] = f"{name}: {row['row']}"
        ring = (row.get("plan") or {}).get("ring_bytes", row.get("ring", 0))  # mapped outside of PyTorch's allocator
        line["peak_mib"] = (row["peak"] + ring) / 2**20 if row.get("peak") else None
        line["rss_mib"] = found["rss_peak"] / 2**20
        line["same"] = sameness(row)
        if row.get("ms") and row.get("predicted"):
            line["off"] = 100 * (row["predicted"] / row["ms"] - 1)
        if "failed" in row:
            line["failed"] = row["failed"]
        shown.append(line)
    return shown


COLUMNS = [("workload: row", "row", ""), ("ms", "ms", ".1f"), ("min", "min", ".1f"), ("max", "max", ".1f"),
           ("bound", "bound", ".1f"), ("x bound", "x_bound", ".3f"), ("x resid.", "x_resident", ".3f"),
           ("predicted %", "off", "+.1f"), ("peak MiB", "peak_mib", ".0f"), ("host MiB", "rss_mib", ".0f"),
           ("set-up s", "setup_s", ".2f"), ("same", "same", ""), ("version", "version", "")]


def driver() -> str | None:
    """Of the card, as nvidia-smi says it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return said[0] if said else None
    return None


def machine(args) -> dict:
    said = Where(args.device).describe()
    said["driver"] = driver() if args.device == "cuda" else None
    said["peers"] = {package: version for package in PACKAGES if (version := version_of(package)) != "unknown"}
    said["host_memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return said


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of workloads, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names and their commands, run nothing")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--dir", help="folder for the disk workload's file (9.66 GB); default: a temporary one")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", default="bench.json")
    parser.add_argument("--text", default="bench.txt", help="the table goes here, too")
    args = parser.parse_args()
    known = workloads()
    args.names = args.only.split(",") if args.only else list(known)
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}: there are {', '.join(known)}")
    return args


def main() -> int:
    args = parse()
    if args.list:
        for name in args.names:
            print(f"{name:<12} {' '.join(command(name, args, 'FILE')[1:-2])}")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: make bench measures on one; --device sim shows on the CPU that all workloads run",
              file=sys.stderr)
        return NO_CARD
    record, rows = {"machine": machine(args), "workloads": {}}, []
    with tempfile.TemporaryDirectory() as folder:
        args.dir = os.path.abspath(args.dir) if args.dir else os.path.join(folder, "files")
        for name in args.names:
            found = record["workloads"][name] = run(name, args, folder)
            rows += rows_of(name, found)
            write_json(args.json, {**record, "rows": rows})  # what is done stays, whatever comes
    said = record["machine"]
    print()
    with open(args.text, "w") as text:
        for out in (sys.stdout, text):
            with contextlib.redirect_stdout(out):
                print(", ".join(f"{key} {value}" for key, value in said.items() if value not in (None, {})))
                table(COLUMNS, rows)
    return 1 if any(found["status"] != 0 for found in record["workloads"].values()) else 0


def write_json(path: str, record: dict) -> None:
    with open(path + ".part", "w") as out:
        json.dump(record, out, indent=1)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    sys.exit(main())
