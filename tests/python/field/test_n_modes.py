"""Field cases N: autocast, no_grad, inference_mode."""

from __future__ import annotations

import pytest
import support as s
import torch
from torch import nn
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
