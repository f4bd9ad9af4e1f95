#!/usr/bin/env python3
"""`stagehand plan`: units and blocks from names, costs that add up, and mistakes that name their cause."""

import json
import math
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, DEVICE, OK, USAGE, expect, stagehand, write_safetensors
from support import tap

folder = pathlib.Path()
KIB = 1024
BLOCKS = 12


def model() -> pathlib.Path:
    """12 blocks of 96 KiB in two units each, and 8 KiB outside them."""
    path = folder / "model.safetensors"
    tensors = {"embed.weight": ("U8", [8 * KIB])}
    for i in range(BLOCKS):
        tensors[f"h.{i}.attn.weight"] = ("U8", [32 * KIB])
        tensors[f"h.{i}.mlp.weight"] = ("U8", [64 * KIB - 512])
        tensors[f"h.{i}.mlp.bias"] = ("U8", [3])
    write_safetensors(path, tensors)
    return path


def plan(*words: object) -> dict:
    done = stagehand("plan", model(), "--device", "sim", "--json", *words)
    expect(done, OK)
    return json.loads(done.stdout)


def test_units_follow_one_another_in_natural_order() -> None:
    units = plan("--budget", "10MiB")["model"]["units"]
    names = [unit["name"] for unit in units]
    assert names == ["embed"] + [f"h.{i}.{part}" for i in range(BLOCKS) for part in ("attn", "mlp")], names
    assert units[1]["bytes"] == 32 * KIB
    assert units[2]["bytes"] == 64 * KIB, "each tensor takes a multiple of 512 bytes"


def test_blocks_group_units_and_leave_the_rest_out() -> None:
    told = plan("--budget", "10MiB", "--blocks", r"^h\.[0-9]+$")["model"]
    assert told["blocks"] == BLOCKS
    assert [unit["block"] for unit in told["units"][-2:]] == ["h.11", "h.11"]
    assert (told["left_out_tensors"], told["left_out_bytes"]) == (1, 8 * KIB)


def test_patterns_that_do_not_work() -> None:
    words = ("plan", model(), "--device", "sim", "--budget", "1MiB", "--blocks")
    expect(stagehand(*words, r"layers\.[0-9]+$"), USAGE, r"layers\.[0-9]+$", "h.0.attn")
    expect(stagehand(*words, r"h\.[0-9]+"), USAGE, r"h\.[0-9]+", "h.0 and h.0.attn", "nest")
    expect(stagehand(*words, "h["), USAGE, "'h['", "regular expression")


def test_the_curve_needs_no_budget_and_marks_one_that_is_given() -> None:
    told = plan("--curve", "--link", "2")
    steps = [point["step_ms"] for point in told["curve"]]
    assert len(steps) == 16 and steps == sorted(steps, reverse=True), steps
    assert "prediction" not in told and not any(point["present"] for point in told["curve"])
    told = plan("--curve", "--link", "2", "--budget", "512KiB")
    now = [point for point in told["curve"] if point["present"]]
    assert [point["budget"] for point in now] == [512 * KIB]
    assert math.isclose(now[0]["step_ms"], told["prediction"]["step_ms"], rel_tol=0.02), told
    done = stagehand("plan", model(), "--device", "sim", "--curve", "--link", "2")
    expect(done, OK, "ms a step")
    assert len([line for line in done.stdout.splitlines() if "####" in line]) >= 1
    picture = folder / "curve.svg"
    expect(stagehand("plan", model(), "--device", "sim", "--svg", picture, "--link", "2"), OK)
    assert picture.read_text().startswith("<svg")
    expect(stagehand("plan", model(), "--device", "sim", "--svg", picture, "--link", "2"), DATA, "curve.svg")
    expect(stagehand("plan", model(), "--device", "sim", "--svg", picture, "--json"), USAGE, "--svg")


def test_the_link_alone() -> None:
    budget, rate = 512 * KIB, 2
    told = plan("--budget", budget, "--link", rate)
    p, total = told["prediction"], told["model"]["bytes"]
    assert told["compute"] == {"ms": 0.0, "source": "unknown"}
    assert told["link"]["source"] == "given" and told["link"]["gb_s"] == rate
    assert total == BLOCKS * 96 * KIB + 8 * KIB == p["total_bytes"]
    assert p["resident_bytes"] + p["ring_bytes"] <= budget
    assert p["resident_bytes"] == sum(u["bytes"] for u in told["model"]["units"] if u["resident"])
    assert p["bytes_per_step"] == total - p["resident_bytes"] == p["streamed_bytes"]
    assert math.isclose(told["hit_share"], p["resident_bytes"] / total, rel_tol=1e-6)
    least = (total - budget + 64 * KIB) / (rate * 1e9) * 1e3
    assert math.isclose(p["lower_bound_ms"], least, rel_tol=0.01), (p, least)
    assert p["step_ms"] >= p["bytes_per_step"] / (rate * 1e9) * 1e3 * 0.999 and p["bound_by"] != "compute"


