"""Several models on one simulated device: bit-equal results, the cap never passed, what is reserved stays."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import stagehand  # noqa: E402
import support as s  # noqa: E402
from stagehand import ResidentPriority, _core  # noqa: E402


class Model:
    """A wrapped Stack beside its resident twin. kind: "layer" or "block" mode."""

    def __init__(self, device, blocks, budget, kind="layer", seed=0, frozen=True, **options):
        self.model = s.made(s.Stack, blocks, 48, seed=seed, frozen=frozen)
        self.size = s.nbytes(self.model)
        self.ref = s.aligned_copy(self.model)
        self.x = self.model.example()
        with torch.no_grad():
            self.want = self.ref(*self.x)
        if kind == "layer":
            stagehand.layer(self.model, vram_budget=budget, device=device, inference_mode=frozen, **options)
            self.runtime = self.model._stagehand_layer_runtime
        else:
            self.runtime = stagehand.StagehandRuntime(
                self.model, stagehand.StagehandConfig(vram_budget=budget), inference_mode=frozen, device=device,
                **options)

    def run(self):
        with torch.no_grad():
            assert s.same(self.model(*self.x), self.want)
        return self

    @property
    def core(self):
        return self.runtime.session.core

    @property
    def occupied(self) -> int:
        """Bytes on the device by the model's own count."""
        session = self.runtime.session
        return session.core.stats()["device_bytes"] + (0 if session.stay.away else session.stay.reserved)

    @property
    def moved(self) -> int:
        return self.core.stats()["h2d_bytes"]


@pytest.fixture
def shared():
    """device(bytes, **options), closed with everything on it at the end, when nothing must be left."""
    devices = []

    def make(nbytes, **options):
        options = {"virtual_time": True, "link_bytes_per_s": 10 ** 9, **options}  # the same plans every time
        devices.append(_core.Device("sim", memory_bytes=nbytes, **options))
        return devices[-1]

    yield make
    for device in devices:
        for session in stagehand.sessions.opened():
            if session.target.core is device:
                for name in ("_stagehand_layer_runtime", "_stagehand_runtime"):
                    if name in session.model.__dict__:
                        session.model.__dict__[name].shutdown()
        gc.collect()
        account = device.residency()
        assert account["occupied"] == 0 and account["runtimes"] == 0
        assert account["peak"] <= account["cap"]
        info = device.info()
        assert info["memory_free"] == info["memory_total"]


# ---------------------------------------------------------------------- the pipeline


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_a_pipeline_of_four_models_in_less_than_any_two(shared, kind):
    """A text encoder that is kept, a main model larger than the device that is reserved, two upscalers as guests."""
    cap = 400_000
    device = shared(cap)
    text = Model(device, 3, 200_000, kind, 1)
    main = Model(device, 9, 110_000, kind, 2)
    up1 = Model(device, 5, 300_000, kind, 3)
    up2 = Model(device, 6, 320_000, kind, 4)
    sizes = sorted(m.size for m in (text, main, up1, up2))
    assert sizes[0] + sizes[1] > cap and main.size > cap

    for job in range(3):
        with text.runtime.keep_resident():
            text.run()
            main.runtime.reserve_for_resident()
            reserved = device.residency()["primary"]
            assert 0 < reserved == main.occupied < main.size
            main.run().run()
            reserved, kept, moved = main.occupied, text.occupied, text.moved
            yields, left = main.core.stats()["yields"], cap - reserved - kept
            for guest in (up1, up2):
                assert guest.size > left
                with main.runtime.as_guest(guest.runtime):
                    guest.run().run()
                    assert guest.occupied <= cap - reserved - kept
                    main.run()
                assert guest.occupied == 0
                assert device.residency()["occupied"] == reserved + kept
            assert text.occupied == kept
            text.run()
            assert text.core.prediction()["bytes_per_step"] == 0  # all of it is there, and it never moved again
            assert text.moved == moved
        assert main.core.stats()["yields"] == yields
        main.runtime.release_reservation()
        assert device.residency()["primary"] == 0
    assert device.residency()["peak"] <= cap


