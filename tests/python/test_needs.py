"""The smallest budget: the one that an error names is taken by the same call and works; with less the call refuses."""

import copy
import functools
import random
import re

import pytest
import stagehand
import torch
from file_support import BLOCKS, save, state
from quant_models import resident, write
from support import (
    FULL, AttentionNet, RawNet, Stack, TinyLM, aligned_copy, device, made, nbytes, needs_regions, random_model, runtime,
    same, thinned, with_adapters)
from test_quantised import reference
from torch import nn

ENCODINGS = ("int8", "fp8", "int4")
FILES = ("plain", "v2", "v3-int4", "v3-nvfp4")
GRAIN = 512
D = 256


def named(error) -> int:
    return int(re.findall(r"(\d+) bytes", str(error))[-1])


def close(model) -> None:
    for name in ("_stagehand_layer_runtime", "_stagehand_runtime"):
        if name in model.__dict__:
            model.__dict__[name].shutdown()


def runtime_of(model):
    return model.__dict__.get("_stagehand_layer_runtime") or model._stagehand_runtime


def check_the_smallest(wrap, use, tiny=3000) -> int:
    """wrap(budget) -> the model, on a simulated device of so many bytes. use(model) computes and compares."""
    with pytest.raises(stagehand.StagehandOOMError, match="smallest budget that") as info:
        wrap(tiny)
    least = named(info.value)
    for less in (GRAIN, 1):
        with pytest.raises(stagehand.StagehandOOMError) as info:
            wrap(least - less)
        assert named(info.value) == least
    model = wrap(least)
    use(model)
    stats = runtime_of(model).stats
    assert stats["device_peak"] + stats["reserved_bytes"] <= least
    close(model)
    return least


def forward_equals(ref_of, x, passes=3):
    def use(model):
        ref = ref_of(model)
        with torch.no_grad():
            for _ in range(passes):
                assert same(model(*x), ref(*x))
    return use


def training_equals(plain, x, steps=3):
    def use(model):
        ref = aligned_copy(plain)
        pairs = list(zip(model.parameters(), ref.parameters()))
        optimizers = [torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-3)
                      for net in (model, ref)]
        for _ in range(steps):
            for net, optimizer in zip((model, ref), optimizers):
                optimizer.zero_grad()
                net(*x).square().mean().backward()
            assert all(same(ours.grad, theirs.grad) for ours, theirs in pairs if theirs.grad is not None)
            for optimizer in optimizers:
                optimizer.step()
    return use


def in_blocks(model, budget, transfer=None, **options):
    config = stagehand.StagehandConfig(vram_budget=budget, transfer=transfer, policy=options.pop("policy", "planned"))
    at = stagehand.StagehandRuntime(model, config, block_pattern=BLOCKS, device="sim", **options)
    try:
        at.prepare()
    except BaseException:
        at.shutdown()
        raise
    return model


def in_layers(model, budget, transfer=None, **options):
    return stagehand.layer(model, vram_budget=budget, device="sim", transfer=transfer, **options)


MODES = {"layers": in_layers, "blocks": in_blocks, "static": functools.partial(in_blocks, policy="static")}


def decoded(plain, encoding):
    return lambda model: reference(plain, list(runtime_of(model).quantised["error"]), encoding)


def test_the_smallest_works_with_every_plan():
    """Which plan there is depends on the link and on compute times. A loop's variable holds a weight to the forward's
    end, in the middle of the ring: the ring has to leave a place beside it, on either side."""
    plain = RawNet(d=520, n=4).requires_grad_(False)
    with pytest.raises(stagehand.StagehandOOMError) as info:
        in_layers(copy.deepcopy(plain), 3000)
    least, x, ref = named(info.value), plain.example(), aligned_copy(plain)
    for rate in thinned(range(24), 8):
        model = copy.deepcopy(plain)
        device = stagehand.Device("sim", memory_bytes=least, link_bytes_per_s=int(1e9 * 1.2**rate))
        stagehand.layer(model, vram_budget=least, device=device)
        with torch.no_grad():
            for _ in range(6):
                assert same(model(*x), ref(*x))
        close(model)


