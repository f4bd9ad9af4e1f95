"""Documents must not say what is no longer so: links, paths, names, tables, the width of
lines, nested conditional expressions, and the Python of README."""

import ast
import functools
import importlib.util
import json
import pathlib
import re

import children
import pytest
from stagehand import _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")  # not those with a scheme
NAME = re.compile(r"(?<![\w/.])stagehand\.(?!h\b|pc\b)([A-Za-z]\w*(?:\.\w+)*)")
PATH = re.compile(r"(?<![\w./])(?:src|include|python|cli|tests|examples|docs|tools|bench)/[\w./*-]*\w")


def rows(page: str, columns: int) -> list[tuple[str, ...]]:
    """Cells of the tables of a page in docs/, without heads and rules."""
    found = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns and not set(cells[0]) <= set("-"):
            found.append(tuple(cells))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_to_something(page):
    text = page.read_text()
    absent = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    absent += [path for path in PATH.findall(text)
               if not list(ROOT.glob(path)) and not (page.parent / path).exists()]
    assert not absent


def test_each_page_opens_with_what_the_reader_can_do():
    pages = [page for page in PAGES if page.name not in ("README.md", "CONTRIBUTING.md")]
    assert not [page.name for page in pages if not re.search(r"After\s+reading\s+this\s+page\s+you",
                                                             page.read_text()[:400])]


def test_no_line_is_longer_than_contributing_says():
    most = int(re.search(r"at most\s(\d+)\s+columns", (ROOT / "CONTRIBUTING.md").read_text())[1])
    files = [path for folder in ("bench", "cli", "examples", "include", "python", "src", "tests", "tools")
             for path in (ROOT / folder).rglob("*") if path.suffix in (".c", ".cpp", ".h", ".py")]
    assert len(files) > 500
    long = [f"{path.relative_to(ROOT)}:{number}" for path in files
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > most]
    assert not long


def test_no_line_of_a_page_is_longer_than_100_columns():
    """But for tables, code, and the lists of changes and of cases, which are searched by line."""
    long = []
    for page in PAGES:
        code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            code ^= line.strip().startswith("```")
            if len(line) > 100 and not (code or line.startswith(("|", "    "))):
                long.append(f"{page.name}:{number}")
    assert not [line for line in long if not line.startswith(("CHANGELOG.md", "field-cases.md"))]


SCRAP = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def nested_conditionals(text: str) -> list[int]:
    """Lines of C with a `?` in a branch of another conditional expression."""
    text = SCRAP.sub(lambda m: "\n" * m[0].count("\n") + " ", text)
    found, line, seen = [], 1, [False]  # seen: for each open bracket, a `?` in the expression so far
    for c in text:
        if c == "\n":
            line += 1
        elif c in "([{":
            seen.append(False)
        elif c in ")]}":
            seen.pop()
        elif c in ";,":
            seen[-1] = False
        elif c == "?":
            if any(seen):
                found.append(line)
            seen[-1] = True
    return found


def test_no_conditional_expression_is_nested():
    assert nested_conditionals("f(a ? b : c, d ? e : f);\nx = a ? b : /* ? */ c == '?';") == []
    assert nested_conditionals("a = b\n? c\n: d ? e : f;\ng = h ? i(j ? k : l) : m;") == [3, 4]
    files = [path for folder in ("cli", "src", "python/stagehand/_core") for path in (ROOT / folder).rglob("*.[ch]")]
    assert len(files) > 400
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in files for line in nested_conditionals(path.read_text())]


@functools.cache
def tool(name: str):
    """tools/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sentences_are_found_in_pages_and_in_comments(tmp_path):
    page, header = tmp_path / "page.md", tmp_path / "header.h"
    page.write_text("# Where things are\n\nIt is. What is it? So\nbe it.\n\n"
                    "| what it is | b |\n|---|---|\n| Of two one | c |\n\n"
                    "- Whoever comes here.\n- Others come: Who are they?\n\n```\nWhat is code is not read.\n```\n")
    header.write_text("/* What it is.\n * It is. Whose is it? */\n"
                      "int a; /* Of the caller: */\n/* Whatsoever is fine. */\n")
    found, _ = tool("openers").count([page, header])
    assert [(path.name, line) for path, line, _ in found] == [
        ("page.md", 1), ("page.md", 3), ("page.md", 3), ("page.md", 8), ("page.md", 10), ("page.md", 11),
        ("header.h", 1), ("header.h", 2), ("header.h", 3)]


def test_few_sentences_open_with_what_who_where_of_so():
    """Subject, verb, object. `python tools/openers.py --list` names the sentences."""
    module = tool("openers")
    found, total = module.count(module.files())
    assert total > 5000
    assert len(found) <= total / 100, [f"{path.relative_to(ROOT)}:{line}: {text}" for path, line, text in found]


PUBLIC = """
import inspect, json, stagehand
found = {}
def add(name, what):
    if inspect.getdoc(what) and (inspect.isclass(what) or not isinstance(what, (int, str))):
        found[name] = inspect.getdoc(what)