def test_bytes_moved_are_those_of_the_plans(shared):
    device = shared(440_000)
    main, guest = Model(device, 9, 200_000, seed=1), Model(device, 5, 400_000, seed=2)
    main.run().run().run()
    main.runtime.reserve_for_resident()
    main.run().run()
    planned = main.core.prediction()["bytes_per_step"]
    assert planned > 0
    for visit in range(4):
        before = guest.moved
        with main.runtime.as_guest(guest.runtime):
            for _ in range(3):
                moved = main.moved
                main.run()
                assert main.moved - moved == planned  # a step's copies, also beside a guest
                guest.run()
            plan, residents = guest.core.prediction(), guest.core.stats()["resident_bytes"]
        assert 0 < plan["bytes_per_step"] < guest.size
        most = residents + 3 * plan["bytes_per_step"] + plan["ring_bytes"]  # what it fetches ahead is not used
        assert visit == 0 or guest.moved - before <= most


# ---------------------------------------------------------------------- defects of the predecessor, one by one


def test_keep_resident_protects_the_target_and_not_the_caller(shared):
    device = shared(330_000)
    a, caller = Model(device, 4, 250_000, seed=1).run(), Model(device, 1, 75_000, seed=3).run()
    b, held = Model(device, 4, 250_000, seed=2), a.occupied
    caller.runtime.reserve_for_resident()
    with caller.runtime.keep_resident(a.model):  # a model stands for its runtime
        account = device.residency()
        assert account["kept"] == held
        with pytest.raises(stagehand.StagehandOOMError, match="kept resident"):
            b.run()
        assert a.occupied == held
    b.run()
    assert a.occupied < held
    assert caller.core.stats()["yields"] == 0


def test_nested_blocks_end_with_the_outermost(shared):
    device = shared(270_000)
    a, b = Model(device, 4, 250_000, seed=1).run(), Model(device, 4, 250_000, seed=2)
    held = a.occupied
    with a.runtime.keep_resident():
        with a.runtime.keep_resident():
            pass
        with pytest.raises(stagehand.StagehandOOMError):
            b.run()
        assert a.occupied == held
    with b.runtime.as_guest():
        with a.runtime.as_guest(b.runtime):
            b.run()
        assert b.occupied > 0
        b.run()
    assert b.occupied == 0


def test_reserving_twice_reserves_once(shared):
    device = shared(600_000)
    a = Model(device, 4, 200_000).run()
    before = device.residency()
    for _ in range(3):
        a.runtime.reserve_for_resident()
        assert device.residency()["primary"] == a.occupied == before["occupied"]
    a.runtime.reserve_for_resident(priority=ResidentPriority.SECONDARY)
    assert device.residency()["primary"] == 0 and device.residency()["secondary"] == a.occupied
    a.runtime.release_reservation()
    a.runtime.release_reservation()
    after = device.residency()
    assert after["secondary"] == after["primary"] == 0 and after["occupied"] == before["occupied"]
    with pytest.raises(TypeError, match="ResidentPriority"):
        a.runtime.reserve_for_resident(priority="primary")


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_a_guest_leaves_with_norms_and_buffers_and_comes_back_right(shared, kind):
    device = shared(500_000)
    a, b = Model(device, 3, 150_000, kind, 1).run(), Model(device, 4, 300_000, kind, 2)
    with a.runtime.as_guest(b.runtime):
        pass
    memory = device.info()["memory_free"]
    for _ in range(3):
        with a.runtime.as_guest(b.runtime):
            b.run()
            assert device.info()["memory_free"] < memory
        assert b.occupied == 0
        assert device.info()["memory_free"] == memory  # really, not by its own count alone
        for name, value in b.model.state_dict().items():  # at rest all values are on the host, and right
            assert s.same(value, b.ref.state_dict()[name])
    b.run()  # outside of a block it is a model like others
    assert b.occupied > 0


