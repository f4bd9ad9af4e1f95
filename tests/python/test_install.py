"""What installing the package gives: one version everywhere, the tool, and one extension module."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DISTRIBUTION = "stagehand-offload"


def header_version() -> str:
    text = (ROOT / "include/stagehand/stagehand.h").read_text()
    return ".".join(re.search(rf"STH_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def run(*command) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_distribution_has_the_headers_version():
    assert importlib.metadata.version(DISTRIBUTION) == header_version()


def test_pytorch_is_an_extra_and_nothing_is_required():
    requires = importlib.metadata.requires(DISTRIBUTION) or []
    assert all("extra ==" in line for line in requires)
    assert 'torch>=2.4; extra == "torch"' in requires


@pytest.mark.parametrize("command", [
    [os.path.join(sysconfig.get_path("scripts"), "stagehand")],
    [sys.executable, "-m", "stagehand"],
], ids=["script", "module"])
def test_both_ways_to_call_the_tool_are_the_same_program(command):
    if not os.path.exists(command[0]):
        pytest.skip(f"{command[0]} is not there: the package was installed without its scripts (pip install --target)")
    done = run(*command, "--version")
    assert done.returncode == 0, done.stderr
    assert header_version() in done.stdout
    refused = run(*command, "no-such-command")
    assert refused.returncode not in (0, 127)
    assert "no-such-command" in refused.stderr


def test_every_module_of_the_package_is_installed():
    source = ROOT / "python/stagehand"
    wanted = {file.relative_to(source).as_posix() for file in source.rglob("*.py")}
    files = [file for file in importlib.metadata.files(DISTRIBUTION) if file.parts[0] == "stagehand"]
    assert wanted == {file.relative_to("stagehand").as_posix() for file in files if file.suffix == ".py"}


def test_the_licences_of_what_is_bundled_are_installed():
    files = {file.name: file for file in importlib.metadata.files(DISTRIBUTION)}
    assert {"LICENSE", "NOTICE"} <= set(files)
    notice = files["NOTICE"].read_text()
    assert all(name in notice for name in ("StageHand", "RamTorch", "Lehtinen", "Collet", "Zig contributors"))


def test_the_distributions_name_is_the_package_itself():
    script = """
import sys
import stagehand_offload.optim, stagehand_offload.layer
import stagehand_offload, stagehand, stagehand.optim
from stagehand_offload.integrations.diffusers import offload
from stagehand_offload import StagehandError
assert stagehand_offload is stagehand and stagehand_offload.optim is stagehand.optim
assert callable(stagehand_offload.layer) and StagehandError is stagehand.StagehandError
assert offload is sys.modules["stagehand.integrations.diffusers"].offload
twice = [name for name in sys.modules if name.startswith("stagehand_offload.")
         and sys.modules[name] is not sys.modules["stagehand" + name.removeprefix("stagehand_offload")]]
assert not twice, twice
try:
    import stagehand_offload.no_such_module
except ModuleNotFoundError as error:
    print(error)
"""
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "stagehand.no_such_module" in done.stdout
    assert header_version() in run(sys.executable, "-m", "stagehand_offload", "--version").stdout


def test_the_extension_module_uses_the_limited_api_and_exports_only_its_entry():
    files = [file for file in importlib.metadata.files(DISTRIBUTION)
             if file.name.startswith("_core.") and file.suffix == ".so"]
    assert [file.name for file in files] == ["_core.abi3.so"]
    names = run("nm", "-D", "--defined-only", "--format=posix", os.fspath(files[0].locate())).stdout
    assert [line.split()[0] for line in names.splitlines()] == ["PyInit__core"]
