"""Dtypes, layouts and sizes; buffers; tensors that cannot be moved as bytes."""

import copy

import pytest
import torch
from support import HostMasterGuard, aligned_copy, made, nbytes, near, runtime, same, smallest_budget, wrap
from torch import nn
from torch.nn import functional as F

import stagehand
from stagehand.session.opening import bare_tensors

FP8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


def param(data):
    return nn.Parameter(data, requires_grad=False)


class Odd(nn.Module):
    """One module of more than 1 MiB whose parameters are of every kind; field cases 39, 41, 43."""

    def __init__(self, rows=1100):
        super().__init__()
        self.main = param(torch.randn(rows, 256))
        self.bytes = param(torch.arange(13, dtype=torch.uint8))
        self.seven = param(torch.randn(7))
        self.three = param(torch.randn(3).bfloat16())
        self.one64 = param(torch.randn(1, dtype=torch.float64))
        self.two = param(torch.randn(2, dtype=torch.complex64))
        self.scalar = param(torch.tensor(1.25))
        self.single = param(torch.ones(1))
        self.int8 = param(torch.randint(-100, 100, (300, 33), dtype=torch.int8))
        self.mask = param(torch.rand(65, 3) > 0.5)
        self.halves = param(torch.randn(130, 65).half())
        self.empty = param(torch.zeros(0, 4))
        self.turned = param(torch.randn(65, 130).t())
        self.sliced = param(torch.randn(64, 64)[::2, 1::3])
        self.spread = param(torch.randn(1, 70).expand(40, 70))
        flat = torch.randn(3000)
        self.first, self.second, self.third = (param(flat[a:b]) for a, b in ((1, 900), (901, 1800), (1801, 2999)))
        for i, dtype in enumerate(FP8):
            setattr(self, f"fp8_{i}", param(torch.randn(50, 20).to(dtype)))

    def forward(self, x):
        self.addresses = {name: p.data_ptr() for name, p in self._parameters.items() if p.numel()}
        self.shapes = {name: (p.shape, p.stride(), p.dtype) for name, p in self._parameters.items()}
        y = (x @ self.main.t()).mean() * self.scalar + self.single
        y = y + self.bytes.sum() + self.seven.sum() + self.three.float().sum() + self.one64.float()
        y = y + self.two.real.sum() + self.int8.float().mean() + self.mask.float().mean()
        y = y + self.halves.float().mean() + self.empty.sum()
        y = y + self.turned.mean() + self.sliced.mean() + self.spread.mean()
        y = y + self.first.mean() - self.second.mean() + 2 * self.third.mean()
        for i in range(len(FP8)):
            y = y + getattr(self, f"fp8_{i}").float().mean()
        return y


class OddNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.odd = nn.ModuleList(Odd(1100 + 8 * i) for i in range(3))
        self.out = nn.Linear(1, 8)

    def forward(self, x):
        return sum(self.out(odd(x)[None]) for odd in self.odd)

    def example(self):
        return (torch.randn(2, 256),)


@pytest.mark.parametrize("small", [False, True])
def test_every_dtype_and_layout_streams_or_stays(small):
    """small: the budget has room to keep small tensors on the device."""
    model = made(OddNet)
    ref = aligned_copy(model)
    least = smallest_budget(model, lambda: made(OddNet))
    budget = least + (300_000 if small else 0)
    wrap(model, budget, 1e9)
    with torch.no_grad(), HostMasterGuard(model):
        for _ in range(4):
            x = model.example()[0]
            assert same(model(x), ref(x))
            for mine, theirs in zip(model.odd, ref.odd):
                assert mine.shapes == theirs.shapes
                assert all(address % 512 == 0 for address in mine.addresses.values())
    report = runtime(model).report
    assert report["odd.0.empty"] == "it is empty"
    state = ref.state_dict()
    for name, value in model.state_dict().items():
        if value.dtype not in FP8:
            assert same(value, state[name]) and value.stride() == state[name].stride(), name
    runtime(model).shutdown()
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert same(mine, theirs) and mine.stride() == theirs.stride(), name


