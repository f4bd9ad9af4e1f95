"""runtime.curve(): step times over budgets before anything runs, and what comes out of it."""

import json
import xml.etree.ElementTree as ET

import pytest
import stagehand
import torch
from stagehand import _core
from support import made, runtime
from torch import nn

ONE = 256 * 257 * 4


def stack(n=12):
    return made(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(n)]))


def managed(budget=5 * ONE, **options):
    model = stagehand.layer(stack(), **{"vram_budget": budget, "device": "sim", **options})
    return model, runtime(model)


def passes(model, count):
    with torch.inference_mode():
        for _ in range(count):
            model(torch.ones(2, 256))


def test_the_curve_falls_and_ends_where_all_is_on_the_device():
    model, own = managed()
    passes(model, 4)
    curve = own.curve(8)
    assert [p["budget"] for p in curve] == sorted({p["budget"] for p in curve})
    assert all(a["step_ms"] >= b["step_ms"] for a, b in zip(curve, curve[1:]))
    assert curve[-1]["step_ms"] == curve[-1]["compute_ms"] and curve[-1]["bytes_per_step"] == 0
    assert len(curve) == 9


def test_the_present_budget_has_the_plan_that_is_in_force():
    model, own = managed(device=_core.Device("sim", memory_bytes=1 << 24, link_bytes_per_s=10**9, virtual_time=True))
    passes(model, 5)
    own.end_step()
    now, = (p for p in own.curve(6) if p["present"])
    assert now["budget"] == own.stats["budget"] == 5 * ONE
    assert now["step_ms"] == pytest.approx(own.plan["step_ns"] / 1e6, rel=0.05)


def test_the_smallest_budget_of_the_curve_works_and_less_does_not():
    model, own = managed()
    passes(model, 3)
    least = own.curve(4)[0]["budget"]
    own.set_vram_budget(least)
    passes(model, 2)
    with pytest.raises(stagehand.StagehandOOMError):
        own.set_vram_budget(least - ONE)


def test_it_is_there_before_the_first_pass():
    _, own = managed()
    curve = own.curve(4)
    assert curve[0]["step_ms"] > curve[-1]["step_ms"] and curve[0]["bound_by"] in ("link", "ring")


def test_text_json_and_picture_say_the_same():
    model, own = managed()
    passes(model, 3)
    curve = own.curve(4)
    lines = str(curve).splitlines()
    assert len(lines) == 1 + len(curve) and sum("< now" in line for line in lines) == 1
    assert all(f"{p['step_ms']:.2f}" in line for p, line in zip(curve, lines[1:]))
    assert json.loads(curve.json()) == list(curve)
    picture = ET.fromstring(curve.svg)
    dots = [e for e in picture.iter() if e.get("class") == "dot"]
    assert len(dots) == len(curve) and curve._repr_html_() == curve.svg
    x = [float(dot.get("cx")) for dot in dots]
    assert x == sorted(x)
    assert "now: " in curve.svg and "nan" not in curve.svg and "http" not in curve.svg.replace(
        "http://www.w3.org/2000/svg", "")


def test_what_has_no_curve_says_why():
    model = stagehand.layer(stack(2), vram_budget="1MB", device="sim")
    assert [p["bound_by"] for p in runtime(model).curve(2)][-1] == "compute"
    _, own = managed()
    with pytest.raises(ValueError, match="2 to 1000"):
        own.curve(1)
    with pytest.raises(TypeError, match="points"):
        own.curve("many")
    static = stagehand.StagehandRuntime(
        stack(), stagehand.StagehandConfig(policy="static", vram_budget=6 * ONE), r"^\d+$", device="sim")
    static.prepare()
    with pytest.raises(stagehand.InvalidStateTransitionError, match="static"):
        static.curve()
    static.shutdown()
