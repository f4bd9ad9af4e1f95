"""Field case 212: other offloaders put tensors without values into a managed model."""

from __future__ import annotations

import copy
import pickle

import card
import pytest
import stagehand
import support as s
import torch
from torch import nn
from worlds import infer, managed, run, state, train

META = "meta device"


class Mixed(nn.Module):
    """A module that stays on the device comes first, and one that has buffers alone."""

    def __init__(self, d=48):
        super().__init__()
        self.scale = nn.BatchNorm1d(d, affine=False)
        self.norm = nn.LayerNorm(d)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(5))
        self.last = nn.LayerNorm(d)

    def forward(self, x):
        x = self.norm(self.scale(x))
        for layer in self.blocks:
            x = x + layer(x)
        return self.last(x)

    def example(self):
        return (torch.randn(4, self.norm.normalized_shape[0]),)


def replace_parameter(model, name):
    module, _, key = name.rpartition(".")
    owner = model.get_submodule(module)
    owner._parameters[key] = nn.Parameter(owner._parameters[key].to("meta"), requires_grad=False)


def set_attribute(model, name):
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, nn.Parameter(torch.empty(48, device="meta")))


def load_by_assignment(model, name):
    meta = {key: torch.empty_like(value, device="meta") for key, value in model.state_dict().items()}
    model.load_state_dict(meta, assign=True)


def update_all(model, name):
    owner = model.get_submodule(name.rpartition(".")[0])
    owner._parameters.update({key: nn.Parameter(p.to("meta")) for key, p in dict(owner._parameters).items()})


def one_module(model, name):
    model.get_submodule(name.rpartition(".")[0]).to("meta")


def buffers(model, name):
    model.scale._buffers["running_mean"] = model.scale._buffers["running_mean"].to("meta")


PLAIN = {
    "to": lambda model, name: model.to("meta"),
    "to_empty": lambda model, name: model.to_empty(device="meta"),
    "apply": lambda model, name: model._apply(lambda t: torch.empty_like(t, device="meta")),
    "parameter": replace_parameter,
    "attribute": set_attribute,
    "assign": load_by_assignment,
    "update": update_all,
    "module": one_module,
    "buffer": buffers,
}


def unharmed(model, ref, before):
    """Values, objects and results are those of before, in both modes, and after shutdown."""
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert [id(p) for p in model.parameters()] == before
    x = model.example()[0]
    assert s.same(infer(model, x), infer(ref, x))
    assert s.same(train(model, x), train(ref, x))
    run(model).shutdown()
    assert [id(p) for p in model.parameters()] == before
    assert s.same(state(model), state(ref))
    assert s.same(infer(s.aligned_copy(model), x), infer(ref, x))


WHOLE = ("to", "to_empty", "apply", "assign", "buffer")
NAMES = ("norm.weight", "blocks.0.weight", "blocks.4.bias", "last.bias")


@pytest.mark.parametrize("way, name", [(way, name) for way in PLAIN for name in NAMES[:1 if way in WHOLE else 4]])
def test_212_a_tensor_with_values_is_not_replaced_by_one_without(way, name):
    model, ref = managed(Mixed, frozen=False, link=None)
    before = [id(p) for p in model.parameters()]
    with pytest.raises((stagehand.StagehandError, RuntimeError), match=f"{META}|shutdown"):
        PLAIN[way](model, name)
    unharmed(model, ref, before)


ACCELERATE = {
    "cpu_offload": lambda a, model, folder: a.cpu_offload(model, "cpu"),
    "cpu_offload_with_hook": lambda a, model, folder: a.cpu_offload_with_hook(model, "cpu"),
    "cpu_offload_buffers": lambda a, model, folder: a.cpu_offload(model, "cpu", offload_buffers=True),
    "disk_offload": lambda a, model, folder: a.disk_offload(model, folder, "cpu"),
    "dispatch_model": lambda a, model, folder: a.dispatch_model(
        model, {"scale": "cpu", "norm": "disk", "blocks": "disk", "last": "cpu"}, main_device="cpu",
        offload_dir=folder, force_hooks=True),
    "set_tensor": lambda a, model, folder: a.utils.set_module_tensor_to_device(model, "norm.weight", "meta"),
    "set_managed_tensor": lambda a, model, folder: a.utils.set_module_tensor_to_device(
        model, "blocks.2.weight", "meta"),
}


