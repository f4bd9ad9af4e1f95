"""A Python function as an executor: streamed layers give the bits of plain PyTorch, and misuse is said."""

import gc
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from file_support import save
from stagehand import Device, StagehandError, StagehandOOMError, _core
from stagehand.device import Target
from stagehand.errors import InvalidArgumentError
from stagehand.executor import Runner

LAYERS, WIDTH = 8, 48
LAYER_BYTES = WIDTH * WIDTH * 4 + 512


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(3)
    tensors = {}
    for i in range(LAYERS):
        tensors[f"blocks.{i}.fc.weight"] = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        tensors[f"blocks.{i}.fc.bias"] = torch.randn(WIDTH) / 10
    path = tmp_path / "model.safetensors"
    save(path, tensors)
    return path, tensors


def block(layer, x):
    w = layer.weights
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, w["fc.weight"], w["fc.bias"])) + x


def plain(tensors, x):
    for i in range(LAYERS):
        own = {name.removeprefix(f"blocks.{i}."): t for name, t in tensors.items() if name.startswith(f"blocks.{i}.")}
        x = torch.nn.functional.gelu(torch.nn.functional.linear(x, own["fc.weight"], own["fc.bias"])) + x
    return x


@pytest.mark.parametrize("lookahead, group", [(0, 1), (2, 1), (0, 4), (1, 3)])
def test_streamed_layers_give_the_bits_of_plain_pytorch(model, lookahead, group):
    path, tensors = model
    budget = 3 * group * LAYER_BYTES + 16384
    with Runner(path, block, device="sim", budget=budget, lookahead=lookahead, group=group) as run:
        assert [name for name, _ in run.layers] == [f"blocks.{i}" for i in range(LAYERS)]
        for rows in (4, 4, 1, 9):
            x = torch.randn(rows, WIDTH)
            assert torch.equal(run(x), plain(tensors, x))
        metrics = run.metrics()
        assert metrics["run"] == 3 and metrics["latency_ms"] > 0
        if group < 4:
            assert metrics["h2d_bytes"] > 0, "nothing streamed"
        one = run.layer_metrics(5)
        assert one["name"] == "blocks.5" and one["runs"] == 4 and one["compute_ms"] > 0


def test_shapes_are_asked_for_once(model):
    path, tensors = model
    asked = []

    def shapes(layer, x):
        asked.append(layer.index)
        return x

    with Runner(path, block, device="sim", budget="1MB", shapes=shapes) as run:
        x = torch.randn(2, WIDTH)
        for _ in range(3):
            assert torch.equal(run(x), plain(tensors, x))
        assert asked == [*range(LAYERS)] * 2  # for the outputs' memory, and for what lies between layers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_on_a_card_streamed_layers_give_the_bits_of_resident_ones(model):
    path, tensors = model
    x = torch.randn(5, WIDTH, device="cuda")
    with torch.no_grad():
        want = plain({name: tensor.cuda() for name, tensor in tensors.items()}, x)
    side = torch.cuda.Stream()
    with Runner(path, block, device="cuda", budget=3 * LAYER_BYTES + 65536) as run:
        for _ in range(4):
            assert torch.equal(run(x), want)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            got = run(x)
        side.synchronize()
        assert torch.equal(got, want)


def test_several_activations_and_dtypes_go_along(model):
    path, tensors = model

    def two(layer, x, seen):
        return block(layer, x), torch.cat([seen, seen.new_full((1,), layer.index)])

    with Runner(path, two, device="sim", budget="200KB") as run:
        x = torch.randn(2, WIDTH)
        y, seen = run(x, torch.empty(0, dtype=torch.int64))
        assert torch.equal(y, plain(tensors, x))
        assert seen.tolist() == list(range(LAYERS))


def test_what_the_function_raises_comes_out_and_the_next_pass_is_right(model):
    path, tensors = model
    fails = [True]

    class Own(Exception):
        pass

    def sometimes(layer, x):
        if layer.index == 3 and fails[0] and x.device.type != "meta":
            raise Own("no")
        return block(layer, x)

    with Runner(path, sometimes, device="sim", budget=3 * LAYER_BYTES + 16384) as run:
        x = torch.randn(2, WIDTH)
        for _ in range(2):
            with pytest.raises(Own) as caught:
                run(x)
        fails[0] = False
        assert torch.equal(run(x), plain(tensors, x))  # while the traceback keeps a layer's weights
        del caught


