"""Field cases, section I: adapters, merges and other edits."""

import re

import card
import pytest
import support as s
import torch
from file_support import save
from file_support import state as saved_state
from pairs import ShrinkingData, agree, both, ends, managed, pair, same_grads, same_weights, within  # noqa: F401
from torch import nn
from torch.nn import functional as F

import stagehand

LINK = 1e8  # bytes/s


class Wide(s.Stack):
    def widen(self, extra):
        """Gives the input layer more inputs: zeros for what is new."""
        if self.inp.in_features == self.inp.out_features:
            old = self.inp
            self.inp = nn.Linear(old.in_features + extra, old.out_features)
            with torch.no_grad():
                self.inp.weight.zero_()
                self.inp.weight[:, : old.in_features] = old.weight
                self.inp.bias.copy_(old.bias)
            self.inp.requires_grad_(False)


def test_55_a_layer_that_becomes_wider_after_wrapping():
    model, ref = pair(Wide, 6, 40, frozen=True, link=LINK)
    agree(model, ref, 2)
    for net in (model, ref):
        net.widen(4), net.widen(4)
    for _ in range(2):
        agree(model, ref, 5, inputs=(torch.randn(2, 44),))
    with torch.no_grad():
        for net in (model, ref):
            net.inp.weight.mul_(1.5)
    agree(model, ref, 2, inputs=(torch.randn(2, 44),))
    assert model.inp.weight.shape == (40, 44)
    s.runtime(model).shutdown()
    same_weights(model, ref)


def test_55_a_weight_that_is_exchanged_for_a_wider_one_in_place():
    """The module stays, its Parameter does not; and back to one of the old shape, which streams again."""
    model, ref = pair(s.Stack, 6, 40, frozen=True, link=LINK)
    agree(model, ref, 2)
    old = torch.randn(40, 40)
    for columns in (44, 44, 40):
        for net in (model, ref):
            weight = F.pad(old, (0, columns - 40)) if columns > 40 else old.clone()
            net.inp.weight = nn.Parameter(weight, requires_grad=False)
        agree(model, ref, 3, inputs=(torch.randn(2, columns),))
    before = s.runtime(model).stats["copies"]
    agree(model, ref, 3)
    assert s.runtime(model).stats["copies"] > before


def private_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"Private_Dirty:\s*(\d+) kB", file.read())[1]) << 10


def test_57_weights_of_a_file_that_are_added_to(tmp_path):
    """Where they stream from is the file, so the next use refuses by name; a private copy of the changed pages is all
    that is taken until then, and after shutdown the values are those that were written."""
    model = s.made(s.Stack, 12, 192)
    ref = s.aligned_copy(model)
    save(tmp_path / "w.safetensors", saved_state(model))
    managed(model, s.tight_budget(model), source=tmp_path / "w.safetensors")
    agree(model, ref, 1, guard=False)
    changed = sum(p.nbytes for p in model.parameters())
    assert changed > 10 << 20
    before = private_bytes()
    with torch.no_grad():
        for net in (model, ref):
            for param in net.parameters():
                param.add_(0.01)
    assert private_bytes() - before < 1.3 * changed + (4 << 20)
    with pytest.warns(RuntimeWarning, match="inp.*was written.*RAM"):
        agree(model, ref, 2, guard=False)
    s.runtime(model).shutdown()
    same_weights(model, ref)


