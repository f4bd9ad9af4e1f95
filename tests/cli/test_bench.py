#!/usr/bin/env python3
"""`stagehand bench` without PyTorch: rates of the simulated device, the file that stays away, mistakes."""

import json
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, OK, USAGE, expect, stagehand
from support import tap

RATES = ("link_up", "link_down", "link_both", "link_up_pageable", "ram_copy", "disk_read")
folder = pathlib.Path()


def bench(*words: object) -> tuple[str, dict]:
    """What is printed, and the JSON."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    done = stagehand("bench", "--device", "sim", "--disk", folder, "--json", out, *words)
    expect(done, OK)
    return done.stdout, json.loads(out.read_text())


def test_rates() -> None:
    text, told = bench("--rates")
    for key in RATES:
        assert told["rates"][key]["gb_s"] > 0, told["rates"]
    assert told["rates"]["pin_rate"]["gb_s"] is None and "left out" in told["rates"]["pin_rate"]["note"]
    assert told["device"]["simulated"] and told["runs"] == [] and told["steps_left_out"] is None
    assert told["commit"] and told["host"]["processors"] >= 1
    for part in ("simulated device", "link up", "copy within RAM", "disk", told["commit"], told["stagehand"], "took"):
        assert part in text, part


def test_the_file_that_was_read_is_gone() -> None:
    bench("--rates")
    assert [path.name for path in folder.iterdir()] == ["out.json"]


def test_without_a_python_it_says_how_to_get_the_rest() -> None:
    before = os.environ.get("STAGEHAND_PYTHON")
    os.environ["STAGEHAND_PYTHON"] = "/does/not/exist"
    try:
        text, told = bench()
    finally:
        os.environ.pop("STAGEHAND_PYTHON") if before is None else os.environ.update(STAGEHAND_PYTHON=before)
    assert "PyTorch" in told["steps_left_out"] and told["rates"]["link_up"]["gb_s"] > 0
    assert "python -m stagehand bench" in text


def test_a_folder_that_cannot_be_written_is_named() -> None:
    done = stagehand("bench", "--rates", "--device", "sim", "--disk", folder / "missing")
    expect(done, OK, "missing: No such file or directory; name another folder with --disk")


def test_mistakes() -> None:
    (folder / "there.json").write_text("kept")
    expect(stagehand("bench", "--json", folder / "there.json"), DATA, "nothing is overwritten")
    assert (folder / "there.json").read_text() == "kept"
    expect(stagehand("bench", "--seconds", "4"), USAGE, "--seconds")
    assert stagehand("bench", "--device", "nothing").returncode not in (OK, USAGE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        sys.exit(tap.run([(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]))