def test_padding_is_small():
    """Field case 39: 512 bytes a tensor at the most."""
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.big = nn.Parameter(torch.randn(1024, 300))
            for i in range(200):
                setattr(self, f"p{i}", nn.Parameter(torch.randn(1 + i % 7)))

        def forward(self, x):
            return F.linear(x, self.big) + sum(getattr(self, f"p{i}").sum() for i in range(200))

    model = made(Many)
    exact = sum(p.numel() * p.element_size() for p in model.parameters())
    ref = aligned_copy(model)
    wrap(model, exact + 512 * 201 + 4096)
    with torch.no_grad():
        x = torch.randn(2, 300)
        assert same(model(x), ref(x))
    stats = runtime(model).stats
    assert stats["host_bytes"] <= exact + 512 * 201


def test_low_precision_models():
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8))).to(dtype).requires_grad_(False)
        model.example = lambda dtype=dtype: (torch.randn(2, 96).to(dtype),)
        ref, least = aligned_copy(model), smallest_budget(model)
        wrap(model, least)
        with torch.no_grad():
            for _ in range(3):
                x = model.example()[0]
                assert same(model(x), ref(x))


def test_dtype_casts_floating_parameters_and_keeps_ties():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.layers[5].weight = self.layers[0].weight
            self.layers[4].weight = nn.Parameter(self.layers[1].weight.data)
            self.norm = nn.LayerNorm(64)
            self.norm2 = nn.LayerNorm(64)
            self.norm2.weight = nn.Parameter(self.norm.weight.data)
            self.count = nn.Parameter(torch.arange(5), requires_grad=False)

        def forward(self, x):
            for layer in self.layers:
                x = self.norm(layer(x))
            return self.norm2(x) + self.count.sum()

        def example(self):
            return (torch.randn(2, 64).bfloat16(),)

    model = made(Net)
    with torch.no_grad():
        model.norm.weight.normal_()
    bf16 = copy.deepcopy(model)
    bf16.layers[4].weight = nn.Parameter(bf16.layers[1].weight.data)
    bf16.norm2.weight = nn.Parameter(bf16.norm.weight.data)
    bf16.count, count = None, bf16.count
    bf16.bfloat16()
    bf16.count = count
    ref = aligned_copy(bf16)
    wrap(model, 60_000, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            x = model.example()[0]
            assert same(model(x), ref(x))
    assert model.layers[0].weight.dtype is torch.bfloat16 and model.count.dtype is torch.int64
    assert model.layers[5].weight is model.layers[0].weight
    for a, b in ((model.layers[4], model.layers[1]), (model.norm2, model.norm)):
        assert a.weight.data_ptr() == b.weight.data_ptr()


# ---------------------------------------------------------------------- memory shared in other ways


def test_overlapping_tensors_stay_and_stay_shared():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.randn(96 * 96 + 7)
            self.a, self.b = nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False)
            self.a.weight = nn.Parameter(flat[: 96 * 96].view(96, 96))
            self.b.weight = nn.Parameter(flat[7:].view(96, 96))
            self.c = nn.Linear(96, 96)
            self.register_buffer("tail", self.c.weight.data[90:])
            self.register_buffer("whole", self.c.bias.data)
            self.d = nn.Linear(96, 96)

        def forward(self, x):
            self.tail.add_(0.5)  # seen through c.weight
            return self.d(self.c(self.b(self.a(x)))) + self.whole

    model, ref = made(Net), made(Net)
    wrap(model, nbytes(model) + 65536)
    report = runtime(model).report
    assert all("shares memory" in report[name] for name in ("a.weight", "b.weight", "c.weight"))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 96)
            assert near(model(x), ref(x), atol=1e-4, rtol=1e-5)
        model.a.weight[1, 0] = 100.0
        assert model.b.weight.view(-1)[96 - 7] == 100.0
        runtime(model).shutdown()
        assert model.b.weight.view(-1)[96 - 7] == 100.0
        model.tail.fill_(3.0)
        assert bool((model.c.weight[90:] == 3).all())


# ---------------------------------------------------------------------- buffers


