"""Field cases Q: threads, processes, several devices."""

from __future__ import annotations

import gc
import os
import signal
import time

import children
import file_support as f
import pytest
import support as s
import torch
from worlds import infer, managed, run

import stagehand


def wait_for(pid, limit=20):
    """The exit status of a child, or "no end"."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "no end"


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
            signal.alarm(5)
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

    for block in (1, 3, 5):
        model.blocks[block].register_forward_hook(fork)
    steps = 6
    for _ in range(steps):
        assert s.same(infer(model, x), infer(ref, x))
        assert [wait_for(child) for child in forks] == [0] * len(forks)
        forks.clear()
    run(model).shutdown()
    assert len(telemetry.read_text().splitlines()) == steps
