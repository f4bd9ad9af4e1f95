"""Captured passes without a card: what is refused and why, and when a graph is captured again. The device's part is
played by stand-ins here: a "graph" remembers the call and makes it again, so that what is stale shows as a wrong
number. On a card: test_cuda_graphs.py; the core's part: tests/stream/test_graph.c."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from wrapping_support import Rows  # noqa: E402

import stagehand  # noqa: E402
from stagehand import device  # noqa: E402
from stagehand.errors import InvalidStateTransitionError, StagehandError  # noqa: E402
from stagehand.modes import graphs  # noqa: E402
from stagehand.session import captures  # noqa: E402
from stagehand.weights.hooks import Pass  # noqa: E402

nn = torch.nn
D = 128


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(6))

    def forward(self, x, scale=1.0):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.relu(layer(x)) * scale
        return x


class WritesInside(nn.Linear):
    """The weight is a tensor around others."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = nn.Parameter(Rows.of(self.weight), requires_grad=False)

    def forward(self, x):
        self.weight.scale.mul_(2)
        return super().forward(x)


class StackThatWrites(Stack):
    def __init__(self):
        super().__init__()
        self.layers[2] = WritesInside(D, D)


@pytest.fixture
def model(request):
    torch.manual_seed(0)
    kind = getattr(request, "param", Stack)
    model = stagehand.layer(kind().requires_grad_(False), vram_budget="250KB", device="sim", inference_mode=True)
    yield model
    runtime = getattr(model, "_stagehand_layer_runtime", None)
    if runtime is not None:
        runtime.shutdown()


class Graph:
    """Calls again what was called, and puts the results where the first call's are."""

    recording = None

    def record(self, session, run):
        self.session, self.run = session, run
        self.out = run()
        return self.out

    def replay(self):
        local, token = self.session.local, Pass(held=False)
        local.enter(token)
        try:
            self.out.copy_(self.run())
        finally:
            local.passes.pop(token)
            local.depth = len(local.passes)

    def pool(self):
        return (0, 1)


class Core:
    """The core of a session, with steps in place of captures and replays."""

    def __init__(self, core):
        self._core, self.edition = core, 1

    def __getattr__(self, name):
        return getattr(self._core, name)

    def graph_prepare(self):
        self._core.step_begin()

    def graph_fork(self, stream):
        pass

    graph_join = graph_fork

    def graph_settle(self):
        self._core.step_end()
        return {"edition": self.edition, "h2d_bytes": 1, "copies": 1, "read_bytes": 0}

    def graph_replay_begin(self, edition, stream):
        if edition == self.edition:
            self._core.step_begin()
        return edition == self.edition

    def graph_replay_end(self, stream):
        self._core.step_end()


class Event:
    def record(self, stream):
        pass


class Stream:
    cuda_stream = 7

    def __init__(self, *args):
        pass

    def wait_stream(self, other):
        pass

    wait_event = wait_stream

    synchronize = lambda self: None  # noqa: E731


@pytest.fixture
def card(monkeypatch, model):
    """The model's session as if it were on a card."""
    session = model._stagehand_layer_runtime.session
    session.core = Core(session.core)
    graph_of = {}

    @contextlib.contextmanager
    def capturing(graph, stream, capture_error_mode):
        graph_of["now"] = graph
        assert capture_error_mode == "thread_local"
        yield

    record = captures.Captures._record
    monkeypatch.setattr(captures.Captures, "_record",
                        lambda self, stream, run: record(
                            self, stream, lambda: graph_of["now"].record(self._session, run)))
    for name, value in {"graph": capturing, "CUDAGraph": Graph, "Stream": Stream, "Event": Event,
                        "memory_snapshot": list, "current_stream": lambda device: Stream(),
                        "stream": lambda stream: contextlib.nullcontext(),
                        "device": lambda device: contextlib.nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    check = graphs._check

    def checked(session):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "simulated", False)
            check(session)

    monkeypatch.setattr(graphs, "_check", checked)
    yield session.core
    session.core = session.core._core


