"""StagehandConfig: names, checks, and that every setting says truthfully what it does."""

import dataclasses
import pathlib

import pytest

torch = pytest.importorskip("torch")

from stagehand import StagehandConfig  # noqa: E402
from stagehand.modes.config import NOTHING, SETTINGS, describe  # noqa: E402

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_names_and_defaults_are_the_known_ones():
    known = {
        "stagehand_enabled": True, "pinned_pool_mb": 8192, "pinned_slab_mb": None, "pinned_slab_alignment": 512,
        "vram_budget": None, "vram_high_watermark_mb": 22000, "vram_low_watermark_mb": 18000,
        "max_inflight_transfers": 2, "copy_stream_priority": -1, "policy": "planned", "prefetch_window_blocks": 3,
        "eviction_cooldown_steps": 2, "strict_bf16": True, "fail_on_dtype_promotion": True, "nan_inf_check": True,
        "telemetry_enabled": True, "telemetry_interval_steps": 10, "telemetry_file": None, "debug_trace": False,
        "transfer": None, "trainables": "auto",
    }
    assert dataclasses.asdict(StagehandConfig()) == known


@pytest.mark.parametrize(
    "field, value, error",
    [
        ("pinned_pool_mb", 0, ValueError),
        ("pinned_pool_mb", "8GB", TypeError),
        ("pinned_slab_mb", -1, ValueError),
        ("pinned_slab_mb", 300, ValueError),  # does not divide the pool
        ("pinned_slab_alignment", 100, ValueError),
        ("vram_budget", 0, ValueError),
        ("vram_budget", "8 parsecs", ValueError),
        ("vram_budget", 1.5, TypeError),
        ("vram_budget", True, TypeError),
        ("vram_low_watermark_mb", 22000, ValueError),
        ("max_inflight_transfers", 0, ValueError),
        ("copy_stream_priority", 0.5, TypeError),
        ("policy", "magic", ValueError),
        ("prefetch_window_blocks", -1, ValueError),
        ("telemetry_interval_steps", 0, ValueError),
        ("nan_inf_check", "yes", TypeError),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value, error):
    with pytest.raises(error, match=field):
        StagehandConfig(**{field: value})


def test_a_value_changed_later_is_checked_too():
    config = StagehandConfig()
    config.policy = "magic"
    with pytest.raises(ValueError, match="policy"):
        config.validate()


def test_budget_comes_from_the_budget_then_the_watermark():
    assert StagehandConfig().budget_bytes() is None
    assert StagehandConfig(vram_budget="3GiB").budget_bytes() == 3 << 30
    assert StagehandConfig(vram_budget=12345).budget_bytes() == 12345
    assert StagehandConfig(vram_high_watermark_mb=3000).budget_bytes() == 3000 << 20
    assert StagehandConfig(vram_high_watermark_mb=22000).budget_bytes() == 22000 << 20, "given, if as the default"
    assert StagehandConfig(vram_budget="1GB", vram_high_watermark_mb=3000).budget_bytes() == 10**9


def test_a_high_watermark_alone_is_fine():
    assert "low_watermark" not in StagehandConfig(policy="static", vram_high_watermark_mb=100).options()


def without_effect(**given):
    return {name for name, _ in StagehandConfig(**given).without_effect()}


def test_settings_without_effect_are_known():
    window = {"prefetch_window_blocks": 5}
    assert without_effect(**window) == {"prefetch_window_blocks"}
    assert without_effect(policy="static", **window) == set()
    assert without_effect(policy="static", max_inflight_transfers=4) == {"max_inflight_transfers"}
    assert without_effect(debug_trace=True) == {"debug_trace"}
    assert without_effect(prefetch_window_blocks=3) == {"prefetch_window_blocks"}, "given, if as the default"
    assert without_effect() == set()
    assert without_effect(vram_budget="1GB", vram_high_watermark_mb=9) == {"vram_high_watermark_mb"}
    assert without_effect(policy="static", vram_budget="4MiB", vram_low_watermark_mb=4) == {"vram_low_watermark_mb"}
    assert without_effect(policy="static", vram_budget="4MiB", vram_low_watermark_mb=3) == set()
    assert without_effect(pinned_slab_alignment=64) == {"pinned_slab_alignment"}


def test_replace_does_not_turn_defaults_into_settings():
    config = dataclasses.replace(StagehandConfig(policy="static"), prefetch_window_blocks=1)
    assert config.was_set("prefetch_window_blocks") and not config.was_set("vram_high_watermark_mb")


def test_a_field_without_effect_warns_and_says_what_to_do():
    with pytest.warns(RuntimeWarning, match="prefetch_window_blocks.*static"):
        StagehandConfig(prefetch_window_blocks=5).warn_without_effect()


def test_every_field_is_described_in_order():
    assert [s.name for s in SETTINGS] == [f.name for f in dataclasses.fields(StagehandConfig)]
    for setting in SETTINGS:
        if NOTHING in (setting.planned, setting.static):
            assert setting.instead, f"{setting.name} must say what to do instead"


def test_the_documentation_has_the_table_as_it_is():
    assert describe() in DOCS.read_text(), "docs/config.md: print(stagehand.config.describe()) and paste it"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_options_for_the_core_follow_the_table(setting):
    """Fields that only one policy reads change the core's options under that policy alone."""
    changed = {"prefetch_window_blocks": 7, "vram_low_watermark_mb": 5}
    if setting.name not in changed:
        assert (setting.planned == NOTHING) == (setting.static == NOTHING), "tell this test how to change it"
        return
    for policy in ("planned", "static"):
        plain = StagehandConfig(policy=policy).options()
        other = StagehandConfig(policy=policy, **{setting.name: changed[setting.name]}).options()
        assert (plain == other) == (getattr(setting, policy) == NOTHING)
