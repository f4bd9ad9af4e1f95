"""Back ends that are not of this build: the example is compiled with the command in its heading, loaded, and a model
streams through it. In processes of their own: what is loaded stays."""

import os
import pathlib
import shutil
import subprocess
import sys

import children
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("cc"):
        pytest.skip("no C compiler is installed")
    path = tmp_path_factory.mktemp("own") / "libown.so"
    source = ROOT / "examples/own_backend.c"
    command = next(line[3:] for line in source.read_text().splitlines() if line.startswith(" *   cc ")).split()
    assert command[-1] == "libown.so"
    subprocess.run([*command[:-1], path], cwd=ROOT, check=True)
    return path


def python(program, **environment):
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path, **environment},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


STREAM = """
import torch, stagehand
from support import Stack, aligned_copy, same
torch.manual_seed(3)
model = Stack(6, 64).requires_grad_(False).eval()
reference = aligned_copy(model)
x, = model.example()
stagehand.layer(model, vram_budget=250_000, device={device!r}, inference_mode=True)
with torch.no_grad():
    for _ in range(3):
        assert same(model(x), reference(x))
print(stagehand._core.backends()[-1])
"""


def test_a_model_streams_through_a_back_end_that_the_environment_names(library):
    assert python(STREAM.format(device="own:1"), STAGEHAND_BACKENDS=str(library)).split() == ["own"]


def test_decorators_stand_before_the_simulated_device(tmp_path):
    """And what runs on it uses it rightly: the log of check stays empty."""
    log = tmp_path / "log"
    done = children.run(STREAM.format(device=f"delay(call_us=20,stream_us=50)+check(log={log})+sim"))
    assert done.status == 0, done.stderr
    assert log.read_text() == ""


def test_loading_says_the_name_or_what_is_wrong(library):
    done = children.run(f"""
import stagehand
assert stagehand.load_backend({str(library)!r}) == "own"
assert stagehand._core.device_count("own") == (2, "")
for path, text in [("libown.so", "./libown.so"), ("/nowhere/libown.so", "/nowhere/libown.so")]:
    try:
        stagehand.load_backend(path)
    except stagehand.StagehandError as error:
        assert text in str(error), error
    else:
        raise AssertionError(path)
""")
    assert done.status == 0, done.stderr
