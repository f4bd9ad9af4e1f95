#!/usr/bin/env python3
"""Rooms stand on one another: a lower one neither includes, calls nor imports a higher one.

    check_layers.py ROOT          the test
    check_layers.py ROOT --today  prints what the lists below are to contain

C: includes, and calls between files. A call is the name of a function that another file defines, with a
parenthesis behind it; a name alone goes into a table of functions, which may point upwards. Inline functions of a
header count as part of the file that calls them. Python: imports, those inside functions too, but not those for
type checkers.

ROOMS and FOLDERS give the order. The lists behind them name what is still wrong today: calls and imports upwards,
circles, large structs. They only shrink: an entry that is mended must leave its list.
"""

import ast
import io
import pathlib
import re
import sys
import tempfile
import tokenize

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from support import tap

# From the lowest to the highest, for each program. A file belongs to the longest path that it lies in.
ROOMS = {
    "library": [
        "include",
        "src/base",
        "src/core",
        "src/device",
        "src/conductor",
        "src/store",
        "src/quant",
        "src/telemetry",
        "src/pack",
        "src/optim",
        "src/host",
        "src/state",
        "src/load",
        "src/runtime",
        "src/rows",
        "src/activation",
        "src/runner",
        "src/api",
    ],
    "cli": ["cli"],
    "_core": ["python/stagehand/_core"],
}
# The same for Python: folders under python/stagehand, or modules by name ("." is every other module beside them).
FOLDERS = ["_core", "_private", "_torch", "errors", ".", "optim", "weights", "activation", "conductor",
           "files", "session", "modes", "compat", "integrations", "bench", "__init__"]

# Includes, calls and imports upwards that are still there.
UPWARDS = {
    "library": [],
    "cli": [],
    "_core": [],
}
UPWARD_IMPORTS = []

# Files of one room that still call each other in a circle, and modules that still import each other in one.
CIRCLES = {
    "library": [],
    "cli": [],
    "_core": [],
}
MODULE_CIRCLES = []

MOST_FIELDS = 40
LARGE_STRUCTS = []

# Most that Python, without integrations, may be of the lines of code: what decides is C. Only goes down.
MOST_PYTHON = 24.9  # percent of those of Python, the library and the tool together

KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "defined", "do", "else"}
SCRAP = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def clean(text: str) -> str:
    """Without comments and with empty strings, in as many lines."""
    return SCRAP.sub(lambda m: '""' if m[0][0] == '"' else "\n" * m[0].count("\n") + " ", text)


class Source:
    """A C file: what it includes, defines and calls."""

    def __init__(self, path: pathlib.Path):
        text = path.read_text()
        self.includes = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE)
        text = clean(text)
        directive = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
        macros = " ".join(m[0] for m in directive.finditer(text) if re.match(r"\s*#\s*define", m[0]))
        self.text = re.sub(r'\bextern ""\s*\{', " ", directive.sub(" ", text))
        outer, bodies = self._parts()
        self.defines, self.own = self._definitions(outer)
        self.uses = set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", bodies + macros)) - KEYWORDS

    def _parts(self) -> tuple[str, str]:
        """What stands outside all braces, with {}; for each pair, and what stands inside."""
        outer, inner, depth = [], [], 0
        for part in re.split(r"([{}])", self.text):
            depth += {"{": 1, "}": -1}.get(part, 0)
            if part == "}" and depth == 0:
                outer.append("{};")
            elif depth:
                inner.append(part)
            else:
                outer.append(part)
        return "".join(outer), " ".join(inner)

    @staticmethod
    def _definitions(outer: str) -> tuple[set[str], set[str]]:
        """Functions with a body: those that others may call, and those of this file alone."""
        shared, own = set(), set()
        for statement in outer.split(";"):
            if not (match := re.search(r"\b([A-Za-z_]\w*)\s*\((?:[^(){}]|\([^()]*\))*\)\s*\{\}\s*$", statement)):
                continue
            static = re.search(r"\bstatic\b", statement) and not re.search(r"\binline\b", statement)
            (own if static else shared).add(match[1])
        return shared, own


def room_of(path: str, rooms: list[str]) -> str:
    found = [room for room in rooms if path == room or path.startswith(room + "/")]
    assert found, f"{path} lies in no room of the table in {pathlib.Path(__file__).name}"
    return max(found, key=len)


