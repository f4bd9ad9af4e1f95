"""Models that take turns below one cap, weights and activations together: `stagehand.integrations.diffusers.offload` on
a pipeline of our own, on a device that has no byte more than the cap."""

from __future__ import annotations

import types

import card
import pytest
import torch
from support import Stack, aligned_copy, made, nbytes, same, threads
from test_finding import Allocator, Busy
from torch import nn

import stagehand
from stagehand.device import Target
from stagehand.integrations import diffusers as integration
from stagehand.integrations.diffusers import offload

STEPS = 6
KB = 1000


class Vae(nn.Module):
    """Called by a part of it, as a pipeline calls `vae.decode()`."""

    def __init__(self):
        super().__init__()
        self.decoder = Busy(3, 64)

    def decode(self, x):
        return self.decoder(x)


class Pipe:
    def __init__(self, device="cpu"):
        self.device = device
        self.text, self.image, self.vae = made(Busy, 10, 64), made(Busy, 24, 64), made(Vae)
        self.text.row, self.image.row, self.vae.decoder.row = 10 * KB, 25 * KB, 250 * KB
        self.components = {"vae": self.vae, "text": self.text, "image": self.image, "scheduler": object()}

    def busy(self):
        return self.text, self.image, self.vae.decoder

    def __call__(self, x, steps=STEPS):
        with torch.no_grad():
            x = x.to(self.device)
            x = x + self.text(x)
            for _ in range(steps):
                x = x + self.image(x).tanh()
            return self.vae.decode(x)


@pytest.fixture
def pair():
    """(pipeline, reference, what of them has activations)."""
    pipe, plain = Pipe(), Pipe(card.TORCH)
    for name in ("text", "image", "vae"):
        setattr(plain, name, aligned_copy(getattr(pipe, name)))
    with threads(1):
        yield pipe, plain


def with_activations(pipe, offloaded) -> Allocator:
    """The device itself gives the memory of activations, and refuses what it has not."""
    targets = [runtime.session.target for runtime in offloaded.runtimes.values()]
    allocator = Allocator(targets[0])
    for target in targets:
        target.memory, target.begin_peak = allocator.memory, allocator.begin_peak
    for part in pipe.busy():
        part.allocator = allocator
    return allocator


def loaded(offloaded) -> dict:
    return {name: runtime.stats["h2d_bytes"] for name, runtime in offloaded.runtimes.items()}


def test_weights_and_activations_are_below_the_cap_from_the_first_call_on(pair):
    pipe, plain = pair
    weights = {name: nbytes(part) for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    cap = 2_600 * KB
    assert sum(weights.values()) > 1.4 * cap and weights["image"] > 0.8 * cap
    with offload(pipe, cap, device="sim") as offloaded:
        allocator = with_activations(pipe, offloaded)
        for call in range(4):
            x, before = torch.randn(4, 64), loaded(offloaded)
            assert same(pipe(x), plain(x))
            assert not allocator.failures
            moved = {name: now - before[name] for name, now in loaded(offloaded).items()}
            if call >= 2:  # text streams past what the image model has, and each byte crosses the link once
                image = offloaded.runtimes["image"]
                assert moved["text"] < 1.3 * weights["text"], moved
                assert moved["image"] < STEPS * image.plan["bytes_per_step"] + 0.7 * weights["image"], moved
        found = {name: runtime.stats["budget_found"] for name, runtime in offloaded.runtimes.items()}
        assert found["image"]["others"] < 150 * KB < 900 * KB < found["vae"]["others"]
        assert found["image"]["cap"] > 2_300 * KB > 1_500 * KB > found["vae"]["cap"]
        assert offloaded.runtimes["image"].stats["budget"] > 2_200 * KB
    assert same(pipe(x), plain(x))


def test_a_second_pipeline_behind_the_first_one_has_the_whole_cap(pair, recwarn):
    pipe, plain = pair
    for _ in range(2):
        offloaded = offload(pipe, 2_600 * KB, device="sim")
        with_activations(pipe, offloaded)
        x = torch.randn(4, 64)
        assert same(pipe(x), plain(x)) and same(pipe(x), plain(x))
        offloaded.shutdown()
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]


def test_larger_inputs_are_expected_and_what_cannot_be_is_said(pair):
    pipe, plain = pair
    with offload(pipe, 2_600 * KB, device="sim") as offloaded:
        allocator = with_activations(pipe, offloaded)
        for rows in (2, 2, 4, 4, 1):
            x = torch.randn(rows, 64)
            assert same(pipe(x), plain(x)), rows
        assert not allocator.failures
        with pytest.raises(torch.OutOfMemoryError):
            pipe(torch.randn(200, 64))
        x = torch.randn(2, 64)
        assert same(pipe(x), plain(x))


def test_no_cap_takes_what_the_device_has(pair):
    pipe, plain = pair
    card = stagehand.Device("sim", memory_bytes=2_600 * KB)
    with offload(pipe, device=card) as offloaded:
        allocator = with_activations(pipe, offloaded)
        for _ in range(3):
            x = torch.randn(4, 64)
            assert same(pipe(x), plain(x))
        assert not allocator.failures
        assert offloaded.runtimes["image"].stats["budget"] > 2_100 * KB


