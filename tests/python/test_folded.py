"""Lossless transfer at rest: host memory holds the packed bytes of a weight and no others, and the weight reads and
writes as any Parameter does."""

import copy
import gc
import io
import pickle
import threading

import card
import children
import numpy as np
import pytest
import stagehand
import torch
from support import aligned_copy, nbytes, same
from test_lossless import agree, budget_of, forward, noise, odd_values, wide, wrapped
from torch import nn

SIM = {"device": "sim"}
# test_lossless.py runs packed weights on a card.
pytestmark = pytest.mark.skipif(card.ON_CARD, reason="reads and writes beside a twin on the host")


def folded(model) -> set:
    """Names of weights that have no memory."""
    return {entry.name for unit in stagehand.runtime(model).session.units if unit.folded for entry in unit.entries}


def at_rest(model, x):
    """After passes, and once nothing is compared any more: names of weights of which RAM has the packed bytes alone."""
    images = stagehand.runtime(model).session.images
    for _ in range(3):
        forward(model, x)
        gc.collect()
        images._fold_again(wait=True)
    return {entry.name for unit in stagehand.runtime(model).session.units if unit.folded and unit.arena is None
            for entry in unit.entries}


def opened(dtype=torch.bfloat16, **kwargs):
    """(model, plain copy, runtime, input, a packed weight and the same one of the copy)."""
    model = wide(dtype=dtype)
    odd_values(model.blocks[1].up.weight)
    weight, plain = model.blocks[2].up.weight, aligned_copy(model)
    runtime = wrapped(model, **SIM, **kwargs)
    assert model.blocks[2].up.weight is weight and isinstance(weight, nn.Parameter)
    assert "blocks.2.up.weight" in folded(model)
    return model, plain, runtime, torch.randn(4, 96).to(dtype), weight, plain.blocks[2].up.weight