def test_compute_hides_the_copies() -> None:
    p = plan("--budget", 512 * KIB, "--link", 2, "--compute-ms", 50)["prediction"]
    assert p["bound_by"] == "compute" and math.isclose(p["compute_ms"], 50, rel_tol=0.001)
    assert 50 <= p["step_ms"] * 1.001 <= 52, p


def test_training_uses_every_unit_twice() -> None:
    told = plan("--budget", 512 * KIB, "--link", 2, "--passes", "train")
    p, total = told["prediction"], told["model"]["bytes"]
    assert p["total_bytes"] == total and total < p["bytes_per_step"] + 2 * 512 * KIB < 3 * total, p
    assert p["bytes_per_step"] >= 2 * (total - 512 * KIB)
    assert math.isclose(told["hit_share"], 1 - p["bytes_per_step"] / (2 * total), rel_tol=1e-6)


def test_when_everything_fits() -> None:
    told = plan("--budget", "10MiB")
    assert told["prediction"]["bytes_per_step"] == 0 and told["hit_share"] == 1
    assert told["with_1_gib_more"] is None and all(unit["resident"] for unit in told["model"]["units"])
    done = stagehand("plan", model(), "--device", "sim", "--budget", "10MiB")
    expect(done, OK, "Everything fits", "#" * 25)


def test_text_says_what_is_guessed() -> None:
    done = stagehand("plan", model(), "--device", "sim", "--budget", "512KiB")
    expect(done, OK, "16.0 GB/s ASSUMED", "NOT KNOWN", "the link alone", "bound by", "512.00 KiB",
           "1 GiB more", "VRAM", "RAM")
    strip = "".join(line.strip() for line in done.stdout.splitlines() if set(line.strip()) <= set("#."))
    assert len(strip) == 25 and "#" in strip and "." in strip, done.stdout
    assert strip.count("#") == sum(u["resident"] for u in plan("--budget", "512KiB")["model"]["units"])


def test_more_budget_is_planned_anew() -> None:
    told = plan("--budget", "512KiB")
    assert told["with_1_gib_more"]["bytes_per_step"] == 0
    assert told["with_1_gib_more"]["resident_bytes"] == told["model"]["bytes"]


def test_compute_from_telemetry() -> None:
    steps = folder / "steps.jsonl"
    steps.write_text('{"step":0,"compute_time_ms":30}\n{"step":1,"compute_time_ms":null}\n{"step":2,"comp\n'
                     '{"step":3,"compute_time_ms":50}\n{"truncated":true}\n')
    assert plan("--budget", "1MiB", "--telemetry", steps)["compute"] == {"ms": 40.0, "source": "telemetry"}
    words = ("plan", model(), "--device", "sim", "--budget", "1MiB", "--telemetry")
    steps.write_text('{"truncated":true}\n')
    expect(stagehand(*words, steps), DATA, "steps.jsonl", "compute_time_ms")
    expect(stagehand(*words, folder / "absent.jsonl"), DATA, "absent.jsonl")
    expect(stagehand(*words, steps, "--compute-ms", "1"), USAGE, "--telemetry")


def test_layers_of_an_index_are_units() -> None:
    raw = folder / "layers.bin"
    raw.write_bytes(bytes(4096))
    entries = [
        {"layer_id": i, "name": f"block.{i}", "path": "layers.bin", "offset": i * 1024, "nbytes": 1024}
        for i in range(3)
    ]
    index = folder / "layers.json"
    index.write_text(json.dumps(entries))
    done = stagehand("plan", index, "--device", "sim", "--budget", "1MiB", "--json")
    expect(done, OK)
    assert [u["name"] for u in json.loads(done.stdout)["model"]["units"]] == ["block.0", "block.1", "block.2"]


def test_a_budget_that_is_too_small_says_the_smallest() -> None:
    done = stagehand("plan", model(), "--device", "sim", "--budget", "10KiB")
    expect(done, DEVICE, "10.00 KiB", "64.00 KiB", "h.0.mlp")


def test_mistakes() -> None:
    expect(stagehand("plan", model()), USAGE, "--budget")
    expect(stagehand("plan", "--budget", "1GB"), USAGE, "PATH")
    expect(stagehand("plan", model(), "--budget", "much"), USAGE, "much")
    expect(stagehand("plan", model(), "--budget", "1MB", "--passes", "both"), USAGE, "both")
    expect(stagehand("plan", model(), "--budget", "1MB", "--link", "0"), USAGE, "--link")
    expect(stagehand("plan", model(), "--budget", "1MB", "--link", "nan"), USAGE, "--link")
    expect(stagehand("plan", model(), "--budget", "1MB", "--device", "tpu"), DEVICE, "tpu")
    expect(stagehand("plan", folder / "absent.safetensors", "--budget", "1MB"), DATA, "absent.safetensors")
    empty = folder / "empty.safetensors"
    write_safetensors(empty, {})
    expect(stagehand("plan", empty, "--budget", "1MB"), DATA, "nothing to stream")


