"""What stays on the device is counted anew when something came after wrapping: when that is, beside whom, and what a
refusal leaves behind."""

import threading
import warnings

import card
import pytest
import stagehand
import torch
from support import aligned_copy, device, made, needs_regions, runtime, same
from torch import nn

D = 128
ONE = D * D * 4


class Chain(nn.Module):
    """Nothing in it stays on the device."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def within(model):
    session = runtime(model).session
    return session.core.stats()["device_bytes"] + session.stay.reserved <= session.budget


def managed(weights=4):
    """A model with room for so many of its weights, on a device with room for far more; its copy; an input."""
    model = made(Chain)
    ref = aligned_copy(model)
    stagehand.layer(model, vram_budget=weights * ONE, device=device(256 * ONE))
    return model, ref, torch.randn(2, D)


def test_a_step_that_could_not_begin_is_not_open():
    model, ref, x = managed()
    own = runtime(model)
    with torch.no_grad():
        want = ref(x)
        assert same(model(x), want)
        model.big = nn.Parameter(torch.zeros(5 * D * D))
        for _ in range(2):
            with pytest.raises(stagehand.StagehandOOMError, match="big"):
                own.begin_step()
            own.end_step()
            with pytest.raises(stagehand.StagehandOOMError, match="big"):
                model(x)
            with pytest.raises(stagehand.StagehandOOMError, match="big"), own.managed_forward():
                model(x)
            assert within(model)
        del model.big
        steps = own.stats["steps"]
        own.begin_step()
        assert same(model(x), want)
        own.end_step()
        assert own.stats["steps"] == steps + 1
    own.shutdown()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(D, D, bias=False)
        self.b = nn.Linear(D, D, bias=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def compiled_pairs(budget, n=4):
    needs_regions()
    model = nn.Sequential(*(Pair() for _ in range(n)))
    ref = aligned_copy(model)
    for block in model:
        block.compile(backend="eager")
    stagehand.layer(model, vram_budget=budget, device=device(256 * ONE))
    return model, ref, torch.randn(2, D)


def test_what_is_compiled_is_chosen_with_what_is_counted_now():
    model, ref, x = compiled_pairs(2 * ONE + 4096)
    assert len(runtime(model).compiled) == 4
    model.extra = nn.Identity()
    model.extra.weight = nn.Parameter(torch.zeros(2048))  # two weights have no room beside it, one has
    with torch.no_grad():
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert same(model(x), ref(x))
        assert runtime(model).compiled == [] and within(model)
    runtime(model).shutdown()


def in_time(*works):
    """Runs them on threads of their own; what they raised."""
    raised = []

    def run(work):
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "they wait for each other"
    return raised


def test_regions_are_looked_at_without_the_step_lock():
    """A thread inside a region may need it: one that runs autograd.grad there."""
    model, _, x = compiled_pairs(8 * ONE)
    session = runtime(model).session
    region = session.regions.found[0]
    removed = []

    def remove():
        removed.append(session.steps.lock.locked())
        type(region).remove(region)

    region.remove = remove
    session.budget = ONE  # it does not hold the region any more
    model.extra = nn.Identity()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x)
    assert removed == [False]
    session.budget = 8 * ONE
    runtime(model).shutdown()


def test_two_that_look_for_regions_make_one_of_each():
    model, ref, x = compiled_pairs(8 * ONE)
    session = runtime(model).session
    looks, both = [], threading.Barrier(2)
    look = session.regions._find_regions

    def find():
        looks.append(threading.get_ident())
        assert len(looks) < 2 or looks[-1] == looks[0]  # one thread at a time
        if len(looks) == 1:
            both.wait(30)  # the other one comes now
            late.wait(30)
        look()

    late = threading.Event()
    session.regions._find_regions = find

    def second():
        both.wait(30)
        session.regions.find()  # does not wait: this thread might be inside a region
        late.set()

    assert in_time(session.regions.find, second) == [] and len(looks) == 2
    assert len(session.regions.found) == len({id(region.module) for region in session.regions.found}) == 4
    with torch.no_grad():
        assert same(model(x), ref(x))
    runtime(model).shutdown()


@pytest.mark.parametrize("come", ["call", "part", "guest", "begin_step"])
def test_what_was_added_while_it_was_away_is_counted_before_it_comes(come):
    model, ref, x = managed()
    model.scale = nn.Parameter(torch.zeros(8))  # counted from its next pass on
    own = runtime(model)
    session = own.session
    with torch.no_grad():
        want, part = ref(x), ref.layers[0](x)
        assert same(model(x), want)
        with own.as_guest():
            assert same(model(x), want)
        assert session.stay.away
        placed, place = [], session.stay.place
        session.stay.place = lambda items: (placed.append([item.name for item in items]), place(items))
        model.extra = nn.Parameter(torch.zeros(8 * D * D))

        def comes():
            if come == "guest":
                with own.as_guest():
                    return model(x)
            if come == "begin_step":
                own.begin_step()
                try:
                    return model(x)
                finally:
                    own.end_step()
            return model.layers[0](x) if come == "part" else model(x)

        for _ in range(2):
            with pytest.raises(stagehand.StagehandOOMError, match="^extra came after wrapping"):
                comes()
            assert placed == [] and session.stay.away and session.target.core.residency()["occupied"] == 0
        model.extra = nn.Parameter(torch.zeros(D * D))
        assert same(comes(), part if come == "part" else want)
        # A card's tensors are looked at once more, where they lie; there is nothing to move then.
        assert placed[0] == ["scale", "extra"] and placed[1:] in ([], placed[:1] * card.ON_CARD)
        assert within(model) and session.stay.reserved >= ONE
    own.shutdown()


class Caching(Chain):
    """A buffer is assigned in each pass, as models do that keep what they have computed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, D))
        self.rows = 1

    def forward(self, x):
        self.cache = torch.zeros(self.rows, D)
        return super().forward(x)