def test_a_primary_is_never_evicted_and_the_error_says_what_is_missing(shared):
    device = shared(330_000)
    main, guest = Model(device, 9, 300_000, seed=1), Model(device, 4, 250_000, seed=2)
    main.runtime.reserve_for_resident()
    held = main.occupied
    for call in (guest.run, guest.runtime.as_guest().__enter__, guest.runtime.keep_resident().__enter__,
                 guest.runtime.reserve_for_resident):
        with pytest.raises(stagehand.StagehandOOMError) as caught:
            call()
        text = str(caught.value)
        assert "reserved as PRIMARY" in text and str(held) in text
        assert "330000" in text and f"'{guest.runtime.name}' needs" in text
    assert main.occupied == held and main.core.stats()["yields"] == 0
    main.run()
    main.runtime.release_reservation()
    guest.run()


def test_a_secondary_gives_way_after_everything_else_and_only_where_a_load_would_fail(shared):
    device = shared(460_000)
    second, other = Model(device, 4, 250_000, seed=1).run(), Model(device, 3, 200_000, seed=2).run()
    asker = Model(device, 5, 300_000, seed=3)
    second.runtime.reserve_for_resident(priority=ResidentPriority.SECONDARY)
    held = second.occupied
    asker.run()  # what is not reserved is enough to work
    assert second.occupied == held and other.core.stats()["yields"] > 0
    asker.runtime.reserve_for_resident()
    other.run()  # and now it is not
    assert second.core.stats()["yields"] == 1 and asker.core.stats()["yields"] == 0
    second.run()


# ---------------------------------------------------------------------- hand-over, exceptions, the end


def test_the_next_model_is_fetched_while_the_last_one_runs(shared):
    device = shared(800_000)
    now, then = Model(device, 4, 300_000, seed=1).run(), Model(device, 4, 300_000, seed=2)
    with then.runtime.as_guest():
        then.run()
    seen = []

    def hook(*_):
        if not seen:
            seen.append(then.moved)
            now.runtime.reserve_for_resident(then.runtime)
            seen.append(then.moved)

    handle = now.model.blocks[2].register_forward_pre_hook(hook)
    now.run()
    handle.remove()
    assert seen[1] - seen[0] == then.core.stats()["resident_bytes"] > 0
    copies = then.core.stats()["copies"]
    then.run()
    if then.core.prediction()["bytes_per_step"] == 0:
        assert then.core.stats()["copies"] == copies