WAYS = {
    "mul_": lambda p: p.mul_(0.5), "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape)),
    "zero_": lambda p: p.zero_(), "data.add_": lambda p: p.data.add_(0.25), "index": lambda p: p.__setitem__(0, 0.5),
    "init": lambda p: nn.init.constant_(p, 0.02), "data =": lambda p: setattr(p, "data", p.data * 0.9),
}


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("way", WAYS)
def test_59_weights_written_between_passes(way, mode):
    """test_weights.py has these of frozen and trained weights; here a pass with gradients comes between, and models
    that promised to say so (inference_mode=True) write what leaves a version without saying so."""
    model, ref = pair(s.Stack, 5, 40, frozen=mode == "inference", link=LINK,
                      options={"inference_mode": mode == "inference"})
    own = s.runtime(model)
    for turn in range(3):
        if mode == "training":
            x = model.example()[0]
            for net in (model, ref):
                net(x).pow(2).sum().backward()
            same_grads(model, ref)
        agree(model, ref, 1)
        with torch.no_grad():
            silent = mode == "inference" and way == "data.add_"  # leaves no version: this is what was promised
            for net in (model, ref):
                for block in (net.blocks[turn], net.blocks[(turn + 2) % 5]):
                    if silent and net is model:
                        with own.writing():
                            WAYS[way](block.up.weight)
                    else:
                        WAYS[way](block.up.weight)
        agree(model, ref, 2)
    same_weights(model, ref)


# ---------------------------------------------------------------------- own: a forward that writes


class NewData(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data * 0.9
        return super().forward(x)


class Between(nn.Linear):
    """Writes between two uses."""

    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return y + super().forward(x)


class Column(nn.Linear):
    """Writes a part, through a view of a view."""

    def forward(self, x):
        self.weight.data.t()[3:5].add_(0.1)
        return super().forward(x)


def row_of(kind, n=6, d=48):
    def build():
        net = nn.Sequential(*(kind(d, d) for _ in range(n)))
        net.example = lambda: (torch.randn(2, d),)
        return net

    return build


def roomy(model):
    return 3 * s.nbytes(model[0]) + 4096


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", [ShrinkingData, NewData, Between, Column])
def test_own_what_a_forward_writes_into_its_own_weight_in_any_way(kind, frozen):
    model, ref = pair(row_of(kind), frozen=frozen, budget=roomy, link=LINK)
    agree(model, ref, 3)
    same_weights(model, ref)
    x = model.example()[0]
    results = both(model, ref, lambda net: net(x))
    assert s.same(*[out.detach() for out in results])
    same_weights(model, ref)
    del results
    agree(model, ref, 2)


@pytest.mark.parametrize("kind", [ShrinkingData, NewData])
def test_own_layers_that_write_through_data_train(kind):
    """Only the first layer writes: where a later one did, PyTorch would use the new values for a gradient of the
    old."""
    def build():
        net = row_of(nn.Linear)()
        net[0] = kind(48, 48)
        return net

    model, ref = pair(build, budget=roomy, link=LINK)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (model, ref)]
    for _ in range(4):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()
        same_grads(model, ref)
        same_weights(model, ref)


class Often(nn.Module):
    """Layers that write themselves, each several times in a pass and in a mixed order."""

    def __init__(self, d=48):
        super().__init__()
        self.blocks = nn.ModuleList(ShrinkingData(d, d) for _ in range(6))

    def forward(self, x):
        for i in (0, 1, 2, 3, 4, 5, 0, 3, 0, 1, 5, 5, 2, 4, 2, 1, 1, 0):
            x = torch.tanh(self.blocks[i](x))
        return x

    def example(self):
        return (torch.randn(2, 48),)


@card.on_the_host
@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("room", [1, 3])
def test_own_what_was_read_ahead_of_a_write_is_read_again(room, inference_mode):
    """Where memory cannot be pinned, bytes of the next use are in a slab already when a forward writes its weight."""
    model = s.made(Often)
    ref = s.aligned_copy(model)
    budget = room * s.nbytes(model.blocks[0]) + 2048
    device = s.device(budget, LINK, pin_limit_bytes=1)
    with pytest.warns(RuntimeWarning, match="could not be pinned"):
        stagehand.layer(model, vram_budget=budget, device=device, inference_mode=inference_mode)
    agree(model, ref, 5)
    same_weights(model, ref)
    s.runtime(model).shutdown()