def test_a_tensor_that_is_kept_is_an_error(model):
    path, tensors = model
    kept = []

    def keeps(layer, x):
        if layer.index == 2 and x.device.type != "meta":
            kept.append(layer.weights["fc.weight"][0])
        return block(layer, x)

    with Runner(path, keeps, device="sim", budget=3 * LAYER_BYTES + 16384) as run:
        with pytest.raises(StagehandError, match="layer 'blocks.2'.*clone what is to stay"):
            run(torch.randn(2, WIDTH))
        kept.clear()


def test_misuse_is_said(model):
    path, _ = model
    with pytest.raises(StagehandOOMError):
        Runner(path, block, device="sim", budget=1000)
    with Runner(path, block, device="sim", budget="1MB") as run:
        with pytest.raises(StagehandError, match="not contiguous"):
            run(torch.randn(WIDTH, 2).t())
    with pytest.raises(StagehandError, match="closed"):
        run(torch.randn(2, WIDTH))
    run.close()
    wrong = Runner(path, lambda layer, x: x if x.device.type == "meta" else x[:1], device="sim", budget="1MB")
    with pytest.raises(StagehandError, match="returned"):
        wrong(torch.randn(2, WIDTH))

    def again(layer, x):
        return x if x.device.type == "meta" else run2(x)

    run2 = Runner(path, again, device="sim", budget="1MB")
    with pytest.raises(StagehandError, match="must not call it"):
        run2(torch.randn(2, WIDTH))
    with pytest.raises(StagehandError, match="blocks.99"):
        Runner(path, block, device="sim", budget="1MB", layers=["blocks.0", "blocks.99"])


@pytest.mark.parametrize("ask", [lambda run: run.metrics(), lambda run: run.layer_metrics(0)])
def test_figures_asked_for_from_the_function_are_refused(model, ask):
    path, tensors = model
    inside = [True]

    def asks(layer, x):
        if inside[0] and x.device.type != "meta":
            ask(run)
        return block(layer, x)

    with Runner(path, asks, device="sim", budget="1MB") as run:
        x = torch.randn(2, WIDTH)
        with pytest.raises(StagehandError, match="must not call it") as caught:
            run(x)
        assert caught.value.status == "INVALID_STATE"
        inside[0] = False
        assert torch.equal(run(x), plain(tensors, x))
        ask(run)


def test_a_tensor_may_outlive_its_runner(model):
    path, _ = model
    kept, gone = [], []

    def keeps(layer, x):
        if x.device.type != "meta":
            kept.append(x)
        return block(layer, x)

    for _ in range(8):
        run = Runner(path, keeps, device="sim", budget="1MB")
        with pytest.raises(StagehandError, match="clone what is to stay"):
            run(torch.randn(2, WIDTH))
        run.close()
        gone.append(weakref.ref(run))
        del run
    pattern = b"\xa5" * (_core.Runner.__basicsize__ + 15)  # as large as a Runner with the collector's header
    gc.collect()
    taken = [bytearray(pattern) for _ in range(20000)]  # some where the Runners were
    assert len(kept) == 8 and not any(ref() for ref in gone)
    kept.clear()
    assert all(text == pattern for text in taken)


def test_the_longest_layer_name_takes_a_tensor(model):
    path, tensors = model
    with Runner(path, block, device="sim", budget="1MB", layers=["blocks", "blocks.1"]) as run:
        (whole, rest), (one, own) = run.layers
        assert (whole, len(rest), one) == ("blocks", 2 * (LAYERS - 1), "blocks.1")
        assert sorted(name for name, *_ in own) == ["fc.bias", "fc.weight"]
    with pytest.raises(StagehandError, match="layer 'blocks.1' is named twice") as caught:
        Runner(path, block, device="sim", budget="1MB", layers=["blocks.1", "blocks.2", "blocks.1"])
    assert caught.value.object == "blocks.1"


def test_outputs_that_are_not_as_many_are_refused(model):
    path, _ = model
    x = torch.randn(2, WIDTH)
    one = ("F32", (2, WIDTH), x.data_ptr(), x.nbytes)
    with Runner(path, block, device="sim", budget="1MB") as run:
        with pytest.raises(StagehandError, match="the model has 1 outputs; there is room for 2"):
            run._core.run([one], [one, one], 0)


