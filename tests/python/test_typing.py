"""For type checkers: every argument of a public function or method has a type, and the package says so."""

import importlib.util
import inspect
import pathlib

import stagehand

PUBLIC = ("stagehand", "stagehand.activation", "stagehand.amp", "stagehand.conductor", "stagehand.executor",
          "stagehand.optim", "stagehand.compat.ramtorch", "stagehand.integrations.diffusers", "stagehand.errors")
PUBLIC += tuple(f"stagehand.integrations.{host}" for host in ("transformers", "lightning")
                if importlib.util.find_spec(host))


def public_things():
    for module in map(importlib.import_module, PUBLIC):
        for name in getattr(module, "__all__", vars(module)):
            thing = getattr(module, name)
            here = "__all__" in vars(module) or getattr(thing, "__module__", "") == module.__name__
            if here and not name.startswith("_"):
                yield f"{module.__name__}.{name}", thing


def functions():
    """(name, function): of modules, and of classes with what these inherit from classes of the package."""
    for name, thing in public_things():
        if inspect.isfunction(thing):
            yield name, thing
        for kind in thing.__mro__ if inspect.isclass(thing) and not issubclass(thing, BaseException) else ():
            for key, value in vars(kind).items() if kind.__module__.startswith("stagehand.") else ():
                function = getattr(value, "__func__", value)
                if inspect.isfunction(function) and (key == "__init__" or not key.startswith("_")):
                    yield f"{kind.__qualname__}.{key}", function


def test_every_argument_of_a_public_function_has_a_type():
    found = dict(functions())
    assert len(found) > 150 and "stagehand.layer" in found and "StagehandRuntime.__init__" in found
    untyped = sorted(f"{name}({argument.name})" for name, function in found.items()
                     for argument in inspect.signature(function).parameters.values()
                     if argument.annotation is argument.empty and argument.name not in ("self", "cls"))
    assert not untyped


def test_type_checkers_are_told_that_there_are_types():
    package = pathlib.Path(stagehand.__file__).parent
    assert (package / "py.typed").is_file() and (package / "_core.pyi").is_file()
