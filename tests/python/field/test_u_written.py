"""U. Writes, and how they are noticed: files, alias memory, first uses."""

import contextlib
import warnings

import children
import file_support as files
import numpy as np
import card
import pytest
import support as s
import torch
from pairs import managed
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import stagehand

pytestmark = pytest.mark.filterwarnings("ignore:stagehand:RuntimeWarning")


class Mixed(nn.Module):
    """An LSTM, whose weights share a unit, and an embedding that is tied to the head."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(32, 64)
        self.lstm = nn.LSTM(64, 256, batch_first=True)
        self.out = nn.Linear(256, 64)
        self.embed = nn.Embedding(200, 64)
        self.head = nn.Linear(64, 200, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        ids = torch.arange(x.shape[1], device=x.device)
        return self.head(self.out(self.lstm(self.inp(x) + self.embed(ids))[0]))


BUDGET = 2_500_000


def row():
    return nn.Sequential(*[nn.Linear(96, 96) for _ in range(6)])


# ---------------------------------------------------------------------- 204: weights in files


def saved(tmp_path, model):
    files.save(tmp_path / "m.safetensors", files.state(model))
    return tmp_path / "m.safetensors"


def from_file(tmp_path, how, **options):
    """(model whose weights stream from a file, its reference)."""
    model = s.made(row)
    path = saved(tmp_path, model)
    ref = s.aligned_copy(model)
    budget = options.pop("vram_budget", 120_000)
    if how == "load":
        model = stagehand.load(lambda: s.made(row), path, vram_budget=budget, device=s.device(budget), **options)
    else:
        stagehand.layer(model, vram_budget=budget, device=s.device(budget), source=path, **options)
    return model, ref


def by_data(weight, like):
    weight.data += 0.01


def numbers_of(weight):
    """Its memory as numpy writes it; of a reference on a card the tensor."""
    return weight.detach().numpy() if weight.is_cpu else weight.detach()


def by_numpy(weight, like):
    numbers_of(weight)[3:9] += 0.5


def by_one_element(weight, like):
    numbers_of(weight)[50, 41] += 0.5


def in_place(weight, like):
    with torch.no_grad():
        weight.mul_(2)


def by_set_data(weight, like):
    weight.data = weight.data * 1.5


def by_alias(weight, like):
    like.append(weight.data)
    like[-1].add_(0.25)


WAYS = [by_data, by_numpy, by_one_element, in_place, by_set_data, by_alias]


@pytest.mark.parametrize("options", [{"how": "load"}, {"how": "load", "inference_mode": False}, {"how": "source"},
                                     {"how": "load", "ram_budget": 100_000}, {"how": "load", "vram_budget": 400_000}])
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_204_writes_to_weights_in_files_count_from_the_next_pass_on(tmp_path, options, announced, way):
    model, ref = from_file(tmp_path, **options)
    runtime, x = s.runtime(model), torch.randn(3, 96)
    with torch.no_grad():
        assert s.same(model(x), ref(x))
        held = {id(net): [] for net in (model, ref)}
        for again in range(2):
            with runtime.writing() if announced else contextlib.nullcontext():
                way(model[2].weight, held[id(model)])
            way(ref[2].weight, held[id(ref)])
            assert s.same(model(x), ref(x))
            assert s.same(model(x), ref(x))
        for kept, other in zip(held[id(model)], held[id(ref)]):  # an alias that is held stays one
            kept.mul_(3), other.mul_(3)
        with runtime.writing():
            pass
        if way is by_alias:
            assert s.same(model(x), ref(x))
    assert list(runtime.stats["moved_to_ram"]) == ["2"]
    runtime.shutdown()
    assert s.same(model[2].weight.detach(), ref[2].weight.detach())


def test_204_a_written_unit_is_named_with_its_bytes_and_others_stay_in_their_file(tmp_path):
    model, ref = from_file(tmp_path, "load")
    x = torch.randn(3, 96)
    for net in (model, ref):
        net[1].weight.data += 1
        net[4].weight.data += 1
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"1.*was written.*RAM") as said:
        assert s.same(model(x), ref(x))
    assert sum("RAM" in str(w.message) for w in said) == 1
    assert set(s.runtime(model).stats["moved_to_ram"]) == {"1", "4"}
    ways = s.runtime(model).stats["files"]
    assert len(ways) == 1  # the others stream from it


def test_204_a_write_of_the_same_bits_moves_nothing(tmp_path):
    model, ref = from_file(tmp_path, "load")
    x = torch.randn(3, 96)
    with torch.no_grad():
        for _ in range(2):
            model[1].weight.mul_(1)
            model[2].weight.data.mul_(1)
            assert s.same(model(x), ref(x))
    assert s.runtime(model).stats["moved_to_ram"] == {}


@card.on_the_host
def test_204_an_adapter_is_merged_into_a_weight_from_a_file(tmp_path):
    model, ref = from_file(tmp_path, "load")
    x, delta = torch.randn(3, 96), torch.randn(96, 96) * 0.1
    with torch.no_grad():
        model(x)
        for net in (model, ref):
            for layer in net:
                layer.weight.data += delta
        assert s.same(model(x), ref(x))
        for net in (model, ref):
            for layer in net:
                layer.weight.data -= delta
        assert s.same(model(x), ref(x))


def test_204_writes_between_conversion_and_the_first_step_count(tmp_path):
    model = s.made(s.Stack, 4, 64)
    path = saved(tmp_path, model)
    ref = s.aligned_copy(model)
    runtime = stagehand.StagehandRuntime(
        model, stagehand.StagehandConfig(vram_budget=200_000), block_pattern=r"^blocks\.\d+$",
        device=s.device(200_000), inference_mode=True)
    runtime.convert_registry_to_file_backed(path)
    for net in (model, ref):
        net.blocks[1].up.weight.data += 0.1
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert s.same(model(x), ref(x))
        for net in (model, ref):
            net.blocks[2].down.weight.data += 0.1
        assert s.same(model(x), ref(x))
    runtime.shutdown()


def test_204_a_silent_write_that_a_sample_shows_is_an_error_with_inference_mode():
    model = managed(s.made(row), 400_000, inference_mode=True)  # all is resident
    ref, x = s.aligned_copy(model), torch.randn(3, 96)
    with torch.no_grad():
        model(x)
        for net in (model, ref):
            for layer in net:
                layer.weight.data += 0.1
        for _ in range(2):
            with pytest.raises(stagehand.StagehandError, match="0.weight.*writing"):
                model(x)
        with s.runtime(model).writing():
            pass
        assert s.same(model(x), ref(x))


# ---------------------------------------------------------------------- 206: memory that others hold


def vector(net):
    flat = parameters_to_vector(net.parameters()).detach() * 1.1
    vector_to_parameters(flat, net.parameters())
    yield
    flat.mul_(1.1)
    yield
    flat[5000:5003] += 1
    yield
    net.lstm.weight_hh_l0.mul_(1.2)
    yield
    del flat
    yield


def swap(net):
    keep = [p.data for p in net.parameters()]
    average = [p.data * 0.5 + 0.01 for p in net.parameters()]
    for _ in range(2):
        for p, data in zip(net.parameters(), average):
            p.data = data
        yield
        for data in average:
            data.mul_(1.1)
        yield
        for data in keep:
            data.add_(0.01)
        for p, data in zip(net.parameters(), keep):
            p.data = data
        yield


def swap_one_of_a_unit(net):
    weight = net.lstm.weight_hh_l0
    keep = weight.data
    weight.data = keep * 0.5
    yield
    net.lstm.weight_ih_l0.data.mul_(1.5)
    yield
    weight.data = keep
    yield


def array(net):
    numbers = np.full(tuple(net.lstm.weight_hh_l0.shape), 0.01, dtype=np.float32)
    net.lstm.weight_hh_l0.data = torch.from_numpy(numbers)
    yield
    numbers[3] += 0.02
    yield


def crosswise(net):
    lstm = net.lstm
    lstm.bias_ih_l0.data, lstm.bias_hh_l0.data = lstm.bias_hh_l0.data, lstm.bias_ih_l0.data
    yield
    lstm.bias_ih_l0.mul_(2)
    yield
    lstm.bias_hh_l0.data.mul_(3)
    yield


def one_memory(net):
    net.lstm.bias_ih_l0.data = net.lstm.bias_hh_l0.data
    yield
    net.lstm.bias_hh_l0.mul_(2)
    yield


def table(net):
    keep = net.embed.weight.data
    net.embed.weight.data = keep * 2
    yield
    keep.add_(1)
    net.embed.weight.data = keep
    yield
    keep.add_(1)
    yield


@pytest.mark.combinations("each may be the only test of a fault")
@card.on_the_host
@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("edits", [vector, swap, swap_one_of_a_unit, array, crosswise, one_memory, table])
def test_206_a_weight_follows_the_memory_that_it_was_given(edits, inference_mode):
    model = s.made(Mixed)
    ref = s.aligned_copy(model)
    managed(model, BUDGET, inference_mode=inference_mode)
    x = torch.randn(2, 3, 32)
    with torch.no_grad(), s.threads(1):
        for _ in zip(edits(model), edits(ref)):
            for _ in range(2):
                assert s.same(model(x), ref(x))
    s.runtime(model).shutdown()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), ref.named_parameters()):
        assert s.same(mine.detach(), theirs.detach()), name


@card.on_the_host
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_206_training_in_the_memory_of_a_vector(make):
    model = s.made(Mixed, frozen=False)
    ref = s.aligned_copy(model)
    managed(model, BUDGET)
    x, seen = torch.randn(2, 3, 32), []
    with s.threads(1):
        for net in (model, ref):
            optimizer = make(net.parameters(), lr=1e-2)
            flat = parameters_to_vector(net.parameters()).detach() * 1.1
            vector_to_parameters(flat, net.parameters())
            losses = []
            for step in range(3):
                loss = net(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if step == 1:
                    flat.mul_(0.9)
            seen.append([*losses, flat])
    assert s.same(*seen)


def test_206_memory_that_nobody_else_holds_moves_into_the_arena():
    model = managed(s.made(Mixed), BUDGET)
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data.clone()
        model(x)
        model(x)
    assert not s.runtime(model).session.images._apart


# ---------------------------------------------------------------------- 210, 211: first uses

FIRST = """
import sys, contextlib, copy, os, torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
how, kind = HOW, os.environ.get("STH_TEST_DEVICE", "cpu").split(":")[0]
if how == "double":
    torch.set_default_dtype(torch.double)