# ---- what crosses, from where, and how


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
@pytest.mark.parametrize("build", [lambda: made(Stack, 4, D, 1), lambda: made(TinyLM, 300, 64, 2)],
                         ids=["stack", "tied"])
def test_weights_in_ram(mode, encoding, build):
    plain = build()
    check_the_smallest(lambda budget: MODES[mode](copy.deepcopy(plain), budget, encoding),
                       forward_equals(decoded(plain, encoding), plain.example()))


@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("form, encoding", [*((form, None) for form in FILES), *(("plain", e) for e in ENCODINGS)])
def test_weights_in_files(tmp_path, form, encoding, blocks):
    plain = made(Stack, 4, D, 1)
    if form == "plain":
        path = str(tmp_path / "model.safetensors")
        save(path, state(plain))
        ref_of = decoded(plain, encoding)
    else:
        path = write(tmp_path, plain, form)
        ref = resident(plain, path)
        ref_of = lambda model: ref  # noqa: E731
    check_the_smallest(
        lambda budget: stagehand.load(lambda: Stack(4, D, 1), path, vram_budget=budget, device="sim", transfer=encoding,
                                      blocks=blocks), forward_equals(ref_of, plain.example()))


@pytest.mark.parametrize("encoding", [None, "int8"])
def test_a_file_of_layers_alone_beside_ram(tmp_path, encoding):
    plain = made(Stack, 4, D, 1)
    path = write(tmp_path, plain, "v1", leave=("out", "blocks.2.up"))
    ref = resident(plain, path)

    def ref_of(model):
        return reference(ref, list(runtime_of(model).quantised["error"]), encoding)

    with pytest.warns(RuntimeWarning, match="stay in RAM"):
        check_the_smallest(
            lambda budget: in_layers(copy.deepcopy(plain), budget, encoding, source=path, inference_mode=True),
            forward_equals(ref_of, plain.example()))


def test_a_row_that_is_larger_than_a_piece():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(40_000, 4, bias=False) for _ in range(6))

        def forward(self, x):
            return torch.stack([layer(x) for layer in self.layers])

    plain = made(Long)
    check_the_smallest(lambda budget: in_layers(copy.deepcopy(plain), budget, "int8"),
                       forward_equals(decoded(plain, "int8"), (torch.randn(2, 40_000),)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["lora", "all", "biases"])
def test_training(mode, kind):
    plain = made(Stack, 4, D, 1)
    if kind == "lora":
        with_adapters(plain)
    trains = {"all": r"", "biases": r"bias$", "lora": r"blocks\.\d\.(up|down)\.(up|down)\.weight$"}[kind]
    for name, param in plain.named_parameters():
        param.requires_grad_(re.search(trains, name) is not None)
    check_the_smallest(lambda budget: MODES[mode](copy.deepcopy(plain), budget),
                       training_equals(plain, plain.example()))


@pytest.mark.parametrize("before, after", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_weights_that_are_cast(before, after):
    """What stays on the device is counted as it is going to be."""
    plain = made(Stack, 4, D, 1).to(before)
    ref, x = aligned_copy(copy.deepcopy(plain).to(after)), plain.example()[0].to(after)
    check_the_smallest(lambda budget: in_layers(copy.deepcopy(plain), budget, dtype=after),
                       forward_equals(lambda model: ref, (x,)))


# ---- units that are held while others are used


class Rotated(nn.Module):
    """Owns a weight that it holds while it calls its layers; of a size that no ring is rounded to."""

    def __init__(self, d=520):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(d, d) / d)
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) @ self.turn
        return x

    def example(self):
        return (torch.randn(2, 520),)