for module in [stagehand] + [getattr(stagehand, name) for name in stagehand.__all__]:
    for name in getattr(module, "__all__", ()) if inspect.ismodule(module) else ():
        what = getattr(module, name)
        add(module.__name__ + "." + name, what)
        for key, member in vars(what).items() if inspect.isclass(what) else ():
            if not key.startswith("_"):
                add(module.__name__ + "." + name + "." + key, member)
print(json.dumps(found))
"""


def test_few_sentences_of_public_docstrings_open_so(tmp_path):
    done = children.run(PUBLIC)
    assert done.status == 0, done.stderr
    page = tmp_path / "docstrings.md"
    docs = json.loads(done.stdout)
    page.write_text("\n\n".join(docs.values()))
    found, total = tool("openers").count([page])
    assert len(docs) > 100 and total > 400
    assert len(found) <= total / 100, [sentence for _, _, sentence in found]


def test_the_glossary_is_short_and_gives_each_word_once():
    terms = [term for term, _ in rows("glossary.md", 2)[1:]]
    terms = terms[:terms.index("avoid")]
    assert 20 < len(terms) <= 40
    assert terms == sorted(set(terms))


NOT_SEARCHED = ("glossary.md", "figures-history.md", "field-cases.md")


def texts():
    """(place, text) of all that the glossary's rule is for: pages, comments of headers, docstrings, messages."""
    for page in PAGES:
        if page.name not in NOT_SEARCHED:
            yield page.name, page.read_text()
    for path in sorted((ROOT / "include").rglob("*.h")):
        yield path.name, "\n".join(re.findall(r"/\*.*?\*/", path.read_text(), re.DOTALL))
    for path in sorted((ROOT / "python/stagehand").rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
        yield path.name, "\n".join(ast.get_docstring(node) or "" for node in nodes)
    for message in tool("messages").of_c() + tool("messages").of_python():
        yield message.place, message.text


def words_to_avoid() -> list[str]:
    table = (ROOT / "docs/glossary.md").read_text().split("| avoid | use |\n|---|---|\n")[1].split("\n\n")[0]
    return [word.strip() for line in table.splitlines() for word in line.split("|")[1].split(",")]


def test_no_word_is_used_that_the_glossary_replaces():
    words = words_to_avoid()
    assert len(words) > 15
    forms = [f"(?i:{word[0]})" + re.escape(word[1:]).replace(r"\ ", r"\s+(?:\*\s+)?") for word in words]
    avoided = re.compile(r"\b(?:" + "|".join(forms) + r")\b")
    assert avoided.search("It was let\n * go of.") and not avoided.search("an outlet goes; `note_anew`")
    assert not [f"{place}: {found[0]}" for place, text in texts() for found in [avoided.search(text)] if found]


def test_every_page_is_in_the_index():
    docs = ROOT / "docs"
    listed = set(LINK.findall((docs / "README.md").read_text()))
    assert {str(page.relative_to(docs)) for page in PAGES if docs in page.parents} - {"README.md"} <= listed


RESOLVES = """
import importlib, operator
import stagehand
for name in {names}:
    try:
        operator.attrgetter(name)(stagehand)
    except AttributeError:
        try:
            importlib.import_module("stagehand." + name)
        except ModuleNotFoundError as error:  # the library that it is for; with `make test-hosts` it is there
            if not name.startswith("integrations.") or error.name.startswith("stagehand"):
                raise
"""


def test_names_of_the_package_are_there():
    names = sorted({name for page in PAGES for name in NAME.findall(page.read_text())})
    assert "executor.Runner" in names
    done = children.run(RESOLVES.format(names=names))
    assert done.status == 0, done.stderr


def test_the_table_of_telemetry_is_the_record():
    table = [row for row in rows("telemetry.md", 3) if row[0].startswith("`")]
    assert table == [(f"`{name}`", unit, meaning) for name, unit, meaning in _core.METRICS]


def test_the_table_of_states_is_the_code():
    text = (ROOT / "src/core/unit_state.h").read_text()
    edges = re.findall(r'X\((\w+), (\w+), "([^"]+)"\)', text)
    assert edges and [row for row in rows("states.md", 3) if row[0].isupper()] == edges


def test_the_python_of_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = children.run_bare(block, children.OPTIMIZERS)
        assert done.status == 0, done.stderr
        assert float(done.stdout.split()[0]) > 0, "nothing streamed"
