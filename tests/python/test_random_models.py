"""Random models and random programs under Stagehand, beside their plain twins, in slices of seeds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import card
import pytest
import random_models
import torch

FULL = bool(os.environ.get("STH_TEST_FULL"))
# Left out: what differs as the documents say, and what is known to fail.
WITHOUT = {
    "sums": "gradients of one call are summed on the device, those of several on the host (docs/training.md)",
}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
    WITHOUT["vector"] = "transforms of torch.func take no hooks for saved tensors (docs/testing.md)"
SLICE = 500 if FULL else 100  # each is a process that imports PyTorch
TRIALS = 20_000 if FULL else 100


@pytest.mark.parametrize("first", range(1, TRIALS + 1, SLICE))
def test_random_programs_give_what_the_plain_model_gives(first):
    """In a process of its own: trials are children that are forked, which a process with threads cannot do safely."""
    done = subprocess.run(
        [sys.executable, random_models.__file__, "--seed", str(first), "--trials", str(SLICE), "--without",
         ",".join(sorted(WITHOUT)), *([] if FULL else ["--no-shrink"])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tally = ast.literal_eval(re.search(r"^\{.*\}$", done.stdout, re.MULTILINE)[0])
    assert sum(tally.values()) == SLICE and tally["passed"] > SLICE // 2, tally


def test_a_weight_that_a_checkpointed_part_computes_is_computed_there_again_on_the_device():
    """The part's bias lives on the device, and its weight's original does not. The part is computed again outside of
    all managed calls. Read as between passes, the original went to checkpointing's hooks, and in forward it did not."""
    spec = random_models.spec_of(1240353, ["vector"], device=card.NAME)
    spec["setup"] |= {"double": True, "budget": "half", "link": None, "offload": 0, "optimizer": "sgd"}
    assert spec["setup"]["mode"] == "block" and spec["setup"]["trainables"] == "device"
    spec["layers"] = [{"kind": "linear", "seed": 841725111, "wrap": []},
                      {"kind": "parametrized", "seed": 190555716, "wrap": ["checkpoint"]}]
    spec["program"] = [{"do": "infer", "seed": 1053763861}, {"do": "adapt", "seed": 766720644},
                       {"do": "penalty", "seed": 967881646}]
    result = random_models.run(spec)
    assert result.outcome == "passed", result


def test_a_part_that_is_computed_again_for_its_frozen_weights_alone_calls_no_hooks_again():
    """PyTorch computes it again, since it saves the weights; here they are saved by their handles."""
    spec = random_models.spec_of(3300397, ["sums"], device=card.NAME)
    spec["setup"] |= {"budget": "half", "owned": 1 << 20, "offload": 0, "optimizer": "sgd", "trainables": "host"}
    spec["program"] = [{"do": "hook", "seed": 1018301429}, {"do": "train", "seed": 770014244}]
    result = random_models.run(spec)
    assert result.outcome == "passed", result
    assert "a part was not computed again for its weights alone" in result.notes


def test_a_difference_is_found_and_made_smaller(monkeypatch):
    """The fuzzer sees a weight that is written behind a managed model's back."""
    spec = random_models.spec_of(3, sorted(WITHOUT), ("layer",))
    spec["program"] = [{"do": "look", "seed": 2}, {"do": "infer", "seed": 4}, {"do": "look", "seed": 6}]
    real = random_models.run.__globals__["ACTIONS"]["look"]

    def tampering(side, rng):
        if side.managed:
            next(side.net.parameters()).data.mul_(1.5)
        return real[3](side, rng)

    monkeypatch.setitem(random_models.run.__globals__["ACTIONS"], "look", (*real[:3], tampering))
    result = random_models.run(spec)
    assert result.outcome == "mismatch" and "parameter" in result.detail
    smaller, found = random_models.shrunk(spec, result)
    assert found.outcome == "mismatch" and [entry["do"] for entry in smaller["program"]] == ["look"]
