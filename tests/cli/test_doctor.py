#!/usr/bin/env python3
"""`stagehand doctor`: what is there is measured, what is missing is said with the reason."""

import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, DEVICE, OK, USAGE, expect, stagehand
from support import tap

folder = pathlib.Path()


def diagnosis(*words: object) -> dict:
    done = stagehand("doctor", "--json", *words)
    expect(done, OK)
    return json.loads(done.stdout)


def test_text() -> None:
    expect(stagehand("doctor"), OK, "Stagehand ", "sim:0", "pinned", "pageable", "GB/s", "pinning limit",
           "container limit", "available", "cuda")


def test_the_simulated_device_is_measured() -> None:
    sim = next(d for d in diagnosis()["devices"] if d["backend"] == "sim")
    assert sim["available"] and sim["error"] is None and sim["pinned"], sim
    assert sim["copy_bytes"] == [1 << 20, 16 << 20, 64 << 20]
    assert all(rate > 0 for rate in sim["pinned_gb_s"] + sim["pageable_gb_s"]), sim
    assert "pinned_host" in sim["capabilities"]
    assert 0 < sim["memory_free"] <= sim["memory_total"]


def test_a_back_end_that_is_missing_says_why_and_what_to_do() -> None:
    told = diagnosis()
    for device in told["devices"]:
        if device["backend"] == "cuda" and not device["available"]:
            assert device["error"], device
            assert any("cuda" in line for line in told["advice"]), told["advice"]


def test_host_facts_agree_with_the_system() -> None:
    host = diagnosis()["host"]
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    assert host["ram_total"] == total * 1024
    assert 0 < host["ram_available"] <= host["ram_total"]
    assert host["wsl"] == ("microsoft" in pathlib.Path("/proc/version").read_text().lower())


def test_disk() -> None:
    data = folder / "data"
    data.write_bytes(bytes(3 << 20))
    disk = diagnosis("--disk", data)["disk"]
    assert disk["bytes"] == 3 << 20 and disk["gb_s"] > 0 and disk["cached"] is None, disk
    (folder / "small").write_bytes(b"x")
    assert diagnosis("--disk", folder)["disk"]["bytes"] == 3 << 20
    expect(stagehand("doctor", "--disk", data), OK, "3.00 MiB", "cached is unknown")
    assert diagnosis()["disk"] is None


def test_mistakes() -> None:
    expect(stagehand("doctor", "--disk", folder / "absent"), DATA, "absent")
    (folder / "nothing").mkdir()
    expect(stagehand("doctor", "--disk", folder / "nothing"), DATA, "nothing", "no file")
    expect(stagehand("doctor", "--backend", "libown.so"), USAGE, "./libown.so")
    expect(stagehand("doctor", "--backend", folder / "absent.so"), DEVICE, "absent.so")
    (folder / "void").write_bytes(b"")
    expect(stagehand("doctor", "--disk", folder / "void"), DATA, "void", "empty")
    expect(stagehand("doctor", "--disk", "/dev/null"), DATA, "/dev/null")
    expect(stagehand("doctor", "extra"), USAGE, "extra")
    expect(stagehand("doctor", "--disc"), USAGE, "--disk")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        cases = [(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]
        sys.exit(tap.run(cases))