def test_a_refusal_names_what_came_and_what_grew():
    model, x = made(Caching), torch.randn(2, D)
    stagehand.layer(model, vram_budget=4 * ONE, device=device(256 * ONE))
    with torch.no_grad():
        model.scale = nn.Parameter(torch.zeros(8))
        model(x)
        assert runtime(model).report["scale"] == "it was added after wrapping"
        model.rows = 4 * D
        model(x)  # nothing tells of a buffer that is assigned: it is counted at the next occasion
        model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().clone())
        with pytest.raises(stagehand.StagehandOOMError,
                           match="^cache grew after wrapping: (?!.*wrap again)") as refused:
            model(x)
        assert refused.value.object == "cache" and str(4 * ONE) in str(refused.value)
        model.extra = nn.Parameter(torch.zeros(8))
        with pytest.raises(stagehand.StagehandOOMError, match="^extra came after wrapping and cache grew .*wrap again"):
            model(x)
        model.rows, model.cache = 1, torch.zeros(1, D)
        model(x)
        assert within(model)
    runtime(model).shutdown()


def test_what_came_while_the_model_was_away_is_said_to_have_come():
    model, _, x = managed()
    model.norm = nn.LayerNorm(D)
    with torch.no_grad():
        model(x)
        with runtime(model).as_guest():
            model(x)
        model.extra = nn.Parameter(torch.zeros(8))
        with runtime(model).as_guest():  # it comes before a pass looks around
            assert runtime(model).report["extra"] == "it was added after wrapping"
    runtime(model).shutdown()


class Stops(nn.Linear):
    """Its forward stays where it is on one thread, until that may go on."""

    def __init__(self):
        super().__init__(D, D, bias=False)
        self.thread = None
        self.there, self.on = threading.Event(), threading.Event()

    def forward(self, x):
        if threading.get_ident() == self.thread:
            self.there.set()
            assert self.on.wait(30)
        return super().forward(x)


