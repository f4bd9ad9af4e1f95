"""Field cases N: autocast, no_grad, inference_mode."""

from __future__ import annotations

import pytest
import support as s
import torch
from torch import nn
import stagehand
from worlds import Checkpointed, infer, managed, run, state, train



def plain_tensors(model):
    """No parameter or buffer is an inference tensor."""
    return not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_89_a_pass_under_inference_mode_leaves_a_model_that_trains(mode):
    model, ref = managed(s.Stack, 6, 32, frozen=False, mode=mode, link=None)
    x = model.example()[0]
    for _ in range(3):
        run(model).begin_step()
        with torch.inference_mode():
            assert s.same(model(x).clone(), infer(ref, x))
            run(model).end_step()
        assert plain_tensors(model)
        assert s.same(train(model, x), train(ref, x))
        with torch.inference_mode():
            loaded = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value * 0.99 for name, value in loaded.items()})
        ref.load_state_dict({name: value * 0.99 for name, value in loaded.items()})
        assert plain_tensors(model) and s.same(train(model, x), train(ref, x))
    assert s.same(state(model), state(ref))


def test_89_a_model_that_is_wrapped_under_inference_mode_trains():
    model = s.made(s.Stack, 6, 32, frozen=False)
    ref = s.aligned_copy(model)
    x = model.example()[0]
    with torch.inference_mode():
        s.wrap(model, s.tight_budget(model))
        assert s.same(model(x).clone(), infer(ref, x))
        run(model).set_vram_budget(s.tight_budget(model) + 4096)
    assert plain_tensors(model)
    for _ in range(2):
        assert s.same(train(model, x), train(ref, x))
    with torch.inference_mode():
        run(model).shutdown()
    assert plain_tensors(model) and s.same(state(model), state(ref))
    assert s.same(train(s.aligned_copy(model), x), train(ref, x))


class Dropping(Checkpointed):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


@pytest.mark.parametrize("reentrant", [False, True])
def test_91_training_and_evaluation_in_turns(reentrant):
    model, ref = managed(Dropping, 6, 24, frozen=False)
    model.reentrant = ref.reentrant = reentrant
    x, y = model.example(4)[0].requires_grad_(), model.example(7)[0]
    copies = []

    def evaluate():
        model.eval(), ref.eval()
        assert s.same(infer(model, y), infer(ref, y))
        model.train(), ref.train()

    def step(seed):
        torch.manual_seed(seed)
        ours = train(model, x)
        torch.manual_seed(seed)
        assert s.same(ours, train(ref, x))

    evaluate()  # the very first call
    for i in range(5):
        before = run(model).stats["h2d_bytes"]
        step(i)
        copies.append(run(model).stats["h2d_bytes"] - before)
    for i in range(6):
        evaluate()
        if i % 2 == 0:
            evaluate()  # two in a row
        before = run(model).stats["h2d_bytes"]
        step(100 + i)
        copies.append(run(model).stats["h2d_bytes"] - before)
    assert s.same(state(model), state(ref))
    steady, after = copies[3:5], copies[-3:]
    assert max(after) <= max(steady) + s.nbytes(model.blocks[0]), copies


# ---------------------------------------------------------------------- own cases


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_own_a_default_device_or_dtype_of_the_programs_changes_nothing(mode):
    """Wrapping, steps and shutdown while the program's default device is "meta" and its default dtype double: what is
    made inside is made where and as it belongs."""
    model = s.made(s.Stack, 5, 32, frozen=False)
    ref, x = s.aligned_copy(model), model.example()[0]
    budget, device = s.tight_budget(model), None
    device = s.device(budget, 1e8)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            if mode == "layer":
                stagehand.layer(model, vram_budget=budget, device=device)
            else:
                stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), device=device,
                                           block_pattern=r"^blocks\.\d+$")
            for _ in range(3):
                assert s.same(train(model, x), train(ref, x))
            with pytest.raises(ValueError):
                model.blocks[3].register_forward_hook(fail := lambda *_: int("no"))
                model(x)
            model.blocks[3]._forward_hooks.clear()
            assert s.same(train(model, x), train(ref, x)) and fail
            run(model).shutdown()
    finally:
        torch.set_default_dtype(torch.float32)
    assert s.same(state(model), state(ref))
    assert all(p.device.type == "cpu" and p.dtype is torch.float32 for p in model.parameters())


