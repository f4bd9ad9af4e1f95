"""Field cases K: failures and recovery."""

from __future__ import annotations

import linecache
import os
import resource
import signal
import sys

import children
import pytest
import support as s
import torch
from worlds import Checkpointed, infer, managed, run, state, train

import stagehand
from stagehand.session.opening import Takeover


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


@pytest.mark.parametrize("kind", ["inference", "training", "reentrant", "not reentrant"])
def test_67_a_failed_step_leaves_the_next_one_right(kind):
    """Every other failure is followed by end_step()."""
    ends = False
    for k in s.thinned((0, 7, 3), 2):
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
            ends = not ends
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
    filling = Takeover.fill_arena

    def fails(self):
        raise OnPurpose

    monkeypatch.setattr(Takeover, "fill_arena", fails)
    with pytest.raises(OnPurpose):
        model.half()
    monkeypatch.setattr(Takeover, "fill_arena", filling)
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


# ---------------------------------------------------------------------- own cases


def interrupted_at(number, files):
    """KeyboardInterrupt at the n-th line that runs in these files of the package; [lines left]. Not at a `with`, which
    a trace passes between the end of its block and the release of its lock: no signal comes there."""
    left = [number]

    def line(frame, event, arg):
        if event == "line" and not linecache.getline(frame.f_code.co_filename,
                                                     frame.f_lineno).lstrip().startswith("with "):
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename.endswith(files) else None)
    return left


def numbers(lines):
    """Some of the lines: all at both ends, where things are handed over."""
    return sorted({*range(1, 6), *range(lines - 14, lines + 1), *range(6, lines, max(1, lines // 10))})


MEMBERS = type(torch.nn.Module()._parameters)


def is_plain(model):
    return all(type(m._parameters) is MEMBERS and "forward" not in vars(m)
               and not any("stagehand" in k for k in vars(m)) for m in model.modules())


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_own_an_interrupt_at_any_line_of_wrapping_leaves_the_model_plain(mode):
    files = ("opening.py", "layer.py", "block.py", "common.py", "session.py", "hooks.py")
    model = s.made(s.TinyLM, 60, 16, 1)
    ref, x = s.aligned_copy(model), model.example()[0]
    want, budget, device = infer(ref, x), s.nbytes(model), s.device(1 << 20)

    def wrap():
        if mode == "layer":
            stagehand.layer(model, vram_budget=budget, device=device)
        else:
            runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), device=device,
                                                 block_pattern=r"^blocks\.\d+$")
            runtime.prepare()

    left = interrupted_at(1 << 30, files)
    wrap()
    sys.settrace(None)
    run(model).shutdown()
    for number in numbers((1 << 30) - left[0]):
        left = interrupted_at(number, files)
        try:
            wrap()
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        runtime = model.__dict__.get("_stagehand_layer_runtime") or model.__dict__.get("_stagehand_runtime")
        if runtime is not None:  # all was done, or there is a handle by which it can be undone
            runtime.shutdown()
        assert is_plain(model) and s.same(state(model), state(ref)), number
        assert device.residency()["occupied"] == 0, number
    wrap()
    assert s.same(infer(model, x), want)
    run(model).shutdown()
    assert device.residency()["occupied"] == 0 and device.residency()["runtimes"] == 0


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_own_an_interrupt_at_any_line_of_shutdown_is_made_good_by_another(mode):
    files = ("opening.py", "layer.py", "block.py", "common.py", "hooks.py", "plain.py", "grads.py")
    device = s.device(1 << 20)

    def cycle(number):
        model = s.made(s.RecurrentNet if number % 4 == 0 else s.TinyLM, *(() if number % 4 == 0 else (60, 16, 1)))
        ref, budget = s.aligned_copy(model), s.nbytes(model)
        on = s.device(2 * budget) if number % 4 == 0 else device
        if mode == "layer":
            stagehand.layer(model, vram_budget=budget, device=on)
        else:
            stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), device=on,
                                       block_pattern=r"^(blocks\.\d+|lstm|gru)$").prepare()
        runtime = run(model)
        left = interrupted_at(number, files)
        try:
            runtime.shutdown()
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        runtime.shutdown()
        assert is_plain(model) and s.same(state(model), state(ref)), number
        if isinstance(model, s.TinyLM):
            assert model.head.weight is model.embed.weight
        else:
            assert all(a is b for a, b in zip(model.gru._flat_weights, model.gru.parameters()))
        assert on.residency()["occupied"] == 0, number
        return left[0]

    for number in numbers((1 << 30) - 1 - cycle((1 << 30) - 1)):
        cycle(number)


def test_own_a_full_disk_under_telemetry_is_said_once_and_steps_go_on(tmp_path):
    """The limit of a file's size stands for it: the same error to whoever writes. The lines of the file and those that
    are counted as lost are all."""
    model, ref = managed(s.Stack, 4, 40, telemetry=str(tmp_path / "t.jsonl"))
    x, said, passes = model.example()[0], [], 200
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        for _ in range(passes):
            try:
                assert s.same(infer(model, x), infer(ref, x))
            except stagehand.TransferError as error:
                said.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(said) == 1 and said[0].object == str(tmp_path / "t.jsonl") and "has ended" in str(said[0])
    assert s.same(infer(model, x), infer(ref, x))
    runtime = run(model)
    runtime.shutdown()
    text, stats = (tmp_path / "t.jsonl").read_text(), runtime.stats
    assert text.endswith("\n") and 0 < stats["telemetry_lost"] < stats["steps"]
    assert text.count("\n") + stats["telemetry_lost"] == stats["steps"]


def test_own_an_error_in_a_hook_behind_a_gradient_costs_that_step_alone():
    """A post-accumulate hook of the user's raises while other gradients are on their way."""
    model, ref = managed(s.Stack, 6, 32, frozen=False, link=2e7)
    x, armed = model.example()[0], [False]

    def fail(param):
        if armed[0]:
            raise OnPurpose

    model.blocks[3].down.weight.register_post_accumulate_grad_hook(fail)
    for _ in range(3):
        armed[0] = True
        with pytest.raises(OnPurpose):
            model(x).sum().backward()
        armed[0] = False
        assert s.same(train(model, x), train(ref, x))
    assert run(model).session.grads.stats()["tickets"] == 0


def test_own_errors_that_are_kept_keep_no_places():
    """A service keeps the exceptions of its requests, with their tracebacks and all that these hold."""
    model, ref = managed(s.Router, 8, 40)
    x, kept = model.example()[0], []
    for i in range(30):
        with torch.no_grad():
            handle = model.blocks[i % 8].down.register_forward_hook(lambda *_: 1 / 0)
            try:
                model(x)
            except ZeroDivisionError as error:
                kept.append(error)
            handle.remove()
            assert s.same(model(x), ref(x))
    assert run(model).stats["leased_bytes"] == 0 and len(kept) == 30


def test_own_a_forward_that_calls_exit_and_goes_on():
    """SystemExit and GeneratorExit, which are no Exception, caught by the caller."""
    model, ref = managed(s.Router, 6, 32, frozen=False)
    x = model.example()[0]
    for error in (SystemExit, GeneratorExit, type("Own", (BaseException,), {})):
        with pytest.raises(error):
            model(x, fail=3, error=error)
        assert s.same(train(model, x), train(ref, x))
    assert run(model).session.local.depth == 0