def test_own_a_forward_that_gives_its_weight_another_shape_is_refused_and_nothing_is_lost():
    class Shorter(nn.Linear):
        broken = False

        def forward(self, x):
            out = super().forward(x)
            if Shorter.broken:
                self.weight.data = self.weight.data[:7]
            return out

    model, ref = pair(row_of(Shorter), frozen=True, budget=roomy)
    agree(model, ref, 2)
    Shorter.broken = True
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match=r"0\.weight data of another shape.*\(7, 48\)"):
        model(*model.example())
    Shorter.broken = False
    agree(model, ref, 3)
    same_weights(model, ref)


# ---------------------------------------------------------------------- own: others that write


class Codebook(nn.Module):
    """Moves the table of a child, as vector quantisers do with their codebooks."""

    def __init__(self, d=48):
        super().__init__()
        self.table = nn.Linear(d, d)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(5))
        self.writing, self.moves = None, True

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.table(x)
        if self.moves:
            if self.writing is None:
                self.table.weight.data.mul_(0.9).add_(x.detach().mean() / 100)
            else:
                with self.writing():
                    self.table.weight.data.mul_(0.9).add_(x.detach().mean() / 100)
        return self.table(x)

    def example(self):
        return (torch.randn(3, 48),)


@card.on_the_host
@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("room", ["tight", "all"])
def test_own_a_childs_weight_is_written_inside_writing_during_the_pass(room, inference_mode):
    model, ref = pair(Codebook, frozen=True, link=LINK, options={"inference_mode": inference_mode},
                      budget=lambda m: 3 * s.nbytes(m.table) if room == "tight" else 2 * s.nbytes(m))
    model.writing = s.runtime(model).writing
    agree(model, ref, 4, guard=False)
    same_weights(model, ref)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("room", ["tight", "all"])
def test_own_a_refused_write_does_not_stay_on_the_device(room, fails):
    """Without writing() it is an error that names the weight. The layer goes on with its own values, also where it
    stays on the device for good, and also where the pass ended by another error."""
    model, ref = pair(Codebook, frozen=True, link=LINK,
                      budget=lambda m: 4 * s.nbytes(m.table) if room == "tight" else 2 * s.nbytes(m))
    ref.moves = model.moves = False
    agree(model, ref, 2)
    model.moves = True
    if fails:
        handle = model.table.register_forward_hook(lambda m, a, o: 1 / 0)
        model.blocks[1].register_forward_hook(lambda m, a, o: (model.table.weight.data.mul_(3), o)[1])
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            model(*model.example())
        handle.remove()
        model.blocks[1]._forward_hooks.clear()
    else:
        with torch.no_grad(), pytest.raises(stagehand.StagehandError, match="table.weight was written during a pass"):
            model(*model.example())
    model.moves = False
    agree(model, ref, 3)
    same_weights(model, ref)


def test_own_a_weight_of_a_file_that_its_forward_writes_keeps_the_files_values(tmp_path):
    class Writes(nn.Linear):
        now = False

        def forward(self, x):
            if Writes.now:
                self.weight.data.mul_(2)
            return super().forward(x)

    model = s.made(row_of(Writes))
    ref = s.aligned_copy(model)
    save(tmp_path / "w.safetensors", saved_state(model))
    managed(model, 2 * s.nbytes(model), source=tmp_path / "w.safetensors")
    agree(model, ref, 1, guard=False)
    Writes.now = True
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match="writes 0.weight.*file"):
        model(*model.example())
    Writes.now = False
    agree(model, ref, 3, guard=False)
    same_weights(model, ref)


# ---------------------------------------------------------------------- own: the structure changes


CHANGES = {
    "update": lambda layer, p: layer._parameters.update(weight=p),
    "ior": lambda layer, p: layer._parameters.__ior__({"weight": p}),
    "setdefault": lambda layer, p: (layer._parameters.pop("weight"), layer._parameters.setdefault("weight", p)),
    "item": lambda layer, p: layer._parameters.__setitem__("weight", p),
    "popitem": lambda layer, p: (layer._parameters.popitem(), layer._parameters.popitem(),
                                 layer.register_parameter("weight", p), layer.register_parameter("bias", None)),
    "clear": lambda layer, p: (layer._parameters.clear(), setattr(layer, "weight", p), setattr(layer, "bias", None)),
    "swap": lambda layer, p: torch.utils.swap_tensors(layer.weight, p),
    "attribute": lambda layer, p: (delattr(layer, "weight"), setattr(layer, "weight", p.detach())),
}


