"""Host memory of several processes on one node that stream the same weights: files have one copy for all in the page
cache, weights in RAM one in memory that the processes map."""

import copy
import gc
import io
import os
import pickle
import signal
import time

import card
import children
import pytest
import torch
from file_support import save
from torch import nn

import stagehand
from stagehand import _core

RANKS, WIDTH, LAYERS, BUDGET = 4, 1024, 64, 20 << 20  # what else a rank takes is little beside 5 % of them
# A card's own memory counts there, and what its driver takes of the host's does not.
PSS = pytest.mark.skipif(card.ON_CARD or not os.path.exists("/proc/self/smaps_rollup"),
                         reason="about the simulated device, or this kernel tells no PSS")

RANK = """
import ctypes
import gc
import torch
import stagehand
from stagehand import _core
from test_host_copies import BUDGET, build


def pss() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


def trim():
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


def run(model):
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, model[0].in_features))
    return stagehand.runtime(model)


{join}
few = build()[:4]  # whatever a first pass takes beside weights and rings, as buffers of the matrix product
stagehand.layer(few, vram_budget=BUDGET, device="sim")
run(few).shutdown()
del few
gc.collect()
trim()
before = pss()
device = _core.Device("sim", memory_bytes=BUDGET, poison=False)  # poisoned memory is kept after its end
runtime = run({wrapped})
assert runtime.plan["bytes_per_step"] > 0
print("loaded", flush=True)
open({gate!r}).close()  # until all have loaded
stats = runtime.stats
trim()
print("took", pss() - before, "ring", stats["device_peak"] + stats["staging_bytes"], flush=True)
open({end!r}).close()
"""


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def took(tmp_path, wrapped: str, joins=None) -> tuple[int, int]:
    """Bytes of host memory that the ranks take together, and of rings among them: the memory of the simulated device
    is host memory, too. wrapped: the model, in Python. joins: number of a rank -> how it joins the others."""
    gates = [tmp_path / "gate", tmp_path / "end"]
    for gate in gates:
        os.mkfifo(gate)
    ranks = [children.start(RANK.format(wrapped=wrapped, join=joins(number) if joins else "", gate=str(gates[0]),
                                        end=str(gates[1]))) for number in range(RANKS)]
    for rank in ranks:
        rank.said("loaded")
    with open(gates[0], "w"):
        for rank in ranks:
            rank.said("took")
    with open(gates[1], "w"):
        done = [rank.wait() for rank in ranks]
    assert [each.status for each in done] == [0] * RANKS
    words = [each.stdout.split() for each in done]  # loaded took N ring N
    return tuple(sum(int(each[number]) for each in words) for number in (2, 4))


def nbytes_of(model) -> int:
    return sum(param.nbytes for param in model.parameters())


@PSS
def test_ranks_that_stream_the_same_files_share_one_copy(tmp_path):
    model = build()
    save(tmp_path / "w.safetensors", {name: param.detach() for name, param in model.named_parameters()})
    path = str(tmp_path / "w.safetensors")
    memory, rings = took(tmp_path, f"stagehand.load(build, {path!r}, vram_budget=BUDGET, device=device)")
    assert memory <= 1.05 * nbytes_of(model) + rings
    assert memory < RANKS * nbytes_of(model)  # as with a copy in each


# ---------------------------------------------------------------------- weights in RAM

IN_RAM = "stagehand.layer(build().requires_grad_(False), vram_budget=BUDGET, device=device)"


def gloo(path):
    return lambda number: (f"torch.distributed.init_process_group('gloo', init_method='file://{path}', "
                           f"rank={number}, world_size={RANKS})")


@PSS
@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
                    reason="this PyTorch has no gloo")
def test_ranks_of_a_group_that_have_the_same_weights_in_ram_share_one_copy(tmp_path):
    memory, rings = took(tmp_path, IN_RAM, gloo(tmp_path / "meeting"))
    assert memory <= 1.05 * nbytes_of(build()) + rings


