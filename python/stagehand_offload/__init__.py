"""`import stagehand_offload` is `import stagehand`: one package under the name of its distribution, too.

`stagehand_offload` is the module `stagehand` itself, and `stagehand_offload.optim` is `stagehand.optim`: no module is
there twice.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys

import stagehand


class _SameModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stagehand_offload.NAME, which is stagehand.NAME. It stands first: the folder would give a second module."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition(".")
        ours = package == "stagehand_offload" and name not in ("", "__main__")
        return importlib.machinery.ModuleSpec(fullname, self) if ours else None

    def create_module(self, spec):
        return None  # one that the import system makes, and drops

    def exec_module(self, module) -> None:
        """Puts the module that is meant in the place of the one that was made."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(f"stagehand.{name.partition('.')[2]}")


sys.meta_path.insert(0, _SameModules())
sys.modules[__name__] = stagehand
