"""A session is held together by parts: who owns what, and what one part knows of another."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "python/stagehand"
SESSION = ("session/session.py", "Session")

# Attribute of a session -> where the class of that part is.
PARTS = {
    "choice": ("session/choosing.py", "Choosing"),
    "needs": ("session/needs.py", "Needs"),
    "takeover": ("session/opening.py", "Takeover"),
    "steps": ("session/steps.py", "Steps"),
    "stay": ("session/staying.py", "Staying"),
    "captures": ("session/captures.py", "Captures"),
    "regions": ("session/compiled.py", "Regions"),
    "images": ("weights/images.py", "Images"),
    "casts": ("weights/casting.py", "Casts"),
    "trained": ("session/trained.py", "Trained"),
    "writes": ("session/writes.py", "Writes"),
    "tables": ("session/tables.py", "Tables"),
}


def class_of(file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((PACKAGE / file).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def methods(kind: ast.ClassDef) -> list:
    return [node for node in kind.body if isinstance(node, ast.FunctionDef)]


def chain(node) -> list:
    """["self", "_session", "core"] of `self._session.core`; [] where it does not begin with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else ()), *reversed(names)] if isinstance(node, ast.Name) else []


def chains(node) -> list:
    """(names, whether it is assigned to), of all attributes below a node."""
    return [(chain(found), not isinstance(found.ctx, ast.Load)) for found in ast.walk(node)
            if isinstance(found, ast.Attribute) and chain(found)]


def own(kind: ast.ClassDef) -> set:
    """Attributes that __init__ gives, or a method that it calls, and methods."""
    by_name = {method.name: method for method in methods(kind)}
    calls = [chain(node.func) for node in ast.walk(by_name["__init__"]) if isinstance(node, ast.Call)]
    called = {names[1] for names in calls if names[:1] == ["self"]} & set(by_name)
    first = [by_name[name] for name in ("__init__", *called)]
    return set(by_name) | {names[1] for method in first for names, assigned in chains(method)
                           if assigned and names[0] == "self" and len(names) == 2}


FILES = {PACKAGE / file for file, _ in PARTS.values()}
OWN = {part: own(class_of(*where)) for part, where in PARTS.items()}
OF_SESSION = own(class_of(*SESSION))


@pytest.mark.parametrize("part", [*PARTS, "session"])
def test_a_part_has_its_attributes_from_the_beginning_and_writes_no_others(part):
    kind = class_of(*PARTS.get(part, SESSION))
    known, others = OWN.get(part, OF_SESSION), {"session", *PARTS}
    wrong = [(method.name, ".".join(names)) for method in methods(kind) for names, assigned in chains(method)
             if names[0] == "self" and names[1] not in known
             or assigned and {name.lstrip("_") for name in names[:-1]} & others]
    assert not wrong


def after_session(names: list, in_part: bool = True) -> list:
    """What follows the session in a chain of names: `self._session.steps.lock` gives ["steps", "lock"]. in_part: so do
    `self._steps.lock`, of a part that keeps another, and `steps.lock`, of a method that does."""
    at = [i for i, name in enumerate(names[:-1]) if name in ("session", "_session")]
    if at:
        return names[at[-1] + 1:]
    if in_part and names[0] == "self" and len(names) > 2 and names[1][:1] == "_" and names[1][1:] in PARTS:
        return [names[1][1:], *names[2:]]
    if in_part and names[0] in PARTS and len(names) > 1:
        return names
    return []


@pytest.mark.parametrize("part", PARTS)
def test_what_others_may_call_of_a_part_says_what_it_does(part):
    public = [method for method in methods(class_of(*PARTS[part])) if not method.name.startswith("_")]
    assert public and not [method.name for method in public if not ast.get_docstring(method)]


def test_parts_use_each_other_by_public_names():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for names, _ in chains(ast.parse(path.read_text())):
            own_part = path == PACKAGE / SESSION[0] and names[0] == "self"
            rest = names[1:] if own_part else after_session(names, path in FILES)
            if len(rest) > 1 and rest[0] in PARTS and (rest[1].startswith("_") or rest[1] not in OWN[rest[0]]):
                wrong.append(f"{path.name}: {'.'.join(names)}")
    assert not wrong


def test_what_is_asked_of_a_session_is_there():
    asked = {(path.name, ".".join(names)): after_session(names, False) for path in PACKAGE.rglob("*.py")
             for names, _ in chains(ast.parse(path.read_text()))}
    assert not [where for where, rest in asked.items() if rest and rest[0] not in OF_SESSION]


@pytest.mark.parametrize("part", PARTS)
def test_what_a_part_uses_of_its_session_is_written(part):
    kind = class_of(*PARTS[part])
    used = set()
    for method in methods(kind):
        for names, _ in chains(method):
            rest = after_session(names)
            if rest:
                used.add(".".join(rest[:2] if rest[0] in PARTS and len(rest) > 1 else rest[:1]))
    used = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    says = next(ast.literal_eval(node.value) for node in kind.body
                if isinstance(node, ast.Assign) and node.targets[0].id == "USES")
    assert set(says.split()) == used, " ".join(sorted(used))
    assert not [name for name in used if name.startswith("_")]
    assert {name.split(".")[0] for name in used} <= OF_SESSION
