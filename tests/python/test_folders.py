"""Folders of the package, and the paths that modules had before they stood in folders. tests/api/check_layers.py has
the floors on which folders stand."""

import ast
import importlib
import pathlib
import pickle
import re
import sys

import children
import pytest
import stagehand

PACKAGE = pathlib.Path(__file__).parents[2] / "python/stagehand"
FOLDERS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def module_names() -> dict:
    """Name below stagehand -> file."""
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
            for path in PACKAGE.rglob("*.py") if path.name != "__main__.py" and path.parent.name != "_core"}


def test_each_folder_says_whether_it_is_internal():
    says = {folder: ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text()))
            for folder in FOLDERS}
    internal = {folder for folder, text in says.items() if text.startswith("Internal: ")}
    assert internal == {"bench", "files", "modes", "session", "weights"}


# Modules of the package while it was flat, without those that are where they were.
OLD = """advice answers autocast block budget budget_manager captures casting checkpoint choosing common compiled
    config converting dropper ending executor filesource fileweight finding given grads graphs guarded guards hooks
    hostmem images layer leased leftovers listed load mapped masters memory memoryconfig microbatches names needs
    opening optimizers outside pinned_pool plain pool quantised quantsource reading registrations registry relocate
    residency resized saved scheduler sharded standins staying steps telemetry through transfer tuners units wrapping
    writes activation.backend_cpu activation.budget activation.hooks activation.registry activation.scheduler
    activation.transfer""".split()

IN_A_FRESH_PROCESS = """
import importlib, sys
module = importlib.import_module({name!r})
assert sys.modules[{name!r}] is module, module
assert importlib.import_module(module.__name__) is module
assert module.__spec__.name == module.__name__ != {name!r}, module.__spec__
import stagehand
assert callable(stagehand.layer) and callable(stagehand.load) and callable(stagehand.session)
"""


@pytest.mark.parametrize("name", OLD)
def test_an_old_path_gives_the_module_itself(name):
    module = importlib.import_module(f"stagehand.{name}")
    assert module.__name__.removeprefix("stagehand.") != name and pathlib.Path(module.__file__).is_file()
    assert importlib.import_module(module.__name__) is module is sys.modules[f"stagehand.{name}"]


@pytest.mark.parametrize("name", ["layer", "block", "telemetry", "activation.hooks"])
def test_an_old_path_may_be_the_first_import(name):
    done = children.run_bare(IN_A_FRESH_PROCESS.format(name=f"stagehand.{name}"))
    assert done.status == 0, done.stderr


def test_every_module_that_moved_has_its_old_path():
    moved = importlib.import_module("stagehand._moved")
    assert set(OLD) == set(moved.MODULES)
    assert set(moved.MODULES.values()) <= set(module_names())


NAMES = [("stagehand.layer", "LayerRuntime"), ("stagehand.block", "StagehandRuntime"), ("stagehand.session", "Session"),
         ("stagehand.config", "StagehandConfig"), ("stagehand.memory", "MemorySession"),
         ("stagehand.checkpoint", "Checkpoint"), ("stagehand.telemetry", "StepMetrics"),
         ("stagehand.executor", "Runner"), ("stagehand.modes", "layer"),
         ("stagehand.residency", "ResidencyMap"), ("stagehand.activation", "CPUSpillBackend"),
         ("stagehand.activation.registry", "ActivationRecord")]


@pytest.mark.parametrize("module, name", NAMES)
def test_names_are_imported_from_old_paths(module, name):
    found = {}
    exec(f"from {module} import {name}", found)
    assert found[name] is getattr(importlib.import_module(module), name)


def test_attributes_of_the_package_are_the_modules_of_old_paths():
    assert stagehand.block is importlib.import_module("stagehand.modes.block")
    assert stagehand.hooks is importlib.import_module("stagehand.weights.hooks")
    with pytest.raises(AttributeError):
        stagehand.savedmodes
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("stagehand.savedmodes")


@pytest.mark.parametrize("name", ["StepMetrics", "StagehandConfig"])
def test_what_was_pickled_under_an_old_path_is_read(name):
    kind = getattr(stagehand, name)
    now = pickle.dumps(kind(), 2)
    old = re.sub(rb"stagehand\.modes\.", b"stagehand.", now)
    assert old != now
    assert type(pickle.loads(old)) is kind