@pytest.mark.parametrize("way", ACCELERATE)
def test_212_offloading_by_accelerate_is_refused_and_nothing_is_lost(way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ref = managed(Mixed, frozen=False, link=None)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(stagehand.StagehandError, match=META if way.startswith("set") else "refused, and nothing"):
        ACCELERATE[way](accelerate, model, str(tmp_path))
    assert way.startswith("set") or not any(hasattr(part, "_hf_hook") for part in model.modules())
    accelerate.hooks.remove_hook_from_module(model, recurse=True)  # a pipeline's remove_all_hooks()
    unharmed(model, ref, before)


@card.on_the_host
def test_212_a_model_that_was_refused_is_offloaded_after_shutdown():
    accelerate = pytest.importorskip("accelerate")
    model, ref = managed(Mixed, link=None)
    with pytest.raises(stagehand.StagehandError, match="stagehand.shutdown"):
        accelerate.cpu_offload(model, "cpu")
    run(model).shutdown()
    accelerate.cpu_offload(model, "cpu")
    assert all(p.is_meta for p in model.parameters())
    x = model.example()[0]
    assert torch.allclose(infer(model, x), infer(ref, x))


def test_212_a_model_that_accelerate_has_offloaded_is_refused_with_the_way_out():
    accelerate = pytest.importorskip("accelerate")
    model = Mixed().eval().requires_grad_(False)
    want = infer(model, x := model.example()[0])
    accelerate.cpu_offload(model, "cpu")
    with pytest.raises(stagehand.StagehandError, match="remove_hook_from_module"):
        s.wrap(model, s.tight_budget(Mixed()))
    assert torch.equal(infer(model, x), want)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    s.wrap(model, s.tight_budget(model))
    assert s.near(infer(model, x), want, atol=1e-6)
    s.runtime(model).shutdown()


@pytest.mark.parametrize("when", ["wrapping", "pass"])
def test_212_a_default_device_or_empty_weights_around_it_change_nothing(when):
    accelerate = pytest.importorskip("accelerate")
    for context in (accelerate.init_empty_weights, lambda: torch.device("meta")):
        model = s.made(Mixed, frozen=False)
        ref, x = s.aligned_copy(model), model.example()[0]
        before = [id(p) for p in model.parameters()]
        if when == "wrapping":
            with context():
                s.wrap(model, s.tight_budget(model))
        else:
            s.wrap(model, s.tight_budget(model))
            with context():
                assert s.same(infer(model, x), infer(ref, x))
        unharmed(model, ref, before)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_212_group_offloading_of_diffusers_is_right_or_refused_by_name(kind):
    hooks = pytest.importorskip("diffusers.hooks")
    model, ref = managed(Mixed, frozen=False, link=None)
    before, x = [id(p) for p in model.parameters()], model.example()[0]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        hooks.apply_group_offloading(model, device, torch.device("cpu"), offload_type=kind, num_blocks_per_group=1)
        assert s.same(infer(model, x), infer(ref, x))
    except stagehand.StagehandError as error:
        assert "shutdown" in str(error)
    for module in model.modules():
        if hasattr(module, "_diffusers_hook"):
            module._diffusers_hook.remove_hook("group_offloading")
    unharmed(model, ref, before)


def test_212_a_pipeline_of_diffusers_refuses_before_anything_is_gone():
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")

    class Pipe(diffusers.DiffusionPipeline):
        model_cpu_offload_seq = "first->second"

        def __init__(self, first, second):
            super().__init__()
            self.register_modules(first=first, second=second)

    class Part(Mixed, diffusers.ModelMixin, diffusers.ConfigMixin):
        config_name = "config.json"

        @diffusers.configuration_utils.register_to_config
        def __init__(self, d=48):
            super().__init__(d)

    first, second = s.made(Part, frozen=False), s.made(Part, seed=1, frozen=False)
    pipe, ref = Pipe(first, second), s.aligned_copy(second)
    before = [id(p) for p in second.parameters()]
    own = {name: getattr(diffusers.DiffusionPipeline, name) for name in dir(pipe) if name.startswith("enable_")}
    s.wrap(second, s.tight_budget(second))
    calls = {"enable_sequential_cpu_offload": {"device": "cpu"}, "enable_model_cpu_offload": {"device": "cpu"},
             "enable_group_offload": {"onload_device": torch.device("cpu"), "offload_type": "leaf_level"}}
    attributes = set(vars(pipe))
    for name, options in calls.items():
        with pytest.raises(stagehand.StagehandError, match=rf"{name}\(\) is refused, and nothing.*second is under"):
            getattr(pipe, name)(**options)
        assert set(vars(pipe)) == attributes
        assert not any(hasattr(part, "_hf_hook") or hasattr(part, "_diffusers_hook")
                       for model in (first, second) for part in model.modules())
    assert not any(p.is_meta for p in first.parameters())
    unharmed(second, ref, before)
    assert {name: getattr(diffusers.DiffusionPipeline, name) for name in own} == own
    pipe.enable_model_cpu_offload(device="cpu")


def test_212_what_is_meant_to_have_no_values_is_let_through():
    model, ref = managed(Mixed, link=None)
    x = model.example()[0]
    model.extra = nn.Linear(48, 48, device="meta")  # an adapter that gets its values later
    model.extra.to_empty(device="cpu")
    del model.extra
    assert s.same(infer(model, x), infer(ref, x))
    shapes = {name: torch.empty_like(p, device="meta") for name, p in ref.named_parameters()}
    shapes |= {name: b.to("meta") for name, b in ref.named_buffers()}
    outside = copy.deepcopy(model)
    assert torch.func.functional_call(outside, shapes, (x.to("meta"),)).is_meta
    run(model).shutdown()
    assert s.same(state(model), state(ref))


def test_212_copies_and_pickles_have_plain_dictionaries():
    model, _ = managed(Mixed, link=None)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(part.__dict__[slot]) for part in twin.modules() for slot in ("_parameters", "_buffers")} <= {
            dict, type(nn.Linear(1, 1)._parameters)}
        twin.to("meta")
    originals = [m._parameters for m in Mixed().modules()]
    run(model).shutdown()
    assert {type(part._parameters) for part in model.modules()} == {type(one) for one in originals}
