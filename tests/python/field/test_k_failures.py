"""Field cases K: failures and recovery."""

from __future__ import annotations

import os
import signal

import children
import pytest
import support as s
import torch
from worlds import Checkpointed, infer, managed, run, state, train

import stagehand


class OnPurpose(Exception):
    pass


class Fuse(torch.autograd.Function):
    """Raises in its backward while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Fuse.armed:
            raise OnPurpose
        return grad


class Trap:
    """Hooks round block k that raise when told: before or after its compute, at its n-th call, or in its backward."""

    def __init__(self, net, k):
        self.where, self.calls = None, 0
        net.blocks[k].register_forward_pre_hook(self.before)
        net.blocks[k].register_forward_hook(self.after)

    def set(self, where, call=1):
        self.where, self.calls, self.call = where, 0, call
        Fuse.armed = where == "backward"

    def before(self, module, args):
        self.calls += 1
        if self.where == "before" and self.calls == self.call:
            raise OnPurpose
        return (Fuse.apply(args[0]),) if torch.is_grad_enabled() else None

    def after(self, module, args, out):
        if self.where == "after" and self.calls == self.call:
            raise OnPurpose
        return Fuse.apply(out) if torch.is_grad_enabled() else out


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("kind", ["inference", "training", "reentrant", "not reentrant"])
def test_67_a_failed_step_leaves_the_next_one_right(kind, ends):
    for k in (0, 3, 7):
        build = Checkpointed if "reentrant" in kind else s.Stack
        model, ref = managed(build, 8, 16, frozen=kind == "inference", mode="block", extra=1 << 12)
        model.reentrant = ref.reentrant = kind == "reentrant"
        traps = Trap(model, k), Trap(ref, k)
        x = model.example()[0].requires_grad_(kind != "inference")
        step = infer if kind == "inference" else train
        places = [("before", 1), ("after", 1)]
        if "reentrant" in kind:
            places.append(("before", 2))  # the second call is the recomputation
        if kind == "reentrant":
            places.append(("after", 2))  # the other way has stopped before, when it has what it needs
        if kind != "inference":
            places.append(("backward", 1))
        for place in places:
            traps[0].set(*place)
            run(model).begin_step()
            with pytest.raises(OnPurpose):
                step(model, x)
            traps[0].set(None)
            if ends:
                run(model).end_step()
            x = model.example()[0].requires_grad_(kind != "inference")
            run(model).begin_step()
            assert s.same(step(model, x), step(ref, x)), (k, place)
            run(model).end_step()
            assert run(model).stats["leased_bytes"] == 0
        assert s.same(state(model), state(ref))
        run(model).shutdown()


def test_69_a_load_that_fails_in_the_middle_leaves_offload_on():
    model, ref = managed(s.Stack, 8, 32, link=None)
    x = model.example()[0]
    infer(model, x)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    bad = {**good, "blocks.4.up.weight": torch.zeros(3, 3)}
    session = run(model).session
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"blocks\.4\.up\.weight"):
            model.load_state_dict(bad, assign=assign)
        assert run(model).session is session and not session.closed
        with s.HostMasterGuard(model):
            assert s.same(infer(model, x), infer(ref, x))
        stats = run(model).stats
        assert stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]
        assert s.same(state(model), list(good.values()))


def test_69_a_conversion_that_fails_in_the_middle_leaves_the_model_as_it_was(monkeypatch):
    model, ref = managed(s.Stack, 6, 32)
    x = model.example()[0]
    infer(model, x)
    opening = stagehand.opening.Opening._fill_arena

    def fails(self):
        raise OnPurpose

    monkeypatch.setattr(stagehand.opening.Opening, "_fill_arena", fails)
    with pytest.raises(OnPurpose):
        model.half()
    monkeypatch.setattr(stagehand.opening.Opening, "_fill_arena", opening)
    assert s.same(state(model), state(ref))
    assert s.same(infer(model, x), infer(ref, x))


def test_69_files_of_another_shape_are_refused_by_name(tmp_path):
    import file_support as f

    model = s.made(s.Stack, 6, 32)
    ref = s.aligned_copy(model)
    tensors = f.state(model)
    tensors["blocks.3.down.weight"] = torch.zeros(32, 95)
    f.save(tmp_path / "other.safetensors", tensors)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(stagehand.StagehandError, match=r"blocks\.3\.down\.weight"):
        stagehand.layer(model, vram_budget=1 << 20, device="sim", source=tmp_path / "other.safetensors")
    assert [p.data_ptr() for p in model.parameters()] == before and type(model.forward).__name__ == "method"
    assert s.same(infer(s.aligned_copy(model), x := model.example()[0]), infer(ref, x))
    assert f.open_files(tmp_path) == []


LOOP = """
import os, signal
from worlds import Checkpointed
torch.manual_seed(0)
model = support.Stack(6, 64)
for block in model.blocks:
    block.requires_grad_(False)
path = {path!r}
file_support.save(path, file_support.state(model))
if {signal} == signal.SIGTERM:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
support.wrap(model, support.tight_budget(model), 2e6, source=path)
x = model.example()[0]
for i in range(100000):
    model(x).sum().backward()
    if i == 1:
        print("running", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_71_a_signal_in_a_training_loop_ends_the_program(number, tmp_path):
    """The link takes some 50 ms for a block; weights come from a file, by threads."""
    path = str(tmp_path / "model.safetensors")
    child = children.start(LOOP.format(path=path, signal=int(number)))
    child.said("running")
    done = child.kill(number).wait(10)
    if number == signal.SIGTERM:
        assert done.status == -number and done.stderr == ""
    else:
        assert done.status in (1, 130, -number) and done.stderr.rstrip().endswith("KeyboardInterrupt")
        assert "Fatal" not in done.stderr and "dumped" not in done.stderr
    assert os.listdir(tmp_path) == ["model.safetensors"]