def test_models_that_take_turns_in_each_step_do_not_swap():
    """A ControlNet beside a UNet: both are used in each step."""
    models = {name: made(Stack, 12, 64, seed=seed) for seed, name in enumerate(("control", "unet"))}
    plain = {name: aligned_copy(model) for name, model in models.items()}
    weights = sum(map(nbytes, models.values()))
    pipe = types.SimpleNamespace(components=models)
    with threads(1), torch.no_grad(), offload(pipe, int(0.7 * weights), device="sim") as offloaded:
        moved = []
        for _ in range(8):
            before, x = sum(loaded(offloaded).values()), torch.randn(3, 64)
            for name in models:
                assert same(models[name](x), plain[name](x))
            moved.append(sum(loaded(offloaded).values()) - before)
        assert max(moved[4:]) < 0.75 * weights, (moved, weights)  # 0.3 of them and the rings stream


def test_what_is_no_option_of_a_pipeline_is_refused(pair):
    pipe, _ = pair
    with pytest.raises(TypeError, match="source"):
        offload(pipe, 2_600 * KB, device="sim", source="model.safetensors")
    assert "_stagehand_layer_runtime" not in vars(pipe.image)


def test_little_beside_the_places_stays_when_a_model_gives_them_away():
    """Norms, for which the device would wait twice in each call."""
    models = {name: made(Stack, 6, 256, seed=seed) for seed, name in enumerate(("text", "unet"))}
    plain = {name: aligned_copy(model) for name, model in models.items()}
    pipe = types.SimpleNamespace(components=models)
    with threads(1), torch.no_grad(), offload(pipe, int(0.7 * nbytes(models["unet"])), device="sim") as offloaded:
        moves = []
        for runtime in offloaded.runtimes.values():
            stay = runtime.session.stay
            stay._go_home = lambda stay=stay, went=stay._go_home: (moves.append(stay), went())
        for call in range(4):
            x = torch.randn(3, 256)
            for name, times in (("text", 1), ("unet", 4)):
                for _ in range(times):
                    assert same(models[name](x), plain[name](x))
            if call == 1:
                moves.clear()
        assert not moves and all(runtime.session.stay.reserved for runtime in offloaded.runtimes.values())
        assert offloaded.runtimes["text"].stats["yields"] > 2


def test_what_else_the_process_has_may_leave_less_than_a_model_needs(pair):
    """As workspaces of a card's libraries do beside small models: such a step goes above the cap."""
    pipe, plain = pair
    cap, x = 2_600 * KB, torch.randn(4, 64)
    with offload(pipe, cap, device=stagehand.Device("sim", memory_bytes=4 * cap)) as offloaded:
        allocator = with_activations(pipe, offloaded)
        assert same(pipe(x), plain(x))
        with allocator.room(cap):
            for _ in range(3):
                assert same(pipe(x), plain(x))
        for _ in range(2):
            assert same(pipe(x), plain(x))
        device = offloaded.runtimes["image"].session.target
        assert device.core.residency()["occupied"] < cap and not allocator.failures



def test_models_open_where_the_process_has_taken_memory_since_the_cap_was_counted(pair, monkeypatch):
    pipe, plain = pair
    cap, before = 2_600 * KB, Target.memory
    monkeypatch.setattr(integration, "_others", lambda core: 0)

    def memory(target):
        taken = {"framework_reserved": cap, "framework_allocated": cap, "framework_peak": cap}
        return {name: value + taken.get(name, 0) for name, value in before(target).items()}

    monkeypatch.setattr(Target, "memory", memory)
    with offload(pipe, cap, device=stagehand.Device("sim", memory_bytes=4 * cap)) as offloaded:
        for _ in range(2):
            x = torch.randn(4, 64)
            assert same(pipe(x), plain(x))
        assert sum(runtime.stats["budget"] for runtime in offloaded.runtimes.values()) < cap
    with pytest.raises(stagehand.StagehandOOMError, match="vae of the pipeline: .*the smallest budget that can work"):
        offload(pipe, 2 * KB, device="sim")


def test_adapters_come_where_the_rest_of_the_process_leaves_no_room(pair):
    pipe, plain = pair
    cap, x = 2_600 * KB, torch.randn(4, 64)
    with offload(pipe, cap, device=stagehand.Device("sim", memory_bytes=4 * cap)) as offloaded:
        allocator = with_activations(pipe, offloaded)
        with allocator.room(cap):
            assert same(pipe(x), plain(x)) and same(pipe(x), plain(x))
            for block in pipe.image.blocks:
                block.adapter = nn.Linear(64, 16)
            stays = offloaded.runtimes["image"].session.stay
            before = stays.reserved
            for _ in range(2):
                assert same(pipe(x), plain(x))
            assert stays.reserved > before and not allocator.failures
    with offload(pipe, 150 * KB, device=stagehand.Device("sim", memory_bytes=4 * cap)) as offloaded:
        allocator = with_activations(pipe, offloaded)
        with allocator.room(150 * KB):
            pipe.image.blocks[0].large = nn.Linear(64, 500)
            with pytest.raises(stagehand.StagehandOOMError, match="came after wrapping.*Raise the budget"):
                pipe(x)