context = {"inference": torch.inference_mode, "mode": Mode, "no_grad": torch.no_grad,
           "autocast": lambda: torch.autocast(kind, torch.bfloat16)}.get(how, contextlib.nullcontext)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
x = torch.randn(2, 64)
with context():
    import stagehand
    import support
    ref = support.aligned_copy(model)
    stagehand.layer(model, vram_budget="100KB", device=support.card.NAME)
    assert support.same(model(x), ref(x))
model(x).sum().backward()
ref(x).sum().backward()
assert all(support.same(p.grad, q.grad) for p, q in zip(model.parameters(), ref.parameters()))
"""


@pytest.mark.parametrize("how", ["inference", "mode", "no_grad", "autocast", "double"])
def test_210_the_first_use_of_a_process_may_be_under_any_mode(how):
    if how == "inference":  # the reference is a copy made outside
        source = FIRST.replace("    ref = support.aligned_copy(model)\n", "").replace(
            "with context():", "import support\nref = copy.deepcopy(model)\nwith context():", 1)
        source = source.replace("import support\nref = copy.deepcopy(model)", "ref = copy.deepcopy(model)", 1)
    else:
        source = FIRST
    done = children.run_bare(f"HOW = {how!r}\n{source}")
    assert done.status == 0, done.stderr[-2000:]


IMPORTS = """
import importlib, pkgutil, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
seen = []
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))
context = {"inference": torch.inference_mode, "mode": Mode, "meta": lambda: torch.device("meta")}[HOW]
with context():
    import stagehand
    for module in pkgutil.walk_packages(stagehand.__path__, "stagehand."):
        if "__main__" not in module.name and ".integrations." not in module.name:  # their hosts run operators
            importlib.import_module(module.name)