@pytest.mark.parametrize("encoding", [None, "int8"])
@pytest.mark.parametrize("kind", [RawNet, AttentionNet, Rotated])
def test_modules_that_own_weights_and_call_others(kind, encoding):
    plain = made(kind)
    check_the_smallest(lambda budget: in_layers(copy.deepcopy(plain), budget, encoding),
                       forward_equals(decoded(plain, encoding), plain.example(), passes=12))


@pytest.mark.parametrize("kind", [RawNet, AttentionNet, Rotated])
def test_training_of_modules_that_call_others(kind):
    plain = made(kind, frozen=False)
    check_the_smallest(lambda budget: in_layers(copy.deepcopy(plain), budget), training_equals(plain, plain.example()))


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed):
    rng = random.Random(seed)
    plain = random_model(rng).requires_grad_(False)
    encoding = rng.choice([None, *ENCODINGS])
    check_the_smallest(lambda budget: in_layers(copy.deepcopy(plain), budget, encoding),
                       forward_equals(decoded(plain, encoding), plain.example()))


# ---- a budget that is lowered


@pytest.mark.parametrize("encoding", [None, "int8", "int4"])
@pytest.mark.parametrize("build", [lambda: made(Stack, 4, D, 1), lambda: made(AttentionNet), lambda: made(Rotated)],
                         ids=["stack", "attention", "rotated"])
def test_many_small_steps_down(build, encoding):
    plain = build()
    x, model = plain.example(), copy.deepcopy(plain)
    stagehand.layer(model, vram_budget=nbytes(plain) * 9 // 10, device=device(2 * nbytes(plain)), transfer=encoding)
    own, ref = runtime(model), reference(plain, list(runtime(model).quantised["error"]), encoding)
    session, budget = own.session, nbytes(plain) * 9 // 10
    less = max(nbytes(plain) // (60 if FULL else 24) // GRAIN * GRAIN, GRAIN)
    with torch.no_grad():
        while True:
            try:
                own.set_vram_budget(budget)
            except stagehand.StagehandOOMError as error:
                least = named(error)
                break
            assert same(model(*x), ref(*x))
            stats = own.stats
            assert stats["device_bytes"] + stats["reserved_bytes"] <= budget
            budget -= less
        assert budget < least <= budget + less and session.budget > budget
        own.set_vram_budget(least)
        for _ in range(12):
            assert same(model(*x), ref(*x))
        with pytest.raises(stagehand.StagehandOOMError, match=f"smallest that works is {least} bytes"):
            own.set_vram_budget(least - GRAIN)
        assert same(model(*x), ref(*x))
    own.shutdown()


# ---- compiled blocks, whose weights are leased all together


class Chain(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:] + sizes[:1]))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.filterwarnings("ignore:.*torch.compile has no effect")  # on those that are larger than the budget
@pytest.mark.parametrize("encoding", [None, "int8"])
@pytest.mark.parametrize("seed", thinned(range(6), 2))
def test_compiled_blocks_run_with_every_budget_that_holds_one(seed, encoding):
    """Wherever the first of a block's weights come to lie: what is free is gathered."""
    needs_regions()
    rng = random.Random(seed)
    sizes = [96] + [rng.choice([64, 128, 200, 333]) for _ in range(4)]
    torch.manual_seed(seed)
    plain, x = nn.Sequential(*(Chain(sizes) for _ in range(4))).eval().requires_grad_(False), torch.randn(2, 96)
    block, regions = nbytes(plain[0]), 0
    for extra in (0, 4096, 16384, 65536, 1 << 17, block // 2):
        model = copy.deepcopy(plain)
        for part in model:
            part.compile(backend="eager")
        in_layers(model, block + extra, encoding)
        ref = reference(plain, list(runtime(model).quantised["error"]), encoding)
        with torch.no_grad():
            for _ in range(6):
                assert same(model(x), ref(x))
        stats = runtime(model).stats
        assert stats["device_peak"] + stats["reserved_bytes"] <= block + extra
        regions += len(runtime(model).compiled)
        close(model)
    assert regions > 0
