"""Field cases, section H: quantised weights and subclasses of tensors."""

import warnings

import card
import pytest
import support as s
import torch
from pairs import Row, Shrinking, agree, blocks, both, cuda, ends, managed, pair, same_grads, same_weights  # noqa: F401
from torch import nn
from torch.nn import functional as F

import stagehand
from stagehand.session import opening


class Packed(nn.Parameter):
    """int8 bytes with a state beside them. `.to()` quantises what is not quantised yet, as such classes do."""

    def __new__(cls, data, state=None, moves=None):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state, self.moves = state, [] if moves is None else moves
        return self

    def to(self, *args, **kwargs):
        self.moves.append(args)
        if self.quant_state is None:
            scale = self.detach().abs().max() / 127
            data = (self.detach() / scale).round().to(torch.int8)
            return Packed(data.to(*args, **kwargs), scale.to(*args, **kwargs), self.moves)
        return Packed(torch.Tensor.to(self.detach(), *args, **kwargs), self.quant_state.to(*args, **kwargs), self.moves)

    def cpu(self):
        return self.to("cpu")

    @property
    def device(self):
        return torch.Tensor.detach(self).device


class PackedLinear(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.weight = Packed(torch.randn(d, d)).to("cpu")
        self.other = nn.Linear(d, d)

    def forward(self, x):
        state = self.weight.quant_state
        assert state.device == self.weight.device == x.device, "the state is where the weight is"
        return F.linear(torch.tanh(self.other(x)), self.weight.float() * state)


class PackedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PackedLinear() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@card.on_the_host
def test_51_twenty_round_trips_of_a_weight_that_quantises_itself():
    model = s.made(PackedNet)
    before = [(block.weight, block.weight.clone(), block.weight.quant_state) for block in model.blocks]
    x = torch.randn(2, 48)
    with torch.no_grad():
        want = model(x)
        for _ in range(20):
            managed(model, 2 * s.nbytes(model), 1e9)
            assert all(f"blocks.{i}.weight" in s.runtime(model).report for i in range(4))
            assert torch.allclose(model(x), want)
            s.runtime(model).shutdown()
    for block, (weight, values, state) in zip(model.blocks, before):
        assert block.weight is weight and torch.equal(weight, values) and weight.quant_state is state


def test_51_what_belongs_to_a_weight_goes_along_when_it_is_moved():
    """On a card the session moves such a weight by its own .to(), and the Parameter object stays."""
    weight = Packed(torch.randn(4, 4)).to("cpu")
    moved = weight.to("cpu")
    moved.quant_state = weight.quant_state.clone()
    bytes_before = weight.clone()
    opening._Data(weight)(moved)
    assert weight.quant_state is moved.quant_state and torch.equal(weight, bytes_before)


@cuda
@pytest.mark.alone
def test_51_on_a_card():
    model = s.made(PackedNet)
    before = [block.weight.detach().clone() for block in model.blocks]
    x = torch.randn(2, 48)
    with torch.no_grad():
        want = model(x)
        for _ in range(20):
            stagehand.layer(model, vram_budget=2 * s.nbytes(model))
            assert torch.allclose(model(x).cpu(), want, atol=1e-4)
            s.runtime(model).shutdown()
    for block, values in zip(model.blocks, before):
        assert torch.equal(block.weight.detach().cpu(), values)


class Loaded(nn.Linear):
    """A method that a loader calls after the weights are there: it exchanges the weight for a packed form."""

    def process_after_loading(self):
        packed = self.weight.detach().t().contiguous()
        weight = nn.Parameter(packed.view(-1, 2, packed.shape[1]), requires_grad=False)
        weight.__dict__.update(self.weight.__dict__)
        self.weight = weight
        self.packed = True

    def forward(self, x):
        if getattr(self, "packed", False):
            return x @ self.weight.flatten(0, 1) + self.bias
        return super().forward(x)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_53_attributes_and_what_is_done_after_loading(inference_mode):
    def loader():
        pass

    model = s.made(lambda: nn.Sequential(*(Loaded(48, 48) for _ in range(6))))
    for layer in model:
        layer.weight.input_dim, layer.weight.loader = 1, loader
    ref = s.aligned_copy(model)
    managed(model, 6 * s.nbytes(model[0]) + 4096, inference_mode=inference_mode)  # three of other shapes stay there
    for net in (model, ref):
        for layer in list(net)[::2]:
            layer.process_after_loading()
    agree(model, ref, 3, inputs=(torch.randn(2, 48),))
    seen = []
    handle = model[1].register_forward_hook(lambda m, a, o: seen.append((m.weight.input_dim, m.weight.loader)))
    agree(model, ref, 1, inputs=(torch.randn(2, 48),))
    handle.remove()
    assert seen == [(1, loader)]
    s.runtime(model).shutdown()
    assert all(layer.weight.input_dim == 1 and layer.weight.loader is loader for layer in model)
    same_weights(model, ref)


# ---------------------------------------------------------------------- own


class Noting(nn.Linear):
    """Gives its weight attributes while it runs: a count, a cache of its own, and a view of the weight."""

    def forward(self, x):
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        if not hasattr(self.weight, "table"):
            self.weight.table = self.weight.detach().abs().amax(1)
        self.weight.turned = self.weight.t()
        return x @ self.weight.turned / self.weight.table + self.bias


@pytest.mark.parametrize("frozen", [True, False])
def test_own_attributes_that_a_forward_gives_to_its_weight(frozen):
    """They are the master's; a view of the weight is not kept, for it would keep the place and miss later writes."""
    budget = (lambda m: 2 * s.nbytes(m[0]) + 4096) if frozen else s.nbytes
    model, ref = pair(lambda: nn.Sequential(*(Noting(48, 48) for _ in range(6))), frozen=frozen, budget=budget)
    for turn in range(3):
        with torch.set_grad_enabled(not frozen):
            x = torch.randn(2, 48)
            got, want = both(model, ref, lambda net: net(x))
            assert s.same(got, want)
        with torch.no_grad():
            for net in (model, ref):
                for layer in net:
                    layer.weight.mul_(1.5)
    for mine, theirs in zip(model, ref):
        assert mine.weight.calls == theirs.weight.calls == 3 and s.same(mine.weight.table, theirs.weight.table)
        assert set(mine.weight.__dict__) == {"calls", "table"}
    del got
    assert s.runtime(model).stats["leased_bytes"] == 0


@pytest.mark.parametrize("encoding", ["int8", "fp8", "int4"])
def test_own_a_weight_that_is_written_with_what_it_holds_does_not_drift(encoding):
    """A forward that writes its weight sees decoded values; encoding them again must give the same ones, or each pass
    would be a little further off."""
    class Same(Shrinking):
        factor = 1.0

    model = s.made(lambda: Row([Same(128, 128) for _ in range(6)], 2, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        managed(model, 3 * s.nbytes(model.blocks[0]) + 4096, transfer=encoding)
    x = torch.randn(2, 128)
    with torch.no_grad():
        outs = [model(x) for _ in range(6)]
    assert s.runtime(model).quantised["error"], "something crosses in few bits"
    for out in outs[1:]:
        assert torch.allclose(out, outs[0], atol=2e-3), (out - outs[0]).abs().max()


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_own_a_forward_that_writes_a_weight_which_crosses_in_few_bits(encoding):
    """The write reaches the master and the encoded bytes: the next use must not see what was encoded before."""
    class Halving(Shrinking):
        factor = 0.5

    class Net(nn.Module):
        def __init__(self, d=128):
            super().__init__()
            self.blocks = nn.ModuleList(Halving(d, d, bias=False) for _ in range(6))

        def forward(self, x):
            return [block(x) for block in self.blocks]

    model = s.made(Net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        managed(model, 3 * s.nbytes(model.blocks[0]) + 4096, transfer=encoding)
    x = torch.randn(2, 128)
    with torch.no_grad():
        before = model(x)
        for _ in range(4):
            after = model(x)
            for a, b in zip(before, after):
                assert torch.allclose(b, a / 2, atol=float(a.abs().max()) / 50), "halved once in a pass"
            before = after


class Doubled(torch.Tensor):
    """A wrapper subclass, as quantisation libraries have: another tensor inside, and operators of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return "Doubled()"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].inner)
        plain = torch.utils._pytree.tree_map_only(Doubled, lambda t: t.inner * 2, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


@card.on_the_host
def test_own_a_wrapper_subclass_stays_by_name_and_all_else_streams():
    def build():
        net = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
        net[2].weight = nn.Parameter(Doubled(torch.randn(48, 48) / 9), requires_grad=False)
        return net

    model, ref = s.made(build), s.made(build)
    managed(model, 40_000, 3e8)
    assert "Doubled" in s.runtime(model).report["2.weight"]
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 48)
            assert torch.allclose(model(x), ref(x), atol=1e-5)
    assert s.runtime(model).stats["copies"] > 5 and type(model[2].weight.data) is Doubled


class OnlyLinear(torch.Tensor):
    """Linear takes it, and it refuses all else that is asked of it, attributes too: so are ExpandedWeights."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear:
            raise RuntimeError(f"not for {func}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Ending(Row):
    """Its output is of that class."""

    def forward(self, x):
        return super().forward(x).as_subclass(OnlyLinear)


def _in_place_of_a_weight(net, weight, x):
    return torch.func.functional_call(net, {"blocks.1.weight": torch.Tensor._make_subclass(OnlyLinear, weight)}, (x,))


def _put_there(net, weight, x):
    layer = net.blocks[1]
    before = layer._parameters["weight"]
    layer._parameters["weight"] = torch.Tensor._make_subclass(OnlyLinear, weight)
    out = net(x)
    layer._parameters["weight"] = before
    return out + net(x)


def _as_input(net, weight, x):
    return net(torch.Tensor._make_subclass(OnlyLinear, x))


@card.on_the_host
@pytest.mark.parametrize("use", [_in_place_of_a_weight, _put_there, _as_input])
@pytest.mark.parametrize("mode", ["layers", "blocks", "blocks that have not opened"])
def test_own_a_tensor_of_a_class_that_refuses_to_be_asked_is_used_as_it_is(use, mode):
    """Nothing of stagehand's asks it through its class, which would see that, and here refuse it."""
    if mode == "layers":
        model, ref = pair(Row, [nn.Linear(48, 48) for _ in range(6)], 2, 48)
    else:
        model = s.made(Row, [nn.Linear(48, 48) for _ in range(6)], 2, 48, frozen=False)
        ref = s.aligned_copy(model)
        runtime = blocks(model)
        if mode == "blocks":
            runtime.prepare()
    weight, x = torch.randn(48, 48), torch.randn(2, 48)
    for _ in range(3):
        got, want = (use(net, weight, x) for net in (model, ref))
        assert s.same(got, want)
    same_weights(model, ref)


@card.on_the_host
def test_own_an_output_of_a_class_that_refuses_to_be_asked_trains():
    model, ref = pair(Ending, [nn.Linear(48, 48) for _ in range(6)], 2, 48)
    x = torch.randn(2, 48)
    for _ in range(3):
        for net in (model, ref):
            out = net(x)
            with torch._C.DisableTorchFunctionSubclass():
                out.sum().backward()
    assert model.blocks[0].weight.grad is not None
    same_grads(model, ref)


@card.on_the_host
def test_own_gradients_of_each_sample_by_expanded_weights():
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    model, ref = pair(Row, [nn.Linear(48, 48) for _ in range(6)], 4, 48)
    x = torch.randn(4, 48)
    for _ in range(2):
        for net in (model, ref):
            call_for_per_sample_grads(net, batch_size=4, loss_reduction="sum")(x).sum().backward()
        for mine, theirs in zip(model.parameters(), ref.parameters()):
            assert s.same(mine.grad_sample, theirs.grad_sample)
            mine.grad_sample = theirs.grad_sample = None
