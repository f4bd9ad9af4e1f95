"""Field cases Q: threads, processes, several devices."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading

import card
import children
import file_support as f
import pytest
import support as s
import torch
from worlds import infer, managed, run, state, train

import stagehand


def test_112_children_that_are_forked_while_copies_and_reads_are_under_way_end(tmp_path):
    """Whatever lock a reader, a copy or a pass held at the time of the fork; nothing of the parent's is written."""
    model = s.made(s.Stack, 6, 64)
    ref = s.aligned_copy(model)
    f.save(tmp_path / "m.safetensors", f.state(model))
    budget = s.tight_budget(model)
    telemetry = tmp_path / "t.jsonl"
    stagehand.layer(model, vram_budget=budget, device=s.device(budget, 2e7), source=tmp_path / "m.safetensors",
                    inference_mode=True, telemetry=str(telemetry))
    x = model.example()[0]
    forks = []

    def fork(*_):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(240)
            try:
                run(model).shutdown()
                os._exit(3)
            except stagehand.StagehandError as error:
                if "forked" not in str(error):
                    os._exit(4)
            try:
                run(model).stats
                os._exit(5)
            except stagehand.StagehandError:
                pass
            session = run(model).session
            core = session.core
            core.close()  # what a destructor does at the end of a child
            session.core = None
            session.__dict__.clear()
            del core, session
            gc.collect()
            os._exit(0)
        forks.append(child)

    for block in (1, 4):
        model.blocks[block].register_forward_hook(fork)
    steps = 4
    for _ in range(steps):
        assert s.same(infer(model, x), infer(ref, x))
        assert [s.wait_for(child) for child in forks] == [0] * len(forks)
        forks.clear()
    run(model).shutdown()
    assert len(telemetry.read_text().splitlines()) == steps


# 112 (a) and (b), and 114: test_lifecycle.py::test_the_interpreter_ends_quietly, with a DataLoader among the ends.


@pytest.mark.alone
def test_114_a_program_that_ends_in_a_backward_with_files_and_telemetry_ends_quietly(tmp_path):
    """sys.exit in a hook of backward, gradients under way, weights from a file, an optimizer's state in another."""
    done = children.run(f"""
        import sys
        model = support.made(support.Stack, 6, 64, frozen=False)
        model.blocks.requires_grad_(False)
        folder = {str(tmp_path)!r}
        file_support.save(folder + "/m.safetensors", file_support.state(model))
        support.wrap(model, support.tight_budget(model), 2e7, source=folder + "/m.safetensors",
                     telemetry=folder + "/t.jsonl")
        optimizer = stagehand.OffloadedAdamW([p for p in model.parameters() if p.requires_grad], state_path=folder)
        x = model.example()[0].requires_grad_()
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        x.register_hook(lambda grad: sys.exit(5))
        model(x).sum().backward()
    """)
    assert done.status == 5 and done.stderr == "", done.stderr
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "t.jsonl"]


# ---------------------------------------------------------------------- own cases


def on_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_own_passes_of_two_tasks_may_end_in_any_order():
    """Contexts of one thread that do not nest, as of two asyncio tasks: the first one in is the first one out."""
    model, ref = managed(s.Stack, 6, 32, mode="block", link=None)
    runtime, x = run(model), model.example()[0]

    async def task(enter, leave):
        await enter.wait()
        with runtime.managed_forward():
            first = infer(model, x)
            entered.append(1)
            await leave.wait()
            return first, infer(model, x)

    async def main():
        a, b, end_a, end_b = (asyncio.Event() for _ in range(4))
        tasks = [asyncio.create_task(task(a, end_a)), asyncio.create_task(task(b, end_b))]
        for event in (a, b, end_a, end_b):
            event.set()
            for _ in range(5):
                await asyncio.sleep(0)
        return [await t for t in tasks]

    entered = []
    for outs in asyncio.run(main()):
        assert s.same(list(outs), [infer(ref, x)] * 2)
    assert len(entered) == 2 and runtime.session.local.depth == 0
    master = model.blocks[1].up.weight
    assert master is dict.__getitem__(model.blocks[1].up._parameters, "weight")
    assert s.same(infer(model, x), infer(ref, x))
    stats = runtime.stats
    assert stats["leased_bytes"] == 0 and not runtime.session.steps.is_open
    runtime.shutdown()