@pytest.mark.parametrize("kind", ["layer", "block"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exceptions_end_the_blocks(shared, kind, error):
    device = shared(440_000)
    main, guest = Model(device, 9, 200_000, kind, 1), Model(device, 4, 300_000, kind, 2)

    def fail(*_):
        raise error("on purpose")

    handle = guest.model.blocks[1].down.register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(error, match="on purpose"):
            with main.runtime.keep_resident(), main.runtime.as_guest(guest.runtime):
                if kind == "block":
                    guest.runtime.begin_step()
                with torch.no_grad():
                    guest.model(*guest.x)
        account = device.residency()
        assert account["kept"] == account["primary"] == 0
        assert guest.occupied == 0
    handle.remove()
    with main.runtime.as_guest(guest.runtime):
        guest.run()
    main.run()


def test_a_target_may_be_shut_down_while_it_is_protected(shared):
    device = shared(700_000)
    host, target = Model(device, 3, 150_000, seed=1).run(), Model(device, 4, 250_000, seed=2).run()
    host.runtime.reserve_for_resident(target.runtime)
    with host.runtime.keep_resident(target.runtime):
        with host.runtime.as_guest(target.runtime):
            target.runtime.shutdown()
            account = device.residency()
            assert account["primary"] == account["kept"] == 0 and account["occupied"] == host.occupied
    host.runtime.release_reservation(target.runtime)
    with pytest.raises(stagehand.InvalidStateTransitionError, match="shut down"):
        host.runtime.reserve_for_resident(target.runtime)
    assert s.same(target.model(*target.x), target.want)  # plain again


def test_tensors_that_outlive_a_guest_are_said_and_go_later(shared):
    device = shared(600_000)
    guest = Model(device, 4, 300_000)
    held = []
    handle = guest.model.blocks[0].up.register_forward_hook(lambda m, *_: held.append(m.weight.view(-1)))
    with pytest.warns(RuntimeWarning, match="still held"):
        with guest.runtime.as_guest():
            guest.run()
    handle.remove()
    assert guest.occupied > 0
    assert s.same(held[0], guest.ref.blocks[0].up.weight.view(-1))
    held.clear()
    other = Model(device, 12, 600_000, seed=1).run()
    assert guest.occupied == 0
    other.run()


def test_backward_of_a_guest_that_has_left_brings_it_back(shared):
    device = shared(900_000)
    guest = Model(device, 3, 400_000, frozen=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with guest.runtime.as_guest():
            out = guest.model(*guest.x)
    out.sum().backward()
    guest.ref(*guest.x).sum().backward()
    for got, want in zip(guest.model.parameters(), guest.ref.parameters()):
        assert s.same(got.grad, want.grad)


def test_training_models_give_way_between_steps(shared):
    device = shared(330_000)
    a, b = Model(device, 3, 250_000, seed=1, frozen=False), Model(device, 4, 250_000, seed=2)
    sgd, rsgd = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a.model, a.ref))
    for _ in range(3):
        for model, optimizer in ((a.model, sgd), (a.ref, rsgd)):
            optimizer.zero_grad()
            model(*a.x).square().mean().backward()
            optimizer.step()
        b.run()
    assert a.core.stats()["yields"] + b.core.stats()["yields"] >= 1
    for got, want in zip(a.model.parameters(), a.ref.parameters()):
        assert s.same(got, want)


def test_a_conversion_keeps_the_protection(shared):
    device = shared(800_000)
    a = Model(device, 4, 300_000).run()
    a.runtime.reserve_for_resident()
    with a.runtime.keep_resident():
        a.model.double()
        account = device.residency()
        assert account["primary"] == account["occupied"] == a.occupied
    assert device.residency()["primary"] == a.occupied


# ---------------------------------------------------------------------- threads


def test_guests_in_threads_take_turns(shared):
    """Any two of the guests are more than what is left beside the main model, which runs as well."""
    device = shared(440_000, virtual_time=False)
    main = Model(device, 9, 200_000, seed=1)
    main.runtime.reserve_for_resident()
    guests = [Model(device, 4, 250_000, seed=2 + i) for i in range(3)]
    errors = []

    def visit(guest):
        try:
            for _ in range(4):
                with main.runtime.as_guest(guest.runtime):
                    guest.run().run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=visit, args=(guest,)) for guest in guests]
    for thread in threads:
        thread.start()
    for _ in range(6):
        main.run()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert all(guest.occupied == 0 for guest in guests)
    assert main.core.stats()["yields"] == 0
    assert device.residency()["peak"] <= 440_000


# ---------------------------------------------------------------------- the device's budget, errors


def test_the_devices_budget_is_the_cap(shared):
    device = shared(1_000_000, budget="330KB")
    assert device.budget == 330_000
    a, b = Model(device, 4, 250_000, seed=1).run(), Model(device, 4, 250_000, seed=2).run()
    assert device.residency()["peak"] <= 330_000
    with pytest.raises(stagehand.StagehandOOMError, match="occupy now"):
        device.set_budget(100_000)
    device.set_budget(None)
    assert device.budget is None and device.residency()["cap"] == 1_000_000
    a.run()
    assert a.occupied > 240_000 and b.occupied > 0
    for wrong in (0, "0B", -1, "many"):
        with pytest.raises((ValueError, stagehand.StagehandError)):
            _core.Device("sim", budget=wrong)


def test_models_that_fit_together_never_give_way(shared):
    device = shared(500_000)
    a, b = Model(device, 4, 250_000, seed=1), Model(device, 4, 250_000, seed=2)
    for _ in range(3):
        a.run()
        b.run()
    assert a.core.stats()["yields"] == b.core.stats()["yields"] == 0
    assert not a.core.parked and not b.core.parked


def test_without_a_budget_a_second_model_counts_with_what_others_give_way(shared):
    device = shared(400_000)
    a, b = Model(device, 8, None, seed=1), Model(device, 8, None, seed=2)
    for model in (a, b):  # a budget that is found begins with half
        for _ in range(4):
            model.run()
    assert b.runtime.stats["budget"] > 250_000 and b.occupied > 250_000