def test_buffers_persistent_or_not_and_reassigned():
    """Field case 45."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.register_buffer("rope", torch.randn(64), persistent=False)
            self.register_buffer("cache", torch.zeros(2))
            self.register_buffer("nothing", None)
            self.layers[2].register_buffer("shared", self.rope)
            self.bn = nn.BatchNorm1d(64)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) * self.rope + self.layers[2].shared
            self.cache = torch.full((x.shape[0] + 1,), float(self.cache.sum()) + 1)
            self.rope.mul_(0.99)
            return self.bn(x)

    model = made(Net).train()
    ref = aligned_copy(model)
    names = set(model.state_dict())
    wrap(model, 70_000)
    with torch.no_grad():
        for i in range(4):
            x = torch.randn(3 + i, 64)
            assert same(model(x), ref(x))
            assert same(model.cache, ref.cache)
    assert set(model.state_dict()) == names and model.layers[2].shared is model.rope
    runtime(model).shutdown()
    for (name, mine), theirs in zip(model.named_buffers(), ref.buffers()):
        assert same(mine, theirs), name
    assert model.layers[2].shared is model.rope


def test_bare_tensors_are_found_by_module_and_attribute():
    """Field case 24. They are warned of where the device is not the host."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.inner.table = torch.arange(4)
            self.scale = torch.ones(1)
            self.number = 3

    assert bare_tensors(Net()) == ["scale", "inner.table"]


# ---------------------------------------------------------------------- what cannot be moved as bytes


class Labelled(torch.Tensor):
    """A subclass with its own behaviour."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Quantised(nn.Parameter):
    pass


def test_subclasses_stay_with_a_reason():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.layers[1].weight = nn.Parameter(torch.randn(64, 64).as_subclass(Labelled))
            self.layers[2].weight = Quantised(torch.randn(64, 64))
            self.layers[2].weight.quant_state = torch.ones(2)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.as_subclass(torch.Tensor)

    model = made(Net)
    state = model.layers[2].weight.quant_state
    ref = made(Net)  # subclasses of tensors do not deep-copy by themselves
    wrap(model, 120_000)
    report = runtime(model).report
    assert "Labelled" in report["layers.1.weight"] and "Quantised" in report["layers.2.weight"]
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, 64)
            assert near(model(x), ref(x), atol=1e-5)
    assert type(model.layers[2].weight) is Quantised and model.layers[2].weight.quant_state is state
    runtime(model).shutdown()
    assert type(model.layers[1].weight) is type(ref.layers[1].weight)


def test_lazy_and_meta_parameters_are_refused_by_name():
    lazy = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(stagehand.StagehandError, match="1.weight has no values yet"):
        wrap(lazy, 1 << 20)
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    with pytest.raises(stagehand.StagehandError, match="0.weight is on the meta device"):
        wrap(meta, 1 << 20)
    half = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64, device="meta"))
    with pytest.raises(stagehand.StagehandError, match="1.weight is on the meta device"):
        wrap(half, 1 << 20)


@pytest.mark.parametrize("inside", [False, True])
def test_models_made_or_wrapped_under_inference_mode(inside):
    """Field case 89."""
    with torch.inference_mode(inside):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    plain.load_state_dict(model.state_dict())
    ref = aligned_copy(plain)
    with torch.inference_mode():
        wrap(model, 200_000)
        for _ in range(2):
            x = torch.randn(2, 64)
            assert same(model(x), ref(x))
        runtime(model).synchronize()
    assert not any(p.is_inference() for p in (*model.parameters(), *model.buffers()))
    x = torch.randn(2, 64)
    for net in (model, ref):
        net(x).sum().backward()
    assert all(same(a.grad, b.grad) for a, b in zip(model.parameters(), ref.parameters()))


def test_modules_without_anything_to_stream():
    with pytest.raises(ValueError, match="No eligible layers"):
        wrap(nn.Sequential(nn.LayerNorm(8), nn.ReLU()), 1 << 20)
    small = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    ref = aligned_copy(small)
    wrap(small, 1 << 20)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4)
            assert same(small(x), ref(x))
    stats = runtime(small).stats
    assert stats["units"] == [] and runtime(small).mode in ("trace", "scheduled")
    runtime(small).shutdown()
