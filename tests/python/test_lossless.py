"""Lossless transfer: what a model computes is what it computes when its weights cross the link as they are, bit by bit.

On a card, within five minutes: STH_TEST_DEVICE=cuda:0 python -m pytest tests/python/test_lossless.py
"""

import copy
import ctypes

import card
import numpy as np
import pytest
import stagehand
import torch
from file_support import save
from stagehand import _core
from support import Stack, TinyLM, aligned_copy, made, nbytes, same
from test_quantised import with_adapters
from torch import nn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def budget_of(model, share=0.5) -> int:
    return int(nbytes(model) * share) + (96 << 10)


def wrapped(model, transfer="lossless", **kwargs):
    kwargs.setdefault("vram_budget", budget_of(model))
    kwargs.setdefault("device", card.NAME)
    stagehand.layer(model, transfer=transfer, **kwargs)
    return stagehand.runtime(model)


def wide(n=6, d=96, dtype=torch.bfloat16, **kwargs):
    return made(Stack, n, d, **kwargs).to(dtype)


def references(model, **kwargs) -> list:
    """The resident model, on the simulated device, and the model under today's transfer."""
    plain = copy.deepcopy(model)
    resident = [] if card.ON_CARD else [aligned_copy(model)]
    wrapped(plain, "plain", **kwargs)
    return [*resident, plain]


def forward(model, *args):
    with torch.no_grad():
        return model(*map(card.there, args))


def agree(model, others, *args, times=3):
    for _ in range(times):
        got = forward(model, *args)
        for other in others:
            assert same(got, forward(other, *args))