@PSS
def test_processes_that_nobody_calls_ranks_have_a_copy_each(tmp_path):
    memory, _ = took(tmp_path, IN_RAM)
    assert memory > 0.9 * RANKS * nbytes_of(build())


SHARES = """
import os
os.environ["LOCAL_WORLD_SIZE"] = "2"
import torch
import stagehand
from test_host_copies import bits, small
model = small()
{before}
x = torch.arange(4 * 64.).reshape(4, 64)
want = model(x)
stagehand.layer(model, vram_budget="1MB", device="sim")
runtime = stagehand.runtime(model)
assert all(unit.common for unit in runtime.session.units)
print("found", sum(arena.found_bytes for arena in runtime.session.arenas()), flush=True)
assert torch.equal(model(x), want) and torch.equal(model(x), want)
print("ran", flush=True)
{behind}
assert torch.equal(model(x), want)
print("bits", bits(model))
"""


def small():
    torch.manual_seed(SEED)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).requires_grad_(False)


SEED = os.getpid()  # weights of other runs of these tests are none of ours


def other_weights() -> None:
    """From now on: those of an earlier test may still be there."""
    global SEED
    SEED += 1_000_003


def bits(model) -> int:
    return sum(hash(param.detach().numpy().tobytes()) for param in model.parameters()) & 0xffffffff


def share(before: str = "", behind: str = ""):
    script = f"import test_host_copies\ntest_host_copies.SEED = {SEED}\n" + SHARES
    return children.start(script.format(before=before, behind=behind))


def found(child) -> int:
    child.said("found")
    return int(open(child.out).read().split()[1])


ONE = 64 * 64 * 4  # bytes of a weight


def test_a_rank_with_one_other_weight_shares_the_others():
    first = share(behind="import time; time.sleep(1e6)")
    first.said("ran")
    second = share(before="model[2].weight.data[63, 63] += 1")
    assert found(first) == 0 and found(second) == 5 * ONE
    assert second.wait().status == 0
    assert first.kill(signal.SIGKILL).wait().status == -signal.SIGKILL


def test_a_rank_that_is_killed_in_its_set_up_stops_nobody():
    stopped = share(before="""
place, times = stagehand._core.Arena, 0
def interrupted(*args):
    print("amid", flush=True)
    import time; time.sleep(1e6)
from stagehand.session.opening import Takeover
move, count = Takeover._move_master, []
def move_two(self, *args):
    count.append(1)
    return interrupted() if len(count) == 3 else move(self, *args)
Takeover._move_master = move_two
""")
    stopped.said("amid")
    other = share()
    stopped.kill(signal.SIGKILL).wait()
    assert found(other) == 0  # what the first had written has gone with it
    assert other.wait().status == 0
    assert f"@stagehand-weights-{os.geteuid()}" not in open("/proc/net/unix").read().split()


def test_a_rank_that_is_killed_while_others_run_takes_nothing_from_them():
    writer = share(behind="while True: model(x)")
    writer.said("ran")
    other = share(behind="input_file = open({!r}); input_file.read()".format(fifo := fifo_path()))
    assert found(other) == 6 * ONE
    writer.kill(signal.SIGKILL).wait()
    late = share()  # finds them by the other
    assert found(late) == 6 * ONE
    assert late.wait().status == 0
    open(fifo, "w").close()
    assert other.wait().status == 0


def fifo_path() -> str:
    import tempfile

    path = os.path.join(tempfile.mkdtemp(), "fifo")
    os.mkfifo(path)
    return path


# In one process: a second model stands for another rank.

X = torch.arange(4 * 64.0).reshape(4, 64)


@pytest.fixture
def two(monkeypatch):
    """Two models that share, as two ranks would."""
    monkeypatch.setenv("STAGEHAND_HOST_COPY", "shared")
    other_weights()
    models = [small(), small()]
    for model in models:
        stagehand.layer(model, vram_budget="1MB", device="sim")
        model(X)
    assert [found_bytes(model) for model in models] == [0, 6 * ONE]
    yield models
    for model in models:
        if "_stagehand_layer_runtime" in vars(model):
            stagehand.runtime(model).shutdown()