def twin_of(model):
    return copy.deepcopy(model)


def inputs(n=3):
    torch.manual_seed(1)
    return [torch.randn(5, D) for _ in range(n)]


def check(step, model, xs):
    for x in xs:
        want = twin_of(model)(x)
        assert torch.equal(step(x), want)
        assert torch.equal(model(x), want)


def test_calls_are_those_of_the_model(model, card):
    xs = inputs()
    step = stagehand.capture(model, xs[0])
    check(step, model, xs)
    assert step.stats == {"captures": 1, "replays": 3, "h2d_bytes": 1, "copies": 1, "read_bytes": 0, "pool_bytes": 0}
    assert step(xs[0]) is step(xs[1])  # the same tensor, which the next call overwrites


def test_what_makes_a_graph_stale_captures_again(model, card):
    xs = inputs(1)
    step = stagehand.capture(model, xs[0])

    def again(times=1):
        before = step.stats["captures"]
        check(step, model, xs)
        assert step.stats["captures"] == before + times

    again(0)
    card.edition += 1  # places moved
    again()
    model.eval()
    again()
    model.layers[2] = nn.Linear(D, D).requires_grad_(False)
    again()
    model.layers[3].weight = nn.Parameter(torch.randn(D, D), requires_grad=False)
    again()
    model.norm.weight.data = torch.rand(D)
    again()
    model.register_buffer("more", torch.ones(3))
    again()
    handle = model.layers[1].register_forward_hook(lambda module, args, out: out + 1)
    again()
    handle.remove()
    handle = model.layers[1].register_forward_hook(lambda module, args, out: out * 3)  # in the place of the other
    again()
    handle.remove()
    again()
    model.layers[4].forward = lambda x, usual=model.layers[4].forward: usual(x) + 2
    again()
    model.layers[5].__class__ = Doubled
    again()
    step.release()
    again()
    step.recapture()
    assert step.stats["captures"] == 14
    model.half().float()
    with pytest.raises(StagehandError, match="has no graphs"):  # another session, whose core is no stand-in
        step(xs[0])


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class StackThatKeeps(Stack):
    """One of its weights is around tensors and stays where it is."""

    def __init__(self):
        super().__init__()
        self.layers[2].weight = nn.Parameter(Rows.of(self.layers[2].weight), requires_grad=False)


@pytest.mark.parametrize("model", [StackThatKeeps], indirect=True)
def test_other_tensors_inside_a_weight_that_stays_capture_again(model, card, monkeypatch):
    session, weight = model._stagehand_layer_runtime.session, model.layers[2].weight
    managed = session.takeover.managed_ids() - {id(weight)}
    monkeypatch.setattr(session.takeover, "managed_ids", lambda: managed)
    xs = inputs(1)
    step = stagehand.capture(model, xs[0])
    check(step, model, xs)
    weight.scale = weight.scale * 5
    check(step, model, xs)
    assert step.stats["captures"] == 2