@card.on_the_host
@pytest.mark.parametrize("how", CHANGES)
def test_own_parameters_exchanged_below_the_module(how):
    """Programs write into `module._parameters` as into the dictionary that it is."""
    model, ref = pair(row_of(nn.Linear), frozen=True, budget=roomy, link=LINK)
    agree(model, ref, 2)
    for turn in range(2):
        new = torch.randn(48, 48)
        for net in (model, ref):
            CHANGES[how](net[2], nn.Parameter(new.clone(), requires_grad=False))
        agree(model, ref, 3, guard=False)
        if how == "attribute":
            break
    with torch.no_grad():
        for net in (model, ref):
            net[2].weight.mul_(1.5)
    agree(model, ref, 2, guard=False)
    s.runtime(model).shutdown()
    assert type(model[2]._parameters) is type(nn.Module()._parameters)
    agree_plain = [net(torch.ones(1, 48)) for net in (model, ref)]
    assert torch.allclose(*agree_plain)


@card.on_the_host
def test_own_pruning_and_norms_put_on_and_taken_off_after_wrapping():
    """They rename the Parameter, put a plain tensor in its place, and compute it in a hook of the forward."""
    from torch.nn.utils import parametrizations, prune

    model, ref = pair(row_of(nn.Linear), budget=s.nbytes, link=LINK)

    def steps(net):
        yield prune.l1_unstructured(net[1], "weight", amount=0.4)
        yield parametrizations.weight_norm(net[2])
        yield parametrizations.orthogonal(net[4])
        yield prune.remove(net[1], "weight")
        yield torch.nn.utils.parametrize.remove_parametrizations(net[2], "weight")

    for mine, theirs in zip(steps(model), steps(ref)):
        for _ in range(2):
            x = model.example()[0]
            for net in (model, ref):
                net.zero_grad()
                net(x).pow(2).sum().backward()
            same_grads(model, ref)
        agree(model, ref, 1, guard=False)
    assert list(model.state_dict()) == list(ref.state_dict())
    s.runtime(model).shutdown()
    same_weights(model, ref)


@card.on_the_host
def test_own_one_number_written_through_numpy_is_seen_after_synchronize():
    """The limit: large weights are sampled, and a write that misses all samples and leaves no version is not seen by
    itself. `synchronize()` says it for all."""
    model, ref = pair(s.Stack, 4, 128, frozen=True, budget=lambda m: 2 * s.nbytes(m))
    agree(model, ref, 2)
    for net in (model, ref):
        weight = net.blocks[2].up.weight
        assert weight.nbytes > 16 << 10
        weight.numpy()[201, 77] = 40.0
    s.runtime(model).synchronize()
    agree(model, ref, 3)


def test_own_adapters_that_come_and_go_a_hundred_times_leave_nothing():
    """Each is put round a layer, used, and taken off; what it was must be freed, and the layer must go on streaming."""
    import gc
    import weakref

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Parameter(torch.randn(4, 48) / 50, requires_grad=False)
            self.up = nn.Parameter(torch.randn(48, 4) / 50, requires_grad=False)

        def forward(self, x):
            return self.base(x) + x @ self.down.t() @ self.up.t()

    model, ref = pair(row_of(nn.Linear), frozen=True, budget=roomy)
    gone = []
    for turn in range(100):
        for net in (model, ref):
            torch.manual_seed(turn)
            adapter = Adapter(net[turn % 6])
            net[turn % 6] = adapter
            if net is model:
                gone.append(weakref.ref(adapter))
        if turn % 10 == 0:
            agree(model, ref, 1)
        else:
            with torch.no_grad():
                model(*model.example())
        for net in (model, ref):
            net[turn % 6] = net[turn % 6].base
    del adapter
    agree(model, ref, 2)
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 1
    assert len(s.runtime(model).session.plans) == 6 and within(model, roomy(model))