OWN = """
import torch
from stagehand.executor import Runner
with Runner({path!r}, lambda layer, x: x @ layer.weights["fc.weight"].t(), device="own:1", budget="1MB") as run:
    x = torch.ones(1, {width})
    print(run.device, run(x).shape[1])
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler is installed")
def test_a_back_end_of_ones_own_whose_memory_is_the_hosts(model, tmp_path):
    path, _ = model
    library = tmp_path / "libown.so"
    root = pathlib.Path(__file__).resolve().parents[2]
    subprocess.run(["cc", "-shared", "-fPIC", "-Iinclude", "examples/own_backend.c", "-o", library],
                   cwd=root, check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                   "STAGEHAND_BACKENDS": str(library)}
    done = subprocess.run([sys.executable, "-c", OWN.format(path=str(path), width=WIDTH)], env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["cpu", str(WIDTH)], done.stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "hip:1", None])
def test_a_device_is_named_as_elsewhere(model, monkeypatch, device):
    asked = []

    def resolve(name, budget):
        asked.append(name)
        return Target(Device("sim"))

    monkeypatch.setattr("stagehand.device.resolve", resolve)
    path, tensors = model
    with Runner(path, block, device=device, budget="1MB") as run:
        x = torch.randn(2, WIDTH)
        assert torch.equal(run(x), plain(tensors, x)) and run.device == torch.device("cpu")
    assert asked == [device]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_is_simulated(model):
    path, tensors = model
    with Runner(path, block, budget="1MB") as run:
        x = torch.randn(2, WIDTH)
        assert torch.equal(run(x), plain(tensors, x))


@pytest.mark.parametrize("result, text", [
    (None, "returned NoneType for layer 'blocks.2'; return a tensor"),
    (3.0, "returned float for layer 'blocks.2'; return a tensor"),
    ([], "layer 'blocks.2'.*: 0 tensors; give 1 to 8"),
    ([torch.zeros(1)] * 9, "layer 'blocks.2'.*: 9 tensors; give 1 to 8"),
    ({"y": torch.zeros(1)}, "layer 'blocks.2'.* 0 is of type str; give a torch.Tensor"),
    (torch.zeros(1, dtype=torch.complex128), "layer 'blocks.2'.* 0 is torch.complex128.*convert it to .*float32"),
])
@pytest.mark.parametrize("meta", [True, False])
def test_what_the_function_may_not_return_is_said_with_the_layer(model, result, text, meta):
    path, tensors = model
    wrong = [True]

    def returns(layer, x):
        if wrong[0] and layer.index == 2 and meta == (x.device.type == "meta"):
            return result
        return block(layer, x)

    x = torch.randn(2, WIDTH)
    with Runner(path, returns, device="sim", budget="1MB") as run:
        with pytest.raises(InvalidArgumentError, match=text) as caught:
            run(x)
        assert caught.value.object == "blocks.2"
        wrong[0] = False
        assert torch.equal(run(x), plain(tensors, x))


def test_arguments_of_the_wrong_kind_are_said(model):
    path, _ = model
    for given, text in [({"budget": None}, "budget is None.*'4GB'"),
                        ({"layers": "blocks.1"}, r"layers is the text 'blocks.1'.*\['blocks.1'\]"),
                        ({"layers": ["blocks.1", 2]}, "layers has 2"), ({"layers": 2}, "layers is of type int")]:
        with pytest.raises(InvalidArgumentError, match=text):
            Runner(path, block, **{"device": "sim", "budget": "1MB", **given})
    with Runner(path, block, device="sim", budget="1MB", ram_budget=None) as run:
        for inputs, text in [((), "input: 0 tensors"), ((torch.zeros(1, WIDTH), 3), "input 1 is of type int"),
                             ((torch.zeros(1, dtype=torch.complex128),), "input 0 is torch.complex128")]:
            with pytest.raises(InvalidArgumentError, match=text):
                run(*inputs)


def test_threads_take_turns(model):
    path, tensors = model
    wrong = []
    with Runner(path, block, device=Device("sim"), budget=3 * LAYER_BYTES + 16384) as run:
        def work(seed):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
            for _ in range(5):
                if not torch.equal(run(x), plain(tensors, x)):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_runner_that_is_dropped_ends(model):
    path, _ = model
    run = Runner(path, block, device="sim", budget="1MB")
    gone = weakref.ref(run)
    run(torch.randn(1, WIDTH))
    del run
    gc.collect()
    assert gone() is None