def circles_of(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected parts with more than one member (Tarjan), biggest first."""
    order, low, stack, found = {}, {}, [], []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            part = set()
            while node not in part:
                part.add(stack.pop())
            if len(part) > 1:
                found.append(part)

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return sorted(found, key=lambda part: (-len(part), min(part)))


class Program:
    """C files that are linked together."""

    def __init__(self, root: pathlib.Path, rooms: list[str]):
        self.root, self.rooms = root, rooms
        paths = sorted({path for room in rooms for suffix in ("*.c", "*.h") for path in (root / room).rglob(suffix)})
        self.sources = {path.relative_to(root).as_posix(): Source(path) for path in paths}
        self.homes: dict[str, set[str]] = {}
        for name, source in self.sources.items():
            for function in source.defines:
                self.homes.setdefault(function, set()).add(name)

    def rank(self, name: str) -> int:
        return self.rooms.index(room_of(name, self.rooms))

    def included(self, name: str) -> list[str]:
        """Files of this program that a file includes."""
        folders = [self.root / name.rpartition("/")[0], self.root / "src", self.root / "include"]
        found = []
        for header in self.sources[name].includes:
            paths = [(folder / header).resolve() for folder in folders if (folder / header).is_file()]
            if paths and paths[0].is_relative_to(self.root):
                found.append(paths[0].relative_to(self.root).as_posix())
        return [path for path in found if path in self.sources]

    def calls(self, name: str) -> dict[str, str]:
        """Files that a file calls, with a function that it calls there. Inline functions are parts of their callers."""
        found, seen, left = {}, {name}, [name]
        while left:
            source = self.sources[left.pop()]
            for function in sorted(source.uses - source.own - source.defines):
                for home in self.homes.get(function, set()) - seen:
                    if home.endswith(".h"):
                        seen.add(home)
                        left.append(home)
                    else:
                        found.setdefault(home, function)
        return found

    def upwards(self) -> list[str]:
        """Includes and calls of higher rooms."""
        wrong = []
        for name in self.sources:
            wrong += [f"{name} includes {other}" for other in self.included(name) if self.rank(other) > self.rank(name)]
            wrong += [f"{name} calls {function} of {other}" for other, function in self.calls(name).items()
                      if self.rank(other) > self.rank(name)]
        return wrong

    def circles(self) -> list[set[str]]:
        """Circles of calls between the files of one room."""
        return circles_of({name: {other for other in self.calls(name) if self.rank(other) == self.rank(name)} - {name}
                           for name in self.sources if name.endswith(".c")})


# ---- structs

def fields(body: str) -> int:
    """Declarators in the braces of a struct, those of structs inside it too."""
    body = re.sub(r"\[[^\]]*\]|\((?:[^()]|\([^()]*\))*\)", " ", body)
    return sum(1 + part.count(",") for part in re.split(r"[;{}]", body) if part.strip() and
               not re.fullmatch(r"\s*(?:const\s+)?(?:struct|union|enum)\s*\w*\s*", part))


def structs(text: str):
    """(name, fields) of each struct that is defined in a text."""
    for match in re.finditer(r"\bstruct\s*(\w*)\s*\{", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        name = match[1] or (re.match(r"\s*(\w*)", text[end:])[1])
        yield name, fields(text[match.end():end - 1])


# ---- Python

def modules(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Name under the package -> file; a folder's __init__ has the folder's name, the package's own is __init__."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def statements(node: ast.AST):
    """All import statements, wherever they stand."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not for_type_checkers(child):
            yield from statements(child)


def imports(name: str, path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """Modules of the package that a module imports by name. `from . import x` imports x, not the folder around it."""
    here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    here = [] if name == "__init__" else here
    found = set()
    for statement in statements(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            named = [alias.name for alias in statement.names]
            found |= {part.removeprefix("stagehand.") for part in named if part.startswith("stagehand.")}
            continue
        if statement.level:
            base = here[:len(here) - statement.level + 1] + (statement.module or "").split(".")
        else:
            base = (statement.module or "").split(".")
            if base.pop(0) != "stagehand":
                continue
        base = [part for part in base if part]
        for alias in statement.names:
            full = ".".join([*base, alias.name])
            found.add(full if full in known or full == "_core" else ".".join(base))
    return {module for module in found if module in known or module.split(".")[0] == "_core"} - {name, ""}


def folder_of(module: str) -> int:
    first = module.split(".")[0]
    return FOLDERS.index(first if first in FOLDERS else ".")


def python_edges(package: pathlib.Path) -> dict[str, set[str]]:
    known = modules(package)
    return {name: imports(name, path, known) for name, path in known.items()}


# ---- lines of code

def c_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in clean(text).splitlines())


def python_lines(text: str) -> int:
    """Without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines |= set(range(token.start[0], token.end[0] + 1)) if token.string else set()
    for node in ast.walk(ast.parse(text)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def line_counts(root: pathlib.Path) -> dict[str, int]:
    """Of the package without integrations, and of the library and the tool; the extension module is neither."""
    package = root / "python/stagehand"
    python = [path for path in package.rglob("*.py") if not path.is_relative_to(package / "integrations")]
    c = [path for room in ("include", "src", "cli") for path in (root / room).rglob("*.[ch]")]
    return {"python": sum(python_lines(path.read_text()) for path in python),
            "c": sum(c_lines(path.read_text()) for path in c)}


def python_share(root: pathlib.Path) -> float:
    """Percent."""
    counts = line_counts(root)
    return 100 * counts["python"] / sum(counts.values())


def has_little_python(root: pathlib.Path) -> None:
    share = python_share(root)
    print(f"# Python is {share:.2f} % of the lines of code")
    assert share <= MOST_PYTHON, (f"Python is {share:.2f} % of the lines of code, above {MOST_PYTHON} %: what decides "
                                  f"goes into C; Python holds hooks, tensors and docstrings")


# ---- the tests

def exact(found: list, listed: list, what: str) -> None:
    new, gone = [one for one in found if one not in listed], [one for one in listed if one not in found]
    assert not new, f"{what} that no list has:\n" + "\n".join(map(shown, new))
    assert not gone, f"{what} that is no more, take it out of the list:\n" + "\n".join(map(shown, gone))


def shown(one) -> str:
    return one if isinstance(one, str) else str(sorted(one))


def upward_imports(edges: dict[str, set[str]]) -> list[str]:
    return [f"{name} imports {other}" for name, others in edges.items() for other in sorted(others)
            if folder_of(other) > folder_of(name)]


def large_structs(programs: dict[str, Program]) -> list[str]:
    return sorted({name for program in programs.values() for source in program.sources.values()
                   for name, count in structs(source.text) if count > MOST_FIELDS})


COUNTED = {
    "include/a.h": "/* A comment.\n * More of it. */\n#define A 1 /* one */\n\n",
    "src/a.c": 'int a(void) {\n    // nothing\n    return "/* */" == 0;\n}\n',
    "cli/b.c": "int b;\n",
    "python/stagehand/a.py": '"""A docstring.\n"""\n\nA = """of\nlines"""  # a comment\n# one more\n\n\n'
                             'def f():\n    """Says."""\n    return [\n        1,\n\n    ]\n',
    "python/stagehand/integrations/b.py": "B = 1\n",
}


def counts_lines() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        write_files(root, COUNTED)
        assert line_counts(root) == {"python": 6, "c": 5}, line_counts(root)


def write_files(root: pathlib.Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


WRONG_HOUSE = {
    "low/one.h": "void one(void);\nstatic inline void all(void) { two(); }",
    "low/one.c": '#include "../high/top.h"\nvoid one(void) { /* three(); */ say("three()"); all(); }',
    "low/two.c": "static void three(void) { one(); }\nvoid two(void) { three(); call(top); }",
    "low/three.c": "void three(void) { top(); }\n"
                   "struct large { int a, b[4], *c; void (*d)(int, int); struct { int e; } f; };",
    "high/top.h": "void top(void);",
    "high/top.c": "void top(void) { three(); }",
    "package/a.py": "from . import b",
    "package/b.py": "def later():\n    from .a import x",
    "package/optim/__init__.py": "if TYPE_CHECKING:\n    from ..conductor import y",
    "package/conductor.py": "from stagehand.optim import x",
    "package/activation.py": "def later():\n    import stagehand.conductor",
}


def sees_what_is_wrong() -> None:
    """The check itself, on a small house with one fault of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        write_files(root, WRONG_HOUSE)
        program, edges = Program(root, ["low", "high"]), python_edges(root / "package")
        assert program.upwards() == ["low/one.c includes high/top.h", "low/three.c calls top of high/top.c"]
        assert program.circles() == [{"low/one.c", "low/two.c"}]
        assert list(structs(program.sources["low/three.c"].text)) == [("large", 6), ("f", 1)]
        assert upward_imports(edges) == ["activation imports conductor"]
        assert circles_of(edges) == [{"a", "b"}]


def show(programs: dict[str, Program], edges: dict[str, set[str]], root: pathlib.Path) -> None:
    for name, program in programs.items():
        print(name, *program.upwards(), *map(sorted, program.circles()), sep="\n    ")
    print("modules", *upward_imports(edges), *map(sorted, circles_of(edges)), sep="\n    ")
    print("large structs", *large_structs(programs), sep="\n    ")
    print("lines of code", line_counts(root), f"Python: {python_share(root):.2f} %", sep="\n    ")


def main() -> int:
    root = pathlib.Path(sys.argv[1]).resolve()
    programs = {name: Program(root, rooms) for name, rooms in ROOMS.items()}
    edges = python_edges(root / "python/stagehand")
    if "--today" in sys.argv:
        show(programs, edges, root)
        return 0
    cases = [("the check finds what it looks for", sees_what_is_wrong),
             ("the check counts lines of code", counts_lines),
             (f"Python is {MOST_PYTHON} % of the code at most", lambda: has_little_python(root))]
    for name, program in programs.items():
        cases.append((f"{name}: no file includes or calls a higher room",
                      lambda p=program, n=name: exact(p.upwards(), UPWARDS[n], "an include or a call upwards")))
        cases.append((f"{name}: the files of a room call each other in no circle",
                      lambda p=program, n=name: exact(p.circles(), CIRCLES[n], "a circle")))
    return tap.run([
        *cases,
        (f"no struct has more than {MOST_FIELDS} fields",
         lambda: exact(large_structs(programs), LARGE_STRUCTS, "a large struct")),
        ("Python: no folder imports a higher one",
         lambda: exact(upward_imports(edges), UPWARD_IMPORTS, "an import upwards")),
        ("Python: modules import each other in no circle",
         lambda: exact(circles_of(edges), MODULE_CIRCLES, "a circle")),
    ])


if __name__ == "__main__":
    sys.exit(main())