assert not seen, seen
"""


@pytest.mark.parametrize("how", ["inference", "mode", "meta"])
def test_210_every_module_can_be_imported_under_any_mode_and_shows_it_nothing(how):
    done = children.run_bare(f"HOW = {how!r}\n{IMPORTS}")
    assert done.status == 0, done.stderr[-2000:]


@pytest.mark.parametrize("wrapped_inside", [False, True])
def test_211_a_model_made_under_inference_mode_streams_from_a_file(tmp_path, wrapped_inside):
    plain = s.made(row)
    path = saved(tmp_path, plain)
    ref, x = s.aligned_copy(plain), torch.randn(3, 96)
    with torch.inference_mode():
        model = row()
    with torch.inference_mode() if wrapped_inside else contextlib.nullcontext():
        stagehand.layer(model, vram_budget=120_000, device=s.device(120_000), source=path, inference_mode=True)
    with torch.no_grad():
        assert s.same(model(x), ref(x))
    s.runtime(model).shutdown()
    with torch.no_grad():
        assert s.same(model(x), ref(x))


def test_211_what_fails_leaves_a_model_made_under_inference_mode_as_it_was(tmp_path):
    path = saved(tmp_path, s.made(row))
    with torch.inference_mode():
        model = row()
        x = torch.randn(3, 96)
        before, params = model(x), list(model.parameters())
        with warnings.catch_warnings(), pytest.raises(stagehand.StagehandError):
            warnings.simplefilter("ignore")
            stagehand.layer(model, vram_budget=1000, device=s.device(1000), source=path, inference_mode=True)
        assert s.same(model(x), before)
    assert all(a is b for a, b in zip(model.parameters(), params))
