"""The Python reference: the directive `public-names` documents what a module lists in __all__.

    ```{eval-rst}
    .. public-names:: stagehand
       layer load
    ```

Docstrings here are plain text: a line `name: text` describes a parameter, an indented paragraph is code."""

import importlib
import inspect
import re

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

SECTIONS = re.compile(r"^(Raises|Returns|Threads)\b[^:]{0,20}:? ")
PARAMETER = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def names_of(module) -> list[str]:
    """The names that `module` offers: __all__, else public ones that it defines itself."""
    if getattr(module, "__all__", None):
        return list(module.__all__)
    return [name for name, value in vars(module).items() if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__]


def escape(line: str) -> str:
    """Stars, bars and underlines are no markup in these docstrings; backticks are."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([*|\\]|_(?!\w))", r"\\\1", part) for part in parts)


def to_rst(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText."""
    made, indented, blank = [], None, True
    for line in lines:
        if not line.strip():
            made.append("")
            blank = True
            continue
        indent = len(line) - len(line.lstrip())
        if indent and blank and indented is None:  # an example behind an empty line
            made += ["::", ""]
            indented = "code"
        elif not indent:
            if indented is not None and not blank:
                made.append("")
            indented = None
            found = PARAMETER.match(line)
            if found and not SECTIONS.match(line):
                if not blank and not (made and made[-1].startswith((":", "    "))):
                    made.append("")
                made.append(f":{found[1]}: {escape(found[2])}")
                indented, blank = "field", False
                continue
            if made and made[-1].startswith((":", "    ")):
                made.append("")
        elif indented is None:
            line = line.lstrip()
        made.append(line if indented == "code" else ("    " if indented == "field" else "") + escape(line.strip()))
        blank = False
    return made


def rewrite(app, what, name, value, options, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


class PublicNames(Directive):
    required_arguments = 1
    has_content = True

    def run(self):
        module = importlib.import_module(self.arguments[0])
        lines: list[str] = []
        for name in " ".join(self.content).split() or names_of(module):
            lines += self._entry(self.arguments[0], name, getattr(module, name))
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source=module.__name__), 0, node)
        return node.children

    @staticmethod
    def _entry(module: str, name: str, value) -> list[str]:
        full = f"{module}.{name}"
        if inspect.isclass(value):
            return [f".. autoclass:: {full}", "   :members:", "   :inherited-members: object, Exception, "
                    "BaseException, Optimizer, Module, GradScaler, Enum, str, int, dict, tuple", ""]
        if callable(value):
            return [f".. autofunction:: {full}", ""]
        return [f".. autodata:: {full}", "   :no-value:", ""]


def setup(app):
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True}