def test_names_cannot_steer_the_terminal() -> None:
    path = folder / "escape.safetensors"
    write_safetensors(path, {"red\x1b[31m.w": ("U8", [4096])})
    done = stagehand("plan", path, "--device", "sim", "--budget", "512")
    expect(done, DEVICE, "red")
    assert "\x1b" not in done.stdout + done.stderr


def named(*words: object) -> dict:
    done = stagehand("plan", *words, "--json")
    expect(done, OK)
    return json.loads(done.stdout)


def test_a_named_model_on_a_named_card_is_marked_as_predicted() -> None:
    told = named("flux", "--card", "rtx4070", "--ram", "32GB")
    assert told["predicted"] and told["card"]["name"] == "rtx4070" and told["model"]["name"] == "flux"
    assert told["link"]["source"] == told["compute"]["source"] == "predicted"
    assert told["link"]["gb_s"] < 32 and told["disk"] is None
    units = told["model"]["units"]
    assert sum(unit["bytes"] for unit in units) == told["model"]["bytes"]
    assert told["prediction"]["resident_bytes"] + told["prediction"]["ring_bytes"] <= told["budget"] < 12 * 1024**3
    expect(stagehand("plan", "flux", "--card", "rtx4070"), OK, "PREDICTED", "GeForce RTX 4070", "PCIe 4 x16")


def test_a_card_alone_lists_all_models() -> None:
    told = named("--card", "rtx3060", "--ram", "32GB")
    assert len(told) > 5 and all(plan["predicted"] and plan["prediction"]["step_ms"] > 0 for plan in told)
    read = {plan["model"]["name"]: plan["disk"] for plan in told}
    assert read["sdxl"] is None and read["qwen3-moe"]["source"] == "assumed"
    done = stagehand("plan", "--card", "rtx3060")
    expect(done, OK, "PREDICTED", *read)


def test_a_curve_of_a_named_model() -> None:
    told = named("llama8b", "--card", "rtx4090", "--curve", "--budget", "8GB")
    steps = [point["step_ms"] for point in told["curve"]]
    assert len(steps) > 10 and steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_measured_rates_take_the_place_of_the_tables() -> None:
    told = named("llama8b", "--card", "rtx4090", "--budget", "4GB", "--link", "12.5")
    assert told["link"] == {**told["link"], "gb_s": 12.5, "source": "given"}
    assert told["prediction"]["step_ms"] > named("llama8b", "--card", "rtx4090",
                                                 "--budget", "4GB")["prediction"]["step_ms"]


def test_packed_weights_take_less_ram_and_auto_is_never_slower_than_plain() -> None:
    for model, card in (("flux", "rtx4070"), ("llama8b", "rtx4090"), ("llama8b", "rtx3060")):
        told = {kind: named(model, "--card", card, "--budget", "6GB", "--transfer", kind)
                for kind in ("plain", "lossless", "auto")}
        ram = {kind: plan["host_bytes"] / plan["model"]["bytes"] for kind, plan in told.items()}
        step = {kind: plan["prediction"]["step_ms"] for kind, plan in told.items()}
        assert ram["plain"] == 1 and ram["lossless"] < 0.9 and ram["auto"] <= 1.0, ram
        assert step["auto"] <= 1.006 * min(step["plain"], step["lossless"]), step
    assert step["lossless"] < 0.8 * step["plain"], step  # one token: the link is the bound
    expect(stagehand("plan", "flux", "--card", "rtx4070", "--transfer", "lossless"), OK, "packed as weights")
    expect(stagehand("plan", "flux", "--card", "rtx4070", "--transfer", "zip"), USAGE, "lossless", "'zip'")


def test_mistakes_with_cards() -> None:
    expect(stagehand("plan", "--card", "rtx4079"), USAGE, "rtx4079", "did you mean", "rtx3060")
    expect(stagehand("plan", "fluks", "--card", "rtx4070"), USAGE, "did you mean 'flux'")
    expect(stagehand("plan", "--card", "rtx4070", "--curve"), USAGE, "name one")
    expect(stagehand("plan", "flux", "--card", "rtx4070", "--compute-ms", 3), USAGE, "--card")
    expect(stagehand("plan", model(), "--budget", "1MiB", "--ram", "32GB"), USAGE, "--ram")
    expect(stagehand("plan", "flux", "--card", "rtx4070", "--budget", "1MiB"), DEVICE, "too small")
    expect(stagehand("plan"), USAGE, "PATH is missing")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        cases = [(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]
        sys.exit(tap.run(cases))