def session_of(model):
    return stagehand.runtime(model).session


def found_bytes(model) -> int:
    return stagehand.runtime(model).stats["host_found_bytes"]


def in_common(model) -> list[bool]:
    return [unit.common for unit in session_of(model).units]


def write_optimizer(model):
    param = model[2].weight.requires_grad_(True)
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5).step()
    param.grad = None
    param.requires_grad_(False)


def write_in_writing(model):
    managed = "_stagehand_layer_runtime" in vars(model)
    with stagehand.runtime(model).writing() if managed else torch.no_grad():
        model[2].weight.data.numpy()[3, 4] = 5


def write_kept(model):
    KEPT[:] = [model[2].weight.data]
    KEPT[0][1, 2] = 7


def load_state(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["2.weight"] *= 2
    model.load_state_dict(state)


def give_data(model):
    model[2].weight.data = torch.full((64, 64), 0.25)


def give_parameter(model):
    model[2].weight = nn.Parameter(torch.full((64, 64), 0.25), requires_grad=False)


KEPT: list = []
WRITES = {
    "numpy": lambda model: model[2].weight.data.numpy().__setitem__((3, 4), 5),
    "data.add_": lambda model: model[2].weight.data.add_(1),
    "copy_": lambda model: model[2].weight.copy_(torch.full((64, 64), 0.5)),
    "load_state_dict": load_state,
    "an optimizer": write_optimizer,
    "writing()": write_in_writing,
    "a tensor that is kept": write_kept,
    "other data": give_data,
    "another Parameter": give_parameter,
}


@pytest.mark.parametrize("writer", [0, 1], ids=["by who wrote the pages", "by who found them"])
@pytest.mark.parametrize("kind", WRITES)
def test_a_write_is_seen_by_its_rank_alone(two, kind, writer):
    plain, resident = small(), small()
    begin = session_of(two[writer]).units[2].base
    with torch.no_grad():
        want = plain(X)
        WRITES[kind](resident)
        WRITES[kind](two[writer])
        for _ in range(2):
            assert torch.equal(two[writer](X), resident(X))
            assert torch.equal(two[1 - writer](X), want)
    assert in_common(two[writer]) == [number != 2 for number in range(6)]
    assert all(in_common(two[1 - writer]))
    # It takes no memory beside the rank's own copy, where nobody holds it.
    assert bool(_core.written_pages(begin, ONE)) is (kind == "a tensor that is kept")
    for model in two:
        stagehand.runtime(model).shutdown()
    assert all(map(torch.equal, two[writer].parameters(), resident.parameters()))
    assert all(map(torch.equal, two[1 - writer].parameters(), plain.parameters()))
    KEPT.clear()


def test_a_tensor_that_is_kept_goes_on_being_the_weight(two):
    kept = two[1][2].weight.data
    kept[1, 2] = 7
    two[1](X)
    kept[1, 2] = 8
    assert two[1][2].weight[1, 2] == 8
    resident = small()
    resident[2].weight.data[1, 2] = 8
    assert torch.equal(two[1](X), resident(X))


def test_a_write_of_the_same_values_leaves_a_weight_in_common(two):
    two[1][2].weight.data.copy_(two[1][2].weight.data.clone())
    two[1](X)
    assert all(in_common(two[1]))


def test_a_write_amid_a_pass_is_refused_and_reaches_nobody(two):
    two[1][2].register_forward_pre_hook(lambda module, args: module.weight.data.mul_(2))
    for _ in range(2):
        with pytest.raises(stagehand.StagehandError, match="2.weight was written during a pass"):
            two[1](X)
        assert torch.equal(two[0](X), small()(X))


def test_state_copies_and_a_shutdown_give_plain_weights(two):
    plain = small()
    state = two[1].state_dict()
    stored = io.BytesIO()
    torch.save(state, stored)
    assert len(stored.getvalue()) < 1.2 * nbytes_of(plain) + 20000  # no weight takes others along
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    pickled = pickle.loads(pickle.dumps(state))
    copied = copy.deepcopy(two[1])
    stagehand.runtime(two[1]).shutdown()
    for found_ in (loaded, pickled, copied.state_dict(), two[1].state_dict()):
        assert all(torch.equal(found_[name], value) for name, value in plain.state_dict().items())
    with torch.no_grad():
        for model in (two[1], copied):
            model[0].weight.add_(1)
            assert not torch.equal(model[0].weight, plain[0].weight)
    assert torch.equal(two[0](X), plain(X))
    assert torch.equal(two[0](X), plain(X))


def files() -> set:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {os.stat(link).st_ino for link in links
            if os.path.islink(link) and os.readlink(link).startswith("/memfd:stagehand-weights")}


def test_memory_goes_with_the_last_model(monkeypatch):
    monkeypatch.setenv("STAGEHAND_HOST_COPY", "shared")
    other_weights()
    before = files()
    models = [stagehand.layer(small(), vram_budget="1MB", device="sim") for _ in range(2)]
    models[1](X)
    assert len(files() - before) == 2
    for model in models:
        stagehand.runtime(model).shutdown()
    again = stagehand.layer(models[0], vram_budget="1MB", device="sim")
    assert found_bytes(again) == 6 * ONE  # of its own earlier life
    assert torch.equal(again(X), small()(X))
    stagehand.runtime(again).shutdown()
    del models, model, again
    end = time.monotonic() + 60
    while files() - before and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert not files() - before


def test_trained_weights_are_no_ranks_business(monkeypatch):
    monkeypatch.setenv("STAGEHAND_HOST_COPY", "shared")
    model = small()
    model[3].requires_grad_(True)
    stagehand.layer(model, vram_budget="1MB", device="sim", trainables="host")
    assert [unit.common for unit in session_of(model).units] == [number != 3 for number in range(6)]
    stagehand.runtime(model).shutdown()


def test_a_table_that_is_read_in_place_is_in_common(monkeypatch):
    monkeypatch.setenv("STAGEHAND_HOST_COPY", "shared")
    other_weights()

    def made():
        torch.manual_seed(SEED)
        return nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64)).requires_grad_(False)

    ids, resident, models = torch.arange(8), made(), []
    for _ in range(2):
        models.append(stagehand.layer(made(), vram_budget="1MB", device="sim"))
        assert session_of(models[-1]).units[0].mapped
        assert torch.equal(models[-1](ids), resident(ids))
    assert [found_bytes(model) for model in models] == [0, 2 * ONE]
    for net in (models[0], resident):
        net[0].weight.data[3] = 1.5
    assert torch.equal(models[0](ids), resident(ids))
    assert torch.equal(models[1](ids), made()(ids))
    for model in models:
        stagehand.runtime(model).shutdown()


@pytest.mark.parametrize("environment, shared", [
    ({}, False), ({"LOCAL_WORLD_SIZE": "1"}, False), ({"LOCAL_WORLD_SIZE": "2"}, True),
    ({"LOCAL_WORLD_SIZE": "2", "STAGEHAND_HOST_COPY": "own"}, False), ({"STAGEHAND_HOST_COPY": "shared"}, True)])
def test_the_launcher_says_whether_there_are_others(monkeypatch, environment, shared):
    for name in ("LOCAL_WORLD_SIZE", "STAGEHAND_HOST_COPY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = stagehand.layer(small(), vram_budget="1MB", device="sim")
    assert all(in_common(model)) is shared and any(in_common(model)) is shared
    stagehand.runtime(model).shutdown()


def test_another_word_is_an_error_that_leaves_the_model_alone(monkeypatch):
    monkeypatch.setenv("STAGEHAND_HOST_COPY", "yes")
    model = small()
    with pytest.raises(ValueError, match="STAGEHAND_HOST_COPY is 'shared' or 'own', not 'yes'"):
        stagehand.layer(model, vram_budget="1MB", device="sim")
    assert torch.equal(model(X), small()(X))