def test_own_a_generator_that_is_dropped_inside_a_pass_leaves_a_model_at_rest():
    model, ref = managed(s.Stack, 6, 32, mode="block", link=None)
    x = card.there(model.example()[0])

    def blocks():
        with run(model).managed_forward():
            y = model.inp(x)
            for block in model.blocks:
                y = block(y)
                yield y

    with torch.no_grad():
        walk = blocks()
        for _ in range(3):
            next(walk)
        del walk
        gc.collect()
        assert run(model).session.local.depth == 0
        assert s.same(model(x), ref(x))
        walk = blocks()
        next(walk)
        said = []  # dropped on another thread than that which began it

        def close():
            try:
                walk.close()
            except stagehand.StagehandError as error:
                said.append(str(error))

        on_a_thread(close)
        assert len(said) == 1 and "another thread" in said[0]
        assert model.inp.weight is dict.__getitem__(model.inp._parameters, "weight")
        outs = [model(x)]
        on_a_thread(lambda: outs.append(infer(model, x)))
        assert s.same(outs, [ref(x)] * 2)
    assert run(model).session.local.depth == 0
    assert run(model).stats["leased_bytes"] == 0


def test_own_a_signal_handler_may_run_the_model():
    """In the middle of a forward, of a step that waits, and of a backward."""
    model, ref = managed(s.Stack, 6, 32, frozen=False, link=2e7)
    x, seen, inside = model.example()[0], [], []
    want = infer(ref, x)

    def handler(*_):
        if not inside:
            inside.append(1)
            seen.append(s.same(infer(model, x), want))
            inside.clear()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        fire = lambda *_: os.kill(os.getpid(), signal.SIGUSR1)  # noqa: E731
        handle = model.blocks[2].register_forward_hook(fire)
        assert s.same(infer(model, x), want)
        out = model(x)
        out.register_hook(fire)
        out.pow(2).sum().backward()
        fire()
        handle.remove()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(seen) >= 4 and all(seen)
    ref(x).pow(2).sum().backward()
    assert s.same([p.grad for p in model.parameters()], [p.grad for p in ref.parameters()])


def test_own_threads_train_models_of_their_own_on_one_device():
    """Each with activations that are spilled, on one device; one is shut down while the others run."""
    budget, models = 0, []
    for seed in range(3):
        model = s.made(s.Stack, 4, 32, frozen=False, seed=seed)
        models.append((model, s.aligned_copy(model)))
        budget += s.tight_budget(model)
    device = s.device(budget, 10**9)
    for model, _ in models:
        stagehand.layer(model, vram_budget=s.tight_budget(model), device=device)
    failures = []

    def work(model, ref, steps, x):
        try:
            for _ in range(steps):
                assert s.same(train(model, x), train(ref, x))
            run(model).shutdown()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model, ref, 3 + 4 * i, model.example()[0]))
               for i, (model, ref) in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert device.residency()["occupied"] == 0


def test_own_a_thread_that_ends_inside_a_pass_blocks_nobody():
    """A thread that never leaves its pass: another one that wants a pass waits, and ends with the program."""
    done = children.run("""
        import threading, time, sys
        model = support.made(support.Stack, 4, 32)
        support.wrap(model, support.tight_budget(model))
        x, inside = model.example()[0], threading.Event()
        def stay(*_):
            inside.set()
            time.sleep(1000)
        handle = model.blocks[1].register_forward_hook(stay)
        def work():
            with torch.no_grad():
                model(x)
        threading.Thread(target=work, daemon=True).start()
        inside.wait()
        handle.remove()
        threading.Thread(target=work, daemon=True).start()
        print("end")
    """)
    assert done.status == 0 and done.stderr == "", done.stderr


def test_own_pickles_and_copies_made_in_another_thread_during_a_pass_are_plain():
    import copy

    model, ref = managed(s.Stack, 6, 32, link=2e7)
    x, copies = model.example()[0], []

    def work():
        copies.append(copy.deepcopy(model))
        copies.append({k: v.clone() for k, v in model.state_dict().items()})

    def start(*_):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)

    model.blocks[3].register_forward_hook(start)
    assert s.same(infer(model, x), infer(ref, x))
    plain, saved = copies
    assert s.same(list(saved.values()), state(ref)) and "_stagehand_layer_runtime" not in vars(plain)
    assert type(plain.blocks[1]._parameters) is type(ref.blocks[1]._parameters)
    plain.blocks[3]._forward_hooks.clear()
    assert s.same(infer(s.aligned_copy(plain), x), infer(ref, x))