def test_targets_on_other_devices_and_plain_models_are_refused(shared):
    a, b = Model(shared(500_000), 3, 250_000), Model(shared(500_000), 3, 250_000)
    with pytest.raises(ValueError, match="another Device"):
        a.runtime.reserve_for_resident(b.runtime)
    with pytest.raises(ValueError, match="another Device"):
        with a.runtime.as_guest(b.runtime):
            pass
    with pytest.raises(ValueError, match="neither a runtime nor a model"):
        with a.runtime.keep_resident(torch.nn.Linear(2, 2)):
            pass


def test_a_guest_cannot_leave_inside_its_own_call(shared):
    device = shared(600_000)
    guest = Model(device, 3, 250_000)
    block = guest.runtime.as_guest()
    block.__enter__()
    handle = guest.model.blocks[1].register_forward_pre_hook(lambda *_: block.__exit__(None, None, None))
    with pytest.raises(stagehand.InvalidStateTransitionError, match="inside a call"):
        guest.run()
    handle.remove()
    guest.run()


def test_opening_takes_only_what_is_free(shared):
    """Opening asks nobody to give way: what does not fit now comes with its first pass."""
    device = shared(270_000)
    a = Model(device, 4, 250_000, seed=1).run()
    held = a.occupied
    b = Model(device, 4, 300_000, seed=2)
    assert b.core.parked and a.occupied == held
    b.run()
    assert not b.core.parked


# ---------------------------------------------------------------------- what is outside the places


def kept(model):
    """A step of it in all that it wants: two that take turns would share what there is instead."""
    with model.runtime.keep_resident():
        model.run()


def test_a_model_that_gives_way_leaves_with_norms_and_buffers(shared):
    device = shared(270_000)
    a, b = Model(device, 4, 250_000, seed=1).run(), Model(device, 4, 250_000, seed=2)
    outside = a.runtime.session.stay.reserved
    assert outside > 0
    for _ in range(3):
        for comes, leaves in ((b, a), (a, b)):
            kept(comes)
            assert leaves.core.parked and leaves.occupied == 0
            assert device.residency()["occupied"] == comes.occupied
            assert device.info()["memory_free"] >= 270_000 - comes.occupied  # which is rounded up
            for name, value in leaves.model.state_dict().items():
                assert s.same(value, leaves.ref.state_dict()[name])


def test_room_that_norms_alone_had_is_found(shared):
    """What is outside the places of the idle model is more than the device has beside the other's smallest plan."""
    device = shared(120_000)
    a = Model(device, 9, 110_000, seed=1)
    a.run()
    held = a.runtime.session.stay.reserved
    b = Model(device, 2, 119_000, seed=2)
    least = b.runtime.session.stay.reserved + max(unit.nbytes for unit in b.runtime.session.units)
    device.set_budget(max(device.residency()["occupied"], least + held // 2))
    assert a.occupied + least > device.residency()["cap"]
    b.run()
    assert a.occupied == 0
    a.run()


def test_what_an_optimizer_is_about_to_step_stays_where_it_is(shared):
    """Without gradients it goes, and comes back for the next step."""
    device = shared(270_000)
    a, b = Model(device, 4, 250_000, seed=1, frozen=False), Model(device, 4, 250_000, seed=2)
    outside = a.runtime.session.stay.reserved
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (a.model, a.ref)]
    for step in range(3):
        for model, optimizer in zip((a.model, a.ref), optimizers):
            model(*a.x).square().mean().backward()
            if model is a.model:
                a.runtime.session.steps.close_finished_step()
                kept(b)
                assert a.occupied == outside
            optimizer.step()
            optimizer.zero_grad()
        kept(b)
        assert a.occupied == 0
    for got, want in zip(a.model.parameters(), a.ref.parameters()):
        assert s.same(got, want)


def test_an_optimizers_step_brings_back_what_a_guest_took_home(shared):
    device = shared(900_000)
    guest = Model(device, 3, 400_000, frozen=False)
    sgd, rsgd = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (guest.model, guest.ref))
    with guest.runtime.as_guest():
        guest.model(*guest.x).sum().backward()
    assert guest.occupied == 0 and guest.runtime.session.stay.away
    sgd.step()
    assert not guest.runtime.session.stay.away
    guest.ref(*guest.x).sum().backward()
    rsgd.step()
    for got, want in zip(guest.model.parameters(), guest.ref.parameters()):
        assert s.same(got, want)