def saved(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stored(weight):
    from safetensors.torch import load, save

    return load(save({"w": weight}))["w"]


READS = {
    "an operator": lambda w: w * 1,
    "in place of an operand": lambda w: torch.zeros_like(w).add_(w),
    "clone": torch.clone,
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "a view": lambda w: w.view(-1).view(w.shape),
    "a transposed view": lambda w: w.t().t(),
    "a function's view": lambda w: torch.transpose(w, 0, 1).transpose(0, 1),
    "rows": lambda w: torch.stack([w[i] for i in range(len(w))]),
    "a loop": lambda w: torch.stack(list(w)),
    "split": lambda w: torch.cat(w.split(10)),
    "numpy": lambda w: torch.from_numpy(w.float().numpy()).to(w.dtype),
    "a list": lambda w: torch.tensor(w.tolist(), dtype=w.dtype),
    "dlpack": lambda w: torch.utils.dlpack.from_dlpack(w),
    "a list of tensors": lambda w: torch._foreach_add([w, w], 0)[1],
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": saved,
    "safetensors": stored,
    "a storage": lambda w: torch.empty(0, dtype=w.dtype).set_(w.untyped_storage(), 0, w.shape),
    "to": lambda w: w.to(torch.float64).to(w.dtype),
    "inference mode": torch.inference_mode()(lambda w: w * 1),
    "vmap": lambda w: torch.vmap(lambda row: row * 1)(w),
    "func.grad": lambda w: w + torch.func.grad(lambda v: (v * 0).sum())(w),
    "memory": lambda w: torch.frombuffer(
        (__import__("ctypes").c_ubyte * w.nbytes).from_address(w.data_ptr()), dtype=w.dtype).view(w.shape).clone(),
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whoever_reads_a_weight_sees_its_values(dtype, how):
    model, plain, runtime, x, weight, other = opened(dtype)
    for _ in range(2):
        got = READS[how](weight)
        assert got.shape == other.shape and got.dtype == dtype
        agree(model, [plain], x, times=1)
        assert same(got, other)
    del got
    assert at_rest(model, x) == set(runtime.quantised["error"])
    runtime.shutdown()
    assert type(weight) is nn.Parameter and same(weight, other)


WRITES = {
    "add_": lambda w: w.add_(0.25),
    "add_ to its data": lambda w: w.data.add_(0.25),
    "copy_": lambda w: w.copy_(w.clone() * 3),
    "copy_ of noise": lambda w: w.copy_(noise(w)),
    "an element": lambda w: w.__setitem__((3, 4), 7.0),
    "an element of a view": lambda w: w.t()[5].__setitem__(2, 9.0),
    "a function's view": lambda w: torch.transpose(w, 0, 1).mul_(0.5),
    "an element by index": lambda w: w.index_fill_(0, torch.tensor([2]), 0.5),
    "new data": lambda w: setattr(w, "data", w.detach() * 2),
    "a list of tensors": lambda w: torch._foreach_mul_([w], 0.5),
    "out": lambda w: torch.mul(w.clone(), 2, out=w),
    "an initialiser": lambda w: nn.init.constant_(w, 0.03),
    "a vector": lambda w: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([w]) * 0.5, [w]),
    "fused": lambda w: setattr(w, "data", w.data + 0.01 * torch.ones(288, 1).to(w.dtype) @ w.data[:1]),
}


@pytest.mark.parametrize("how", WRITES)
def test_whatever_is_written_is_used_next_and_kept(how):
    model, plain, runtime, x, weight, other = opened()
    agree(model, [plain], x, times=2)
    for _ in range(2):
        with torch.no_grad():
            torch.manual_seed(3)
            WRITES[how](weight)
            torch.manual_seed(3)
            WRITES[how](other)
        assert same(weight, other)
        agree(model, [plain], x, times=2)
    at_rest(model, x)
    assert "blocks.2.up.weight" in folded(model) and same(weight, other)
    agree(model, [plain], x, times=1)
    runtime.shutdown()
    assert same(weight, other)


def test_writes_count_in_the_version_and_go_on_counting():
    model, _, runtime, x, weight, _ = opened()
    seen = [weight._version]
    with torch.no_grad():
        for _ in range(2):
            weight.mul_(1)
            weight.view(-1)[:2].zero_()
            seen.append(weight._version)
            at_rest(model, x)
            seen.append(weight._version)
    assert seen == sorted(seen) and seen[1] >= seen[0] + 2 and seen[2] == seen[1] and seen[3] >= seen[2] + 2
    runtime.shutdown()


@pytest.mark.parametrize("how", ["data", "a view", "numpy", "numpy of later", "state_dict"])
def test_who_holds_its_memory_goes_on_reading_and_writing_it(how):
    model, plain, runtime, x, weight, other = opened(torch.float32)
    if how == "numpy of later":
        weight.data  # noqa: B018 - it has memory from here on
    take = {"data": lambda w: w.data, "a view": lambda w: w[:8], "numpy": lambda w: torch.from_numpy(w.numpy()),
            "numpy of later": lambda w: torch.from_numpy(w.numpy()),
            "state_dict": lambda w: (model if w is weight else plain).state_dict()["blocks.2.up.weight"]}[how]
    held, want = take(weight), take(other)
    for i in range(3):
        assert "blocks.2.up.weight" not in at_rest(model, x)
        held.mul_(0.5 + i), want.mul_(0.5 + i)
        assert same(held, want) and same(weight, other)
        agree(model, [plain], x, times=1)
    del held, want
    at_rest(model, x)
    assert "blocks.2.up.weight" in folded(model) and same(weight, other)
    runtime.shutdown()


def test_copies_of_the_model_are_plain_and_leave_it_as_it_is():
    model, plain, runtime, x, _, _ = opened()
    want = copy.deepcopy(plain.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not folded(model) ^ set(runtime.quantised["error"])
        assert all(type(param) is nn.Parameter for param in other.parameters())
        assert all(same(value, want[name]) for name, value in other.state_dict().items())
    assert all(same(value, want[name]) for name, value in model.state_dict().items())
    assert at_rest(model, x) == set(runtime.quantised["error"])
    runtime.shutdown()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all(same(value, want[name]) for name, value in model.state_dict().items())
    assert same(forward(model, x), forward(plain, x))


def test_loading_a_state_dict():
    model, plain, runtime, x, _, _ = opened()
    state = {name: value * -0.75 for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)
    agree(model, [plain], x)
    assert at_rest(model, x) == set(runtime.quantised["error"])
    assert all(same(value, state[name]) for name, value in model.state_dict().items())
    runtime.shutdown()


def test_weights_that_outlive_their_model():
    model, plain, runtime, _, weight, other = opened()
    view = model.blocks[3].up.weight[1]
    want = plain.blocks[3].up.weight[1]
    runtime.shutdown()
    del model, runtime
    gc.collect()
    assert same(weight, other) and same(view, want)
    model, plain, runtime, _, weight, other = opened()
    del model, runtime  # which nobody has shut down
    gc.collect()
    assert same(weight * 1, other) and same(weight.data, other)


def test_gradients_of_a_model_that_is_not_frozen_and_only_runs():
    model = wide(dtype=torch.float32, frozen=False)
    plain, x = aligned_copy(model), torch.randn(4, 96)
    runtime = wrapped(model, inference_mode=True, **SIM)
    weight, other = model.blocks[2].up.weight, plain.blocks[2].up.weight
    assert weight.requires_grad and "blocks.2.up.weight" in folded(model)
    agree(model, [plain], x)
    assert "blocks.2.up.weight" in folded(model)
    for param in (weight, other):
        (param.square().sum() * 2).backward()
        torch.optim.SGD([param], lr=0.1).step()
    assert same(weight.grad, other.grad) and same(weight, other)
    runtime.synchronize()
    agree(model, [plain], x)
    runtime.shutdown()


def test_a_graph_of_before_sees_the_values_of_before():
    """Made by an operator that reads a weight which has no memory; its backward comes when it has."""
    model, plain, runtime, _, weight, other = opened(torch.float32)
    grads = []
    for param in (weight, other):
        x = torch.ones(2, 96, requires_grad=True)
        loss = torch.mul(x[:1], param).sum()
        param.data  # noqa: B018
        loss.backward()
        grads.append(x.grad)
    assert same(*grads)
    runtime.shutdown()


def test_several_threads_read_and_run():
    model, plain, runtime, x, _, _ = opened()
    want, failed, end = forward(plain, x), [], threading.Event()
    params = [(name, param, other) for (name, param), other in zip(model.named_parameters(), plain.parameters())
              if name in runtime.quantised["error"]]

    def read(how):
        while not end.is_set():
            for name, param, other in params:
                if not same(how(param), how(other)):
                    failed.append((name, how))

    threads = [threading.Thread(target=read, args=(how,)) for how in (lambda w: w * 1, lambda w: w.data.clone())]
    for thread in threads:
        thread.start()
    for _ in range(20):
        if not same(forward(model, x), want):
            failed.append("forward")
    end.set()
    for thread in threads:
        thread.join()
    assert not failed
    runtime.shutdown()


def test_blocks_of_several_weights():
    model = wide(8, 128)
    plain, x = aligned_copy(model), torch.randn(4, 128).bfloat16()
    config = stagehand.StagehandConfig(vram_budget=budget_of(model), transfer="lossless")
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", device="sim",
                                         inference_mode=True)
    runtime.begin_step()
    runtime.end_step()
    names = folded(model)
    assert {"blocks.3.up.weight", "blocks.3.down.weight"} <= names
    for name, param in model.named_parameters():
        assert same(param * 1, plain.get_parameter(name))
    assert folded(model) == names
    with runtime.writing():
        model.blocks[3].down.weight.data.mul_(2)
        plain.blocks[3].down.weight.data.mul_(2)
    for _ in range(3):
        runtime.begin_step()
        assert same(forward(model, x), forward(plain, x))
        runtime.end_step()
    runtime.shutdown()
    assert all(same(param, plain.get_parameter(name)) for name, param in model.named_parameters())


MEASURE = """
import gc, re, stagehand, torch
def ram(key):
    with open("/proc/self/status") as file:
        return int(re.search(key + r":\\s*(\\d+) kB", file.read())[1]) << 10
from test_lossless import wide
gc.collect()
base = ram("RssAnon")
model = wide({n}, {d})
weights = sum(p.nbytes for p in model.parameters())
before = ram("RssAnon")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins anew
other = ram("VmRSS") - before
stagehand.layer(model, vram_budget={budget}, transfer="lossless", device="sim")
peak = ram("VmHWM") - other - base
x = torch.randn(4, {d}).bfloat16()
with torch.no_grad():
    for _ in range(3):
        model(x)
gc.collect()
device = stagehand.runtime(model).stats["device_peak"]  # which is host memory, too
print(weights, ram("RssAnon") - base - device, peak, device)
"""


def test_ram_holds_three_quarters_of_the_weights():
    children.run(MEASURE.format(n=2, d=96, budget=1 << 20))  # code that is loaded once
    done = children.run(MEASURE.format(n=24, d=1024, budget=24 << 20))
    assert done.status == 0, done.stderr
    weights, now, peak, device = map(int, done.stdout.split())
    assert weights > 100 << 20
    slack = 12 << 20  # of the interpreter, and blocks that glibc keeps
    assert now <= 0.75 * weights + slack, f"{now / weights:.3f} of the weights"
    assert peak <= 1.05 * weights + device + slack, f"{peak / weights:.3f} of the weights"


def test_shared_memory_and_tied_weights():
    model = wide()
    model.blocks[3].up.weight = model.blocks[2].up.weight  # one object
    model.blocks[4].up.weight = nn.Parameter(model.blocks[1].up.weight.data, requires_grad=False)  # one memory
    plain, x = aligned_copy(model), torch.randn(4, 96).bfloat16()
    runtime = wrapped(model, **SIM)
    one, two = model.blocks[1].up.weight, model.blocks[4].up.weight
    assert {type(one).__name__, type(two).__name__} == {"Folded"}
    agree(model, [plain], x)
    with torch.no_grad():
        two.mul_(0.5)
        plain.blocks[4].up.weight.mul_(0.5)
    assert same(one, two) and one.data_ptr() == two.data_ptr()
    agree(model, [plain], x)
    runtime.shutdown()
    assert model.blocks[3].up.weight is model.blocks[2].up.weight and same(one, two)


def test_arrays_of_weights_that_take_gradients_are_refused_as_ever():
    model = wide(dtype=torch.float32, frozen=False)
    runtime = wrapped(model, inference_mode=True, **SIM)
    weight = model.blocks[2].up.weight
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    assert isinstance(weight.detach().numpy(), np.ndarray)
    runtime.shutdown()


def test_memory_of_the_weights_is_said():
    model, _, runtime, x, weight, _ = opened()
    assert at_rest(model, x) and nbytes(model) > runtime.quantised["host_bytes"]
    runtime.shutdown()