def test_other_settings_capture_again(model, card):
    x = inputs(1)[0]
    step = stagehand.capture(model, x)
    with torch.no_grad():
        want, cast = model(x).clone(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        for captures in (2, 2):
            with cast:
                halved = model(x)
                assert torch.equal(step(x), halved) and not torch.equal(halved, want)
            assert step.stats["captures"] == captures
        assert torch.equal(step(x), want)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            step(x)
            assert step.stats["captures"] == 4
        finally:
            torch.set_float32_matmul_precision(before)


def test_constants_are_compared_with_their_type(model, card):
    x = inputs(1)[0]
    step = stagehand.capture(model, x, scale=1)
    for wrong in (1.0, True, "1", None, x, Scale(1)):
        with pytest.raises(StagehandError, match="input 1 was 1 when"):
            step(x, scale=wrong)
    assert torch.equal(step(x, scale=1), model(x))
    nan = stagehand.capture(model, x, scale=float("nan"))
    assert nan(x, scale=float("nan")).isnan().any()


@pytest.mark.parametrize("kind", [list, object])
def test_what_may_change_under_a_graph_is_refused(model, card, kind):
    with pytest.raises(StagehandError, match="input 1 of a captured model is a Scale"):
        stagehand.capture(model, inputs(1)[0], scale=[Scale(1)] if kind is list else Scale(1))


class Scale:
    """As a cache would be: an object with a state."""

    def __init__(self, value):
        self.value = value

    def __ne__(self, other):
        raise ValueError("as arrays do")


def test_a_release_beside_a_call_does_not_disturb_it(model, card, monkeypatch):
    """Another thread may release it at any moment of a call."""
    x = inputs(1)[0]
    step = stagehand.capture(model, x)
    begin = card.graph_replay_begin

    def released(edition, stream):
        thread = threading.Thread(target=step.release)
        thread.start()
        thread.join()
        return begin(edition, stream)

    card.graph_replay_begin = released
    for captures in (1, 2):
        assert torch.equal(step(x), twin_of(model)(x))
        assert step.stats["captures"] == captures


def test_written_weights_are_seen(model, card):
    xs = inputs(2)
    step = stagehand.capture(model, xs[0])
    with model._stagehand_layer_runtime.writing():
        model.layers[4].weight.mul_(2)
        model.norm.bias.add_(1)
    check(step, model, xs)
    model.layers[0].weight.data = torch.randn(D, D)
    check(step, model, xs)


def test_more_passes_are_made_where_the_order_is_not_known(model, card):
    x, tried = inputs(1)[0], []

    def prepare():
        tried.append(card.stats()["steps"])
        if len(tried) == 1:
            raise InvalidStateTransitionError("not the order of the steps before")
        card._core.step_begin()

    card.graph_prepare = prepare
    check(stagehand.capture(model, x), model, [x])
    assert tried[1] - tried[0] == graphs.MORE


def test_places_that_keep_changing_are_an_error(model, card):
    step = stagehand.capture(model, inputs(1)[0])
    card.graph_replay_begin = lambda edition, stream: False
    with pytest.raises(StagehandError, match="keep_resident"):
        step(inputs(1)[0])


def test_other_inputs_are_refused(model, card):
    x = inputs(1)[0]
    step = stagehand.capture(model, x, scale=0.5)
    for wrong in (x[:3], x.half(), None):
        with pytest.raises(StagehandError, match="input 0"):
            step(wrong, scale=0.5)
    with pytest.raises(StagehandError, match="input 1 was 0.5"):
        step(x, scale=0.25)
    with pytest.raises(StagehandError, match="other arguments"):
        step(x)
    with pytest.raises(StagehandError, match="no backward"):
        step(x.clone().requires_grad_(), scale=0.5)
    assert torch.equal(step(x, scale=0.5), twin_of(model)(x, scale=0.5))


def test_inside_a_pass_nothing_is_replayed(model, card):
    x = inputs(1)[0]
    step = stagehand.capture(model, x)
    runtime = model._stagehand_layer_runtime
    with runtime.managed_forward(), pytest.raises(StagehandError, match="inside a pass"):
        step(x)
    runtime.begin_step()
    with pytest.raises(StagehandError, match="inside a pass"):
        step(x)
    runtime.end_step()
    assert torch.equal(step(x), twin_of(model)(x))


def test_after_shutdown_a_graph_is_refused(model, card):
    x = inputs(1)[0]
    step = stagehand.capture(model, x)
    model._stagehand_layer_runtime.shutdown()
    with pytest.raises(StagehandError, match="not under stagehand"):
        step(x)


def test_an_error_inside_a_capture_leaves_the_model_usable(model, card):
    x = inputs(1)[0]
    calls = []

    def angry(module, args, out):
        calls.append(0)
        if len(calls) > graphs.WARM:
            raise KeyboardInterrupt

    handle = model.layers[3].register_forward_hook(angry)
    with pytest.raises(KeyboardInterrupt):
        stagehand.capture(model, x)
    handle.remove()
    check(stagehand.capture(model, x), model, [x])


@pytest.mark.parametrize("begin", ["graph_prepare", "graph_replay_begin"])
def test_an_interrupt_behind_the_beginning_leaves_the_model_usable(model, card, begin):
    x = inputs(1)[0]
    step = stagehand.capture(model, x)
    usual = getattr(card, begin)

    def interrupted(*args):
        usual(*args)
        raise KeyboardInterrupt

    setattr(card, begin, interrupted)
    step.release() if begin == "graph_prepare" else None
    with pytest.raises(KeyboardInterrupt):
        step(x)
    setattr(card, begin, usual)
    card._core.step_begin()  # nothing is under way
    card._core.step_end()
    check(step, model, [x])


def test_a_capture_is_its_own_threads_alone(model, card):
    """Lookups of other threads are recorded, and waited for, as ever."""
    session, counted = model._stagehand_layer_runtime.session, []
    card.count_mapped = counted.append
    entry, one = session.units[0].entries[0], torch.zeros(1, dtype=torch.long)

    def look(module, args, out):
        if session.captures.capturing:
            session.looked_up(entry, one, 1)
            other = threading.Thread(target=session.looked_up, args=(entry, one, 2))
            other.start()
            other.join()

    model.layers[3].register_forward_hook(look)
    stagehand.capture(model, inputs(1)[0])
    assert counted == [2]


def test_a_forward_that_writes_its_weight_is_refused(model, card):
    class Writes(nn.Linear):
        def forward(self, x):
            self.weight.add_(1)
            return super().forward(x)

    model.layers[2].__class__ = Writes
    x = inputs(1)[0]
    with pytest.raises(StagehandError, match="layers.2 writes layers.2.weight.*cannot be captured"):
        stagehand.capture(model, x)
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("model", [StackThatWrites], indirect=True)
def test_a_forward_that_writes_inside_its_weight_is_refused(model, card):
    x = inputs(1)[0]
    with pytest.raises(StagehandError, match="layers.2 writes layers.2.weight.*cannot be captured"):
        stagehand.capture(model, x)
    assert torch.isfinite(model(x)).all()


def test_training_is_refused(model, card):
    model.requires_grad_(True)
    with pytest.raises(StagehandError, match="training"):
        stagehand.capture(model, inputs(1)[0])


def test_the_simulated_device_has_no_graphs(model):
    with pytest.raises(StagehandError, match=r"'Stack( \d+)?' is on the simulated device"):
        stagehand.capture(model, inputs(1)[0])
    with pytest.raises(StagehandError, match="has no graphs"):
        model._stagehand_layer_runtime.session.core.graph_prepare()
    x = inputs(1)[0]
    assert torch.equal(model(x), twin_of(model)(x))


def test_a_plain_model_is_refused():
    with pytest.raises(StagehandError, match="Stack is not under stagehand"):
        stagehand.capture(Stack(), inputs(1)[0])


def test_a_capture_of_the_users_own_says_what_to_do(model, monkeypatch):
    x = inputs(1)[0]
    model(x)
    with monkeypatch.context() as patch:
        patch.setattr(device.Target, "capturing", lambda self: True)
        with pytest.raises(StagehandError,
                           match=r"'Stack( \d+)?' cannot run inside torch.cuda.graph.*stagehand\.capture"):
            model(x)
        with pytest.raises(StagehandError, match=r"stagehand\.capture"):
            model.layers[0](x)
        with pytest.raises(StagehandError, match=r"stagehand\.capture"):
            model._stagehand_layer_runtime.begin_step()
    with model._stagehand_layer_runtime.managed_forward(), monkeypatch.context() as patch:
        patch.setattr(device.Target, "capturing", lambda self: True)
        with pytest.raises(StagehandError, match=r"stagehand\.capture"):
            model(x)
    assert torch.equal(model(x), twin_of(model)(x))