def test_a_part_that_another_thread_runs_keeps_its_norms(shared):
    """Between two leases of a part, nothing of it is leased: it may be made to give way, and its norms must stay."""
    device = shared(270_000, virtual_time=False)
    a, b = Model(device, 4, 250_000, seed=1).run(), Model(device, 4, 250_000, seed=2)
    inside, go_on, seen = threading.Event(), threading.Event(), []
    block = a.model.blocks[0]

    def wait(*_):
        inside.set()
        go_on.wait(60)
        seen.append(a.runtime.session.stay.away)

    handle = block.norm.register_forward_pre_hook(wait)

    def part():
        with torch.no_grad():
            seen.append(block(a.x[0]))

    thread = threading.Thread(target=part)
    thread.start()
    assert inside.wait(60)
    b.run()
    go_on.set()
    thread.join(60)
    handle.remove()
    assert seen[0] is False and s.same(seen[1], a.ref.blocks[0](a.x[0]))
    b.run()
    a.run()


def test_models_that_come_at_once_in_threads_do_not_wait_for_each_others_norms(shared):
    """What is outside the places of two leaves too little for the smallest plan of a third."""
    device = shared(1_000_000, virtual_time=False, budget=66_000)
    models = [Model(device, 4, 65_000, seed=i) for i in range(4)]
    session = models[0].runtime.session
    assert 3 * session.stay.reserved + max(unit.nbytes for unit in session.units) > 66_000
    errors = []

    def work(model):
        try:
            for _ in range(4):
                model.run()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(150)
    assert not errors and not any(thread.is_alive() for thread in running)


def test_running_statistics_go_along_and_come_back(shared):
    """Buffers that a forward changes, and a buffer that two modules share."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)) for _ in range(6))
            self.blocks[1][1].running_mean = self.blocks[0][1].running_mean

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    device = shared(120_000)
    model = s.made(Normed).train()
    ref = s.aligned_copy(model)
    stagehand.layer(model, vram_budget=110_000, device=device)
    other = Model(device, 3, 118_000, seed=1)
    with s.threads(1), torch.no_grad():
        for _ in range(3):
            x = torch.randn(16, 64)
            assert s.same(model(x), ref(x))
            kept(other)
            assert model._stagehand_layer_runtime.session.stay.away
            for name, value in model.state_dict().items():
                assert s.same(value, ref.state_dict()[name]), name
    assert model.blocks[0][1].running_mean is model.blocks[1][1].running_mean


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_a_small_module_that_is_called_alone_brings_its_model_back(shared, kind):
    """As `vae.post_quant_conv`, outside any forward of the model: on a card its weights would be on the host."""
    device = shared(3 << 20)
    one = Model(device, 8, "1MB", kind).run()
    norm, hidden = next((module, torch.randn(2, 48)) for module in one.model.modules()
                        if isinstance(module, torch.nn.LayerNorm))
    want = norm(hidden)
    assert "forward" not in norm.__dict__
    with one.runtime.as_guest():
        pass
    assert one.runtime.session.stay.away and "forward" in norm.__dict__
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert "forward" not in copied.__dict__ and "__getstate__" not in copied.__dict__
    assert torch.equal(norm(hidden), want) and not one.runtime.session.stay.away
    assert "forward" not in norm.__dict__
    one.run()
    with one.runtime.as_guest():
        pass
    assert one.runtime.session.stay.away and "forward" in norm.__dict__
    norm.forward = forward = lambda x: type(norm).forward(norm, x) + 1  # a program's own
    assert torch.equal(norm(hidden), want + 1)
    one.runtime.shutdown()
    assert norm.__dict__["forward"] is forward and "__getstate__" not in norm.__dict__
