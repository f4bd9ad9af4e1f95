"""Field case 235: runtimes are contexts, and are neither copied nor pickled by accident."""

from __future__ import annotations

import copy
import pickle

import card
import pytest
import stagehand
import support as s
import torch
from stagehand import activation, conductor
from worlds import BLOCKS, infer, managed, run, state, train

SESSION = {"memory": {"strategy": "stagehand", "stagehand": {"vram_budget": "1MB", "block_pattern": BLOCKS}}}


def device():
    return "cuda" if torch.cuda.is_available() else "sim"


def layer_runtime():
    return managed()[0]._stagehand_layer_runtime


def block_runtime():
    return managed(mode="block")[0]._stagehand_runtime


def unopened():
    return stagehand.StagehandRuntime(s.made(s.Stack), stagehand.StagehandConfig(vram_budget="1MB"), BLOCKS,
                                      device=device())


def activations():
    return activation.ActivationRuntime(activation.ActivationStagehandConfig(enabled=True), device())


def arbiter():
    return conductor.ConductorRuntime(conductor.ConductorConfig(enabled=True))


def session():
    return stagehand.session(s.made(s.Stack), SESSION, device=device())


OWNING = {"layer": layer_runtime, "block": block_runtime, "unopened": unopened, "activations": activations,
          "conductor": arbiter, "session": session, "pool": lambda: stagehand.PinnedPool(2, 1)}
PARTS = {
    "telemetry": lambda: layer_runtime().telemetry, "inner session": lambda: layer_runtime().session,
    "offload": lambda: activation.offload("1MB", device()), "saver": lambda: activations().saver,
    "caps": lambda: activations().transfer, "budget": lambda: arbiter().budget, "tokens": lambda: arbiter().transfer,
    "policy": lambda: arbiter().policy, "phases": lambda: arbiter().phases, "hub": lambda: arbiter().telemetry,
    "adapter": lambda: arbiter().attach(layer_runtime()), "slab": lambda: stagehand.PinnedPool(2, 1).acquire(5),
    "target": lambda: layer_runtime().session.target,
}
COPIES = {"pickle": pickle.dumps, "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", [*OWNING, *PARTS])
def test_235_a_copy_or_pickle_is_refused_by_name(kind, how):
    thing = {**OWNING, **PARTS}[kind]()
    for holder in (thing, {"held": [thing]}):
        if how == "copy" and holder is not thing:
            continue
        with pytest.raises(TypeError, match=f"{type(thing).__name__} can be neither copied nor pickled.*: "):
            COPIES[how](holder)


def test_235_the_error_says_that_the_model_is_what_to_copy():
    model, ref = managed()
    with pytest.raises(TypeError, match="pickle of the model is a plain model"):
        pickle.dumps(run(model))
    x = model.example()[0]
    twin = pickle.loads(pickle.dumps(model))
    assert s.same(infer(s.aligned_copy(twin), x), infer(ref, x)) and s.same(infer(model, x), infer(ref, x))


@card.on_the_host
@pytest.mark.parametrize("how", COPIES)
def test_235_a_model_whose_runtime_has_not_opened_copies_plain(how):
    runtime = unopened()
    model = runtime.model
    ref, x = s.aligned_copy(model), model.example()[0]
    copied = COPIES[how](model)
    twin = pickle.loads(copied) if how == "pickle" else copied
    assert "_stagehand_runtime" not in vars(twin)
    assert s.same(infer(s.aligned_copy(twin), x), infer(ref, x))
    assert runtime.session is None
    assert s.same(infer(model, x), infer(ref, x)) and runtime.session is not None
    runtime.shutdown()
    assert not {"__getstate__", "__deepcopy__", "forward"} & set(vars(model))


@pytest.mark.parametrize("kind", [
    stagehand.StagehandConfig(vram_budget="1GB"), activation.ActivationStagehandConfig(enabled=True),
    conductor.ConductorConfig(vram_soft_cap_mb=3), stagehand.NumericGuard(nan_inf_check=False),
    stagehand.StepMetrics(step=3), activation.ActivationStepMetrics(step=4), stagehand.BlockState.UNLOADED,
    stagehand.ResidentPriority.SECONDARY, conductor.Phase.BACKWARD, conductor.AcquireStatus.DENIED,
    stagehand.Runtime(vram_budget="1GB"), stagehand.StagehandOOMError("no room", "BUDGET_TOO_SMALL", "x")],
    ids=lambda kind: type(kind).__name__)
def test_235_values_are_copied_and_pickled_as_values(kind):
    for twin in (pickle.loads(pickle.dumps(kind)), copy.copy(kind), copy.deepcopy(kind)):
        assert type(twin) is type(kind)
        assert twin is kind or value_of(twin) == value_of(kind)


def value_of(thing) -> dict:
    return {name: value for name, value in vars(thing).items() if name != "_made"}


@pytest.mark.parametrize("kind", OWNING)
def test_235_a_runtime_is_a_context_that_ends_with_its_shutdown(kind):
    with OWNING[kind]() as thing:
        assert isinstance(thing, type(OWNING[kind]()))
    thing.shutdown()  # again is fine
    if hasattr(thing, "model"):
        assert not {"_stagehand_layer_runtime", "_stagehand_runtime", "forward"} & set(vars(thing.model))


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["layer", "block"])
def test_235_the_model_is_plain_with_its_values_after_the_block(mode, error):
    model, ref = managed(frozen=False, mode=mode)
    x = model.example()[0]
    try:
        with run(model) as runtime:
            assert runtime is run(model)
            assert s.same(train(model, x), train(ref, x))
            if error is not None:
                model(x)  # a graph that nobody runs backward
                raise error
    except (ValueError, KeyboardInterrupt) as caught:
        assert type(caught) is error
    assert s.same(state(model), state(ref))
    assert s.same(train(s.aligned_copy(model), x), train(ref, x))


def test_235_layers_runtime_keeps_several_models_and_lets_all_of_them_go():
    models = [s.made(s.Stack, seed=seed) for seed in range(3)]
    refs = [s.aligned_copy(model) for model in models]
    x = models[0].example()[0]
    with stagehand.Runtime(vram_budget="200KB", device=device()) as runtime:
        for model, ref in zip(models, refs):
            assert runtime.layer(model) is model
            assert torch.allclose(infer(model, x), infer(ref, x), atol=1e-5)
        models[0]._stagehand_layer_runtime.shutdown()
    assert not any("_stagehand_layer_runtime" in vars(model) for model in models)
    runtime.wrap(models[0])
    runtime.shutdown()
    assert "_stagehand_layer_runtime" not in vars(models[0])