def test_own_batched_and_forward_mode_passes_of_a_frozen_model():
    """torch.func over a managed model: vmap, jvp and vjp give the reference's numbers, or say what to do."""
    model, ref = managed(s.Stack, 5, 32, link=None)
    x, direction = torch.randn(3, 4, 32), torch.randn(4, 32)

    def tried(function):
        try:
            return function(model)
        except (RuntimeError, stagehand.StagehandError) as error:
            assert "torch.func's grad, vjp, jacrev" in str(error), error
            return None

    def right(function):
        ours = tried(function)
        if ours is not None:
            for mine, theirs in zip(ours, function(ref)):
                torch.testing.assert_close(mine, theirs)
        return ours is not None

    with torch.no_grad():
        assert right(lambda net: (torch.func.vmap(net)(x),))
    done = [right(lambda net: torch.func.jvp(net, (x[0],), (direction,))),
            right(lambda net: torch.func.vjp(net, x[0])[1](direction)),
            right(lambda net: (torch.func.jacrev(lambda z: net(z).sum(0))(x[0]),))]
    assert done[0]  # no graph, no reason to refuse
    assert s.same(infer(model, x[0]), infer(ref, x[0])) and run(model).stats["leased_bytes"] == 0


def test_own_grad_mode_that_changes_inside_a_forward():
    """no_grad for some blocks, enable_grad for others, inference_mode for one whose result is cloned."""
    class Mixed(s.Stack):
        def forward(self, x):
            x = self.inp(x)
            with torch.no_grad():
                x = self.blocks[0](x)
                with torch.enable_grad():
                    x = self.blocks[1](x)
                y = self.blocks[2](x)
            with torch.inference_mode():
                z = self.blocks[3](y)
            return self.out(self.blocks[4](x + y + z.clone()))

    model, ref = managed(Mixed, 5, 32, frozen=False)
    x = model.example()[0]
    for _ in range(3):
        ours, theirs = [], []
        for net, log in ((model, ours), (ref, theirs)):
            net.zero_grad()
            out = net(x)
            out.pow(2).sum().backward()
            log.append(out.detach())
            log += [p.grad for p in net.parameters()]
            with torch.no_grad():
                for p in net.parameters():
                    if p.grad is not None:
                        p -= 0.01 * p.grad
        for mine, other in zip(ours, theirs):
            assert (mine is None) == (other is None) and (mine is None or s.same(mine, other))


def test_own_autocast_around_several_steps_with_updates_between():
    """One autocast region over forward, backward and the update: no cast of a weight outlives the weight."""
    model, ref = managed(s.Stack, 5, 32, frozen=False)
    x = model.example()[0]
    logs = []
    for net in (model, ref):
        log = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                net.zero_grad()
                out = net(x)
                again = net(x)
            (out + again).float().pow(2).sum().backward()
            log += [out.detach(), *(p.grad.clone() for p in net.parameters())]
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.01 * p.grad
        logs.append(log)
    assert s.same(*logs)


def test_own_requires_grad_that_changes_between_forward_and_backward():
    model, ref = managed(s.Stack, 5, 32, frozen=False)
    x = model.example()[0]
    for _ in range(2):
        for net in (model, ref):
            net.zero_grad()
            out = net(x)
            net.blocks[2].requires_grad_(False)
            out.pow(2).sum().backward()
            net.blocks[2].requires_grad_(True)
        for mine, theirs in zip(model.parameters(), ref.parameters()):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or s.same(mine.grad, theirs.grad)
        assert s.same(train(model, x), train(ref, x))