def stopping(work):
    """A model as `managed` makes it; what does work(model, x) on a thread that stays in one of its layers."""
    model = made(Chain)
    model.layers[2] = stops = Stops()
    ref = made(Chain)
    ref.load_state_dict(model.state_dict())
    stagehand.layer(model, vram_budget=4 * ONE, device=device(256 * ONE))
    x = torch.randn(2, D)

    def stays():
        stops.thread = threading.get_ident()
        with torch.no_grad():
            work(model, x)

    return model, ref, x, stops, stays


def test_a_part_beside_a_pass_of_another_thread_leaves_its_step_alone():
    model, ref, x, stops, passes = stopping(lambda model, x: model(x))
    session = runtime(model).session
    with torch.no_grad():
        want, part = ref(x), ref.layers[0](x)
        assert same(model(x), want)

    def parts():
        assert stops.there.wait(30)
        model.extra = nn.Parameter(torch.zeros(D * D))
        with torch.no_grad():
            assert same(model.layers[0](x), part)
        assert session.stay.reserved == 0  # the step of the pass goes on: its places stay as they are
        stops.on.set()

    assert in_time(passes, parts) == []
    with torch.no_grad():
        assert same(model(x), want)
    assert session.stay.reserved == ONE and within(model)
    runtime(model).shutdown()


def test_a_part_of_another_thread_that_goes_on_with_the_step_is_no_error():
    model, ref, x, stops, part = stopping(lambda model, x: model.layers[2](x))
    session = runtime(model).session
    refusals, asking = [], session.stay.asking

    def goes_on(call, *args):
        refusals.append(args)
        raise stagehand.InvalidStateTransitionError("inside a step", "INVALID_STATE")

    with torch.no_grad():
        want = ref(x)
        assert same(model(x), want)

    def passes():
        assert stops.there.wait(30)
        model.extra = nn.Parameter(torch.zeros(D * D))
        session.stay.asking = goes_on
        with torch.no_grad():
            assert same(model(x), want)
        assert len(refusals) == 1 and session.stay.reserved == 0
        session.stay.asking = asking
        stops.on.set()

    assert in_time(part, passes) == []
    with torch.no_grad():
        assert same(model(x), want) and session.stay.reserved == ONE and within(model)
        model.extra = nn.Parameter(torch.zeros(2 * D * D))
        session.stay.asking = goes_on
        with pytest.raises(stagehand.InvalidStateTransitionError):  # nobody else is inside
            model(x)
        session.stay.asking = asking
    runtime(model).shutdown()


def test_what_all_weights_together_once_took_is_free_for_what_comes():
    model, ref, x = managed(6)
    torch.func.jacrev(model)(x[0])
    with torch.no_grad():
        want = ref(x)
        model.extra = nn.Parameter(torch.zeros(D * D))
        for _ in range(2):
            assert same(model(x), want) and within(model)
    runtime(model).shutdown()


class Keeps(nn.Linear):
    """Its weight is held after the call."""

    held = None

    def forward(self, x):
        self.held = self.weight.detach()
        return super().forward(x)


def test_what_stays_is_not_above_the_budget_while_a_weight_is_held():
    model = made(Chain)
    model.layers[5] = keeps = Keeps(D, D, bias=False)
    ref, x = aligned_copy(model), torch.randn(2, D)
    stagehand.layer(model, vram_budget=4 * ONE, device=device(256 * ONE))
    with torch.no_grad():
        want = ref(x)
        for _ in range(3):
            keeps.held = None
            assert same(model(x), want)
        model.extra = nn.Parameter(torch.zeros(3 * D * D // 2))
        for _ in range(2):
            with pytest.raises(stagehand.StagehandOOMError, match="^extra came after wrapping.* are held"):
                model(x)
            assert within(model)
        for _ in range(2):
            keeps.held = None
            assert same(model(x), want) and within(model)
    runtime(model).shutdown()
