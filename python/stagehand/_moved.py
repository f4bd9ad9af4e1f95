"""Import paths that programs may have from before modules stood in folders, and where the modules are now.

An old path gives the module itself, so that both paths see one object: `stagehand.block` is `stagehand.modes.block`.
Nothing is imported before somebody asks for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys

_PACKAGE = __package__

_FOLDERS = {
    "modes": "block common config executor graphs guards layer load memory memoryconfig microbatches "
             "residency telemetry",
    "session": "advice answers captures choosing compiled converting ending finding given needs opening "
               "optimizers plain registrations resized standins staying steps tuners writes",
    "weights": "autocast casting dropper fileweight grads guarded hooks hostmem images leased leftovers "
               "listed mapped masters outside reading relocate saved sharded through units wrapping",
    "files": "checkpoint filesource names pool quantised quantsource",
}

# Old path -> the module's path, both below `stagehand`.
MODULES = {
    **{name: f"{folder}.{name}" for folder, names in _FOLDERS.items() for name in names.split()},
    **{f"activation.{name}": "compat.spill"
       for name in ("backend_cpu", "budget", "hooks", "registry", "scheduler", "transfer")},
    "budget": "compat.budget",
    "budget_manager": "compat.budget",
    "pinned_pool": "files.pool",
    "registry": "compat.registry",
    "scheduler": "compat.scheduler",
    "transfer": "compat.transfer",
}

# Module -> names that programs import from it -> the module that defines them.
NAMES = {
    "activation": dict.fromkeys(
        ("ActivationBudgetManager", "ActivationHookContext", "ActivationRecord", "ActivationRegistry",
         "ActivationScheduler", "ActivationState", "ActivationTransferEngine", "CPUSpillBackend"), "compat.spill"),
    "modes.residency": dict.fromkeys(
        ("BlockState", "ResidencyEntry", "ResidencyMap", "VALID_TRANSITIONS"), "compat.residency"),
    "session": {"Session": "session.session"},
}


def attribute(module: str, name: str):
    """What a module's `__getattr__` gives. module: its `__name__`. AttributeError for names that it does not have."""
    owner = NAMES[module.removeprefix(f"{_PACKAGE}.")].get(name)
    if owner is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{owner}", _PACKAGE), name)


class Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by their old paths. It stands last, so that imports that succeed elsewhere never ask it."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition(".")
        known = package == _PACKAGE and name in MODULES
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def create_module(self, spec):
        return None  # one that the import system makes, and drops

    def exec_module(self, module) -> None:
        """Puts the module that is meant in the place of the one that was made."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(f".{MODULES[name.partition('.')[2]]}", _PACKAGE)