def odd_values(weight):
    """Values of all kinds in the first elements."""
    bits = torch.tensor([0x7F80, -0x80, 0x7FC1, 1, -0x7FFF, -0x8000, 0x7F7F, 0], dtype=torch.int16)
    with torch.no_grad():
        weight.view(-1)[:8] = bits.view(torch.bfloat16).to(weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_arrives_in_fewer_bytes(dtype):
    model = wide(8, 128, dtype)
    others = references(model)
    before = copy.deepcopy(model.state_dict())
    runtime = wrapped(model)
    agree(model, others, torch.randn(4, 128, dtype=dtype))
    most = {torch.bfloat16: 0.74, torch.float16: 0.9, torch.float32: 0.88}[dtype]
    packed = runtime.quantised["error"]
    assert len(packed) >= 3 and not any(packed.values())
    units = {unit["name"]: unit for unit in runtime.stats["units"]}
    for name in packed:
        unit = units[name.rsplit(".", 1)[0]]
        assert unit["transfer_bytes"] < most * unit["bytes"]
    assert runtime.stats["device_peak"] + runtime.stats["reserved_bytes"] <= runtime.stats["budget"]
    for m in (model, copy.deepcopy(model)):
        assert all(torch.equal(value.cpu(), before[name]) for name, value in m.state_dict().items())
    plain = stagehand.runtime(others[-1])
    assert runtime.plan["bytes_per_step"] < plain.plan["bytes_per_step"]
    runtime.shutdown()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nan_infinities_and_subnormals_arrive():
    model = wide()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            odd_values(module.weight)
    want = {name: param.detach().clone().view(torch.int16) for name, param in model.named_parameters()}
    runtime = wrapped(model)
    seen = {}
    names = {module: name for name, module in model.named_modules()}

    def look(module, args):
        seen[names[module] + ".weight"] = module.weight.detach().to("cpu", copy=True).view(torch.int16)

    hooks = [m.register_forward_pre_hook(look) for m in names if isinstance(m, nn.Linear)]
    for _ in range(2):
        forward(model, torch.randn(2, 96).bfloat16())
        assert runtime.quantised["error"]
    for hook in hooks:
        hook.remove()
    assert seen and all(torch.equal(bits, want[name]) for name, bits in seen.items())
    runtime.shutdown()


class Convolutions(nn.Module):
    def __init__(self, c=24, n=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(n))
        self.layers[3].to(memory_format=torch.channels_last)
        self.turned = nn.Linear(80, 80)
        self.turned.weight = nn.Parameter(torch.randn(80, 80).t() / 9, requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.turned(x.flatten(1)[:, :80])


def test_any_layout_and_any_module():
    model = made(Convolutions)
    others = references(model, vram_budget=budget_of(model, 0.4))
    runtime = wrapped(model, vram_budget=budget_of(model, 0.4))
    agree(model, others, torch.randn(2, 24, 9, 9))
    assert {"layers.3.weight", "turned.weight"} & set(runtime.quantised["error"])
    runtime.shutdown()
    model = made(TinyLM, 400, 64)
    others = references(model, vram_budget=budget_of(model, 0.4))
    runtime = wrapped(model, vram_budget=budget_of(model, 0.4))
    agree(model, others, *model.example())
    runtime.shutdown()


def noise(like):
    """Values of any exponent."""
    bits = torch.randint(-(2**15), 2**15, (like.numel() * like.element_size() // 2,), dtype=torch.int16)
    return bits.view(like.dtype).view(like.shape).nan_to_num(1.0, 1.0, -1.0).clamp(-1e3, 1e3)


def test_what_does_not_shrink_crosses_as_it_is():
    model = wide()
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight.copy_(noise(block.up.weight))
    others = references(model)
    runtime = wrapped(model)
    agree(model, others, torch.randn(4, 96).bfloat16() / 1e3)
    left = runtime.quantised["left"]
    assert runtime.quantised["error"] and not any(".up." in name for name in runtime.quantised["error"])
    assert "it would not shrink by a tenth" in left.values()
    runtime.shutdown()


WRITES = {
    "add_": lambda w: w.add_(0.25),
    "data": lambda w: w.data.mul_(1.5),
    "new data": lambda w: setattr(w, "data", w.detach() * 2 + 0.125),
    "noise": lambda w: w.copy_(noise(w)),
    "noise in data": lambda w: w.data.copy_(noise(w)),
    "new noise": lambda w: setattr(w, "data", noise(w)),
    "numpy": lambda w: np.copyto(w.numpy(), w.numpy()[::-1].copy()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", WRITES)
def test_written_weights_arrive(how, dtype):
    if how == "numpy" and dtype is torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    model = wide(dtype=dtype)
    x = torch.randn(4, 96, dtype=dtype)
    others = references(model)
    runtime = wrapped(model)
    names = list(runtime.quantised["error"])
    agree(model, others, x, times=2)
    for write in (WRITES[how], lambda w: w.mul_(0.5), WRITES[how], lambda w: w.copy_(torch.full_like(w, 0.03))):
        with torch.no_grad():
            for name in names:
                weight = model.get_parameter(name)
                write(weight)
                for other in others:
                    other.get_parameter(name).data.copy_(weight.data)
        for other in others:
            if other is not others[0] or card.ON_CARD:
                stagehand.runtime(other).synchronize()
        agree(model, others, x, times=2)
    runtime.shutdown()


def test_loading_other_values():
    model = wide()
    x = torch.randn(4, 96).bfloat16()
    other = wide()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(-0.75)
    runtime = wrapped(model)
    forward(model, x)
    model.load_state_dict(other.state_dict())
    agree(model, references(other), x)
    runtime.shutdown()


def test_a_view_that_somebody_holds_is_read_and_written():
    model = wide()
    others = references(model)
    x = torch.randn(4, 96).bfloat16()
    runtime = wrapped(model)
    name = next(iter(runtime.quantised["error"]))
    view = model.get_parameter(name).data[0]
    agree(model, others, x, times=2)
    view[:] = noise(view)
    for other in others:
        other.get_parameter(name).data[0] = view
    agree(model, others, x)
    runtime.shutdown()


@pytest.mark.parametrize("trainables", ["host", "device"])
def test_lora_over_a_lossless_base_has_equal_losses_and_gradients(trainables):
    model = with_adapters(wide(dtype=torch.float32))
    plain = copy.deepcopy(model)
    wrapped(plain, "plain", trainables=trainables)
    runtime = wrapped(model, trainables=trainables)
    assert any("up.base" in name for name in runtime.quantised["error"])
    losses = []
    for m in (model, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(3):
            loss = m(card.there(torch.randn(4, 96))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    runtime.shutdown()


def test_a_base_that_begins_to_train_later():
    model, x = wide(dtype=torch.float32), torch.randn(4, 96)
    plain = copy.deepcopy(model)
    runtimes = [wrapped(model), wrapped(plain, "plain")]
    name = next(iter(runtimes[0].quantised["error"]))
    losses = []
    for m in (model, plain):
        weight = m.get_parameter(name).requires_grad_(True)
        optimizer = torch.optim.SGD([weight], lr=1e-2)
        for _ in range(3):
            loss = m(card.there(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:] and losses[0] != losses[2]
    assert torch.equal(model.get_parameter(name).cpu(), plain.get_parameter(name).cpu())
    for runtime in runtimes:
        runtime.shutdown()


def test_weights_that_train_are_plain_and_named():
    model = made(Stack, 6, 96, frozen=False)
    runtime = wrapped(model)
    assert not runtime.quantised["error"]
    assert any("train" in reason for reason in runtime.quantised["left"].values())
    runtime.shutdown()


def test_block_mode_and_inference_over_trainable_weights():
    model = made(Stack, 6, 96, frozen=False).bfloat16()
    want = copy.deepcopy(model)
    x = torch.randn(2, 96).bfloat16()
    config = stagehand.StagehandConfig(vram_budget=budget_of(model), transfer="lossless")
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=card.NAME,
                                         inference_mode=True)
    for _ in range(3):
        runtime.begin_step()
        got = forward(model, x)
        runtime.end_step()
    assert runtime.quantised["error"]
    if not card.ON_CARD:
        assert same(got, forward(aligned_copy(want), x))
    runtime.shutdown()


def test_a_model_from_a_file_has_the_packed_bytes_in_memory_and_no_others(tmp_path):
    plain = wide(8, 128)
    with torch.no_grad():
        plain.blocks[2].up.weight.copy_(noise(plain.blocks[2].up.weight))
    save(tmp_path / "stack.safetensors", plain.state_dict())
    model = stagehand.load(lambda: Stack(8, 128).bfloat16().eval(), tmp_path / "stack.safetensors",
                           vram_budget=budget_of(plain, 0.3), device=card.NAME, transfer="lossless")
    runtime = stagehand.runtime(model)
    x = torch.randn(3, 128).bfloat16() / 1e3
    agree(model, references(plain), x)
    assert runtime.quantised["error"] and "blocks.2.up.weight" not in runtime.quantised["error"]
    assert runtime.stats["host_bytes"] < 0.75 * nbytes(plain)
    runtime.shutdown()


def test_plans_may_change():
    model = wide(8)
    others = references(model)
    x = torch.randn(2, 96).bfloat16()
    runtime = wrapped(model)
    for share in (0.4, 0.8, 1.5, 0.4):
        runtime.set_vram_budget(budget_of(model, share))
        agree(model, others, x, times=2)
    runtime.shutdown()


@card.simulated_only
def test_without_kernels_the_host_expands_and_says_so():
    model = wide()
    others = references(model)
    device = _core.Device("sim", memory_bytes=budget_of(model), expand=False)
    with pytest.warns(RuntimeWarning, match="expanded on the host.*without expansion"):
        runtime = wrapped(model, device=device)
    agree(model, others, torch.randn(4, 96).bfloat16())
    runtime.shutdown()


@pytest.mark.skipif(not card.ON_CARD, reason="captures a graph: needs a card (STH_TEST_DEVICE=cuda:0)")
def test_a_captured_graph_contains_the_expansion():
    model = wide(8, 512)
    plain = references(model)[-1]
    runtime = wrapped(model)
    x = card.there(torch.randn(4, 512).bfloat16())
    with torch.no_grad():
        for _ in range(4):
            model(x)
        step = stagehand.capture(model, x)
        assert same(step(x), forward(plain, x))
        for name in runtime.quantised["error"]:
            model.get_parameter(name).mul_(0.5)
            plain.get_parameter(name).mul_(0.5)
        assert same(step(x), forward(plain, x))
    runtime.shutdown()


def slow_link(budget):
    """The link is the bound: its time is virtual, in which the host's compute takes none."""
    return _core.Device("sim", memory_bytes=2 * budget, link_bytes_per_s=10**9, virtual_time=True)


def fewest_bytes(runtime) -> float:
    """That cross the link in a step where only plain units stay, beside the same stages and ring."""
    packed = [unit for unit in runtime.stats["units"] if unit["transfer_bytes"] < unit["bytes"]]
    share = min(unit["transfer_bytes"] / unit["bytes"] for unit in packed)
    stats, plan = runtime.stats, runtime.plan
    return share * (plan["total_bytes"] - (stats["budget"] - stats["stage_bytes"] - plan["ring_bytes"]))


@card.simulated_only
@pytest.mark.parametrize("mode", ["layer", "block"])
def test_units_stay_on_the_device_packed_where_the_link_is_the_bound(mode):
    model = wide(8, 128)
    want, x = aligned_copy(model), torch.randn(4, 128).bfloat16()
    budget = budget_of(model)
    if mode == "layer":
        runtime = wrapped(model, device=slow_link(budget))
    else:
        config = stagehand.StagehandConfig(vram_budget=budget, transfer="lossless")
        runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device=slow_link(budget),
                                             inference_mode=True)
    for _ in range(12):
        if mode == "block":
            runtime.begin_step()
        before = runtime.stats["h2d_bytes"]
        got = forward(model, x)
        if mode == "block":
            runtime.end_step()
        assert same(got, forward(want, x))
    stats = runtime.stats
    assert 0 < runtime.plan["packed_bytes"] <= stats["packed_bytes"] <= stats["device_bytes"] <= stats["budget"]
    assert stats["h2d_bytes"] - before == runtime.plan["bytes_per_step"] < fewest_bytes(runtime)
    runtime.shutdown()


@card.simulated_only  # its link's time is virtual
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_host_memory_is_taken_for_units_that_stream_or_stay_packed_alone(share):
    """Where nearly all fits some units are left as they are, and take no memory beside their masters."""
    model = wide(12, 128)
    want, x = aligned_copy(model), torch.randn(4, 128).bfloat16()
    budget = budget_of(model, share)
    runtime = wrapped(model, vram_budget=budget, device=slow_link(budget))
    said = runtime.quantised
    for _ in range(3):
        assert same(forward(model, x), forward(want, x))
    packed = [unit for unit in runtime.stats["units"] if unit["transfer_bytes"] < unit["bytes"]]
    stay = [name for name, why in said["left"].items() if why == "it stays on the device"]
    assert len(packed) + len(stay) == len(runtime.stats["units"])
    assert said["host_bytes"] >= sum(unit["transfer_bytes"] for unit in packed) > 0
    assert said["host_bytes"] < 0.75 * sum(unit["bytes"] for unit in packed)
    assert len(stay) >= 5 if share == 0.9 else len(stay) <= 3
    runtime.shutdown()


@card.simulated_only
def test_auto_crosses_plain_where_compute_is_the_bound_and_packed_where_the_link_is():
    """Each block computes for so long that expansions would take more than 1/200 of it; then hardly at all."""
    model, other = wide(12, 128), wide(12, 128)
    want, x = aligned_copy(model), torch.randn(4, 128).bfloat16()
    budget = budget_of(model, 0.4)
    device = slow_link(budget)
    runtime = wrapped(model, "auto", vram_budget=budget, device=device)
    lossless = wrapped(other, vram_budget=budget, device=slow_link(budget))
    for _ in range(3):
        forward(other, x)
    busy = {"ns": 0}
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: device.compute(busy["ns"]))

    def crossing():
        for _ in range(12):
            assert same(forward(model, x), forward(want, x))
        units = [unit for unit in runtime.stats["units"] if unit["bytes"] == 98304]
        return sum(unit["transfer_bytes"] == unit["bytes"] for unit in units), len(units)

    assert runtime.quantised["encoding"] == "auto" and runtime.quantised["error"]
    assert crossing()[0] == 0
    assert runtime.plan["bytes_per_step"] <= 1.1 * lossless.plan["bytes_per_step"]
    runtime.shutdown()
    lossless.shutdown()
    runtime = wrapped(model, "auto", vram_budget=budget,
                      device=(device := _core.Device("sim", memory_bytes=2 * budget, link_bytes_per_s=10**11,
                                                     copy_latency_ns=1, virtual_time=True)))
    busy["ns"] = 3000
    plain, units = crossing()
    assert plain == units and runtime.plan["packed_bytes"] == runtime.plan["expand_ns"] == 0
    runtime.shutdown()


@card.simulated_only
def test_training_over_a_base_that_stays_packed():
    model = with_adapters(wide(8, 128, torch.float32))
    want = copy.deepcopy(model)
    runtime = wrapped(model, trainables="host", device=slow_link(budget_of(model)))
    losses = []
    for m in (model, aligned_copy(want)):
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for i in range(8):
            torch.manual_seed(i)
            loss = m(torch.randn(4, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:8] == losses[8:]
    assert runtime.stats["packed_bytes"] > 0
    runtime.shutdown()


SIZES = {"BF16": (2, 1408), "F16": (2, 1792), "F32": (4, 3456)}  # bytes of a value and of a tile


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("dtype", SIZES)
def test_bytes_of_any_kind_have_the_values_of_the_reference(dtype, hostile):
    """Packed bytes that are none, as a hostile file may have them, keep to their place; right ones are the values."""
    each, tile = SIZES[dtype]
    count, escapes = 70003, 4096  # 69 tiles, the last of which is not full
    nbytes, stride = count * each, 69 * tile + 16 + 288 + escapes
    torch.manual_seed(2)
    values = torch.zeros(nbytes, dtype=torch.uint8)
    segments = _core.transfer_segments([("lossless", dtype, 0, 1, count, stride, 0, None, None)])
    device = card.open_device(1 << 22)
    arena = _core.Arena(device, 1 << 20)
    address = arena.reserve(stride)
    packed = torch.frombuffer((ctypes.c_uint8 * stride).from_address(address), dtype=torch.uint8)
    if hostile:
        packed[:] = torch.randint(0, 256, (stride,), dtype=torch.uint8)
        packed[: 4 * tile] = 255
    else:
        kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
        values[:] = (torch.randn(count) / 50).to(kind).view(torch.uint8)
        _core.transfer_encode(segments, values.data_ptr(), address)
    arena.finish()
    _core.transfer_decode(segments, address, values.data_ptr())
    runtime = _core.Runtime(device, 1 << 21, read_only=True)
    guard = 1 << 12  # bytes behind the values, which nobody writes
    for i in range(3):
        runtime.add_unit(f"unit.{i}", nbytes + guard, host=address, arena=arena, segments=segments,
                         packed_bytes=stride)
    runtime.seal()
    for _ in range(2):
        runtime.step_begin()
        for i in range(3):
            got = torch.utils.dlpack.from_dlpack(runtime.acquire(i)).view(torch.uint8)[:nbytes].cpu()
            assert torch.equal(got, values)
        runtime.step_end()
    assert not runtime.stats()["expand_error"]
    runtime.close()


def test_a_session_takes_it():
    net = wide()
    want = aligned_copy(net)
    x = torch.randn(4, 96).bfloat16()
    settings = {"mode": "layer", "vram_budget": budget_of(net), "transfer": "lossless", "inference_mode": True}
    config = {"memory": {"strategy": "stagehand", "stagehand": settings}}
    with stagehand.session(net, config, device=card.NAME):
        agree(net, [want], x)
        assert stagehand.runtime(net).quantised["error"]


def test_experts_come_by_rows_beside_it():
    pytest.importorskip("transformers")
    from test_experts import budget_for, model_of

    model = model_of()
    resident = aligned_copy(model)
    budget = budget_for(model, 40)
    wrapped(model, vram_budget=budget, inference_mode=True)
    ids = card.there(torch.randint(0, 300, (1, 12)))
    for n in (12, 3, 1, 12):
        with torch.no_grad():
            assert same(model(ids[:, :n]).logits, resident(ids[:, :n]).logits)
    assert stagehand.runtime(model).plan["experts"]["by_rows"]
    stagehand.runtime(model).shutdown()


def test_options():
    for bad in ("int3", 8, True, "Lossless"):
        with pytest.raises(ValueError, match="'plain', 'lossless'"):
            stagehand.layer(wide(2, 16), transfer=bad, device="sim")
    runtime = wrapped(wide(), "plain")
    assert runtime.quantised["encoding"] is None
    runtime.shutdown()
