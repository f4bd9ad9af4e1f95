"""Lists the error messages that a user can see: those of sthi_fail() and sthi_no_memory() in src, and of raise in the
Python package.

    tools/messages.py    file:line, class, object, message; a tab between them

Placeholders are "{}". A message that is put together elsewhere is "{}" here."""

import ast
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
CALL = re.compile(r"(?<![\w.])sthi_(fail|no_memory)\s*\(")
TOKEN = re.compile(r'"((?:\\.|[^"\\])*)"|\'(?:\\.|[^\'\\])\'|/\*.*?\*/|//[^\n]*|[(),]|\bPRI\w+|[^\s"\'(),/]+|/',
                   re.DOTALL)
FORMAT = re.compile(r"%[-+ #0]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|ll|[hlzjt])?[a-zA-Z]|%(?=\{)")


class Message(NamedTuple):
    place: str  # file:line
    kind: str   # STH_... or the exception's name
    object: str  # source text of the object, in C
    text: str


def _arguments(text: str, at: int) -> list[tuple[str, str]]:
    """(literals put together, source) of each argument of the call whose bracket ends before `at`."""
    found, depth, start = [["", at]], 1, at
    while depth:
        token = TOKEN.search(text, at)
        at = token.end()
        depth += (token[0] == "(") - (token[0] == ")")
        if token[0] == "," and depth == 1:
            found[-1].append(text[start:token.start()].strip())
            start = at
            found.append(["", at])
        elif token[1] is not None:
            found[-1][0] += token[1]
        elif token[0].startswith("PRI"):
            found[-1][0] += "{}"
    found[-1].append(text[start:at - 1].strip())
    return [(literals, source) for literals, _, source in found]


def of_c() -> list[Message]:
    found = []
    for path in sorted((ROOT / "src").rglob("*.[ch]")):
        text = path.read_text()
        for call in CALL.finditer(text):
            place = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, call.start()) + 1}"
            arguments = _arguments(text, call.end())
            if call[1] == "no_memory":
                status, thing, literals = "STH_OUT_OF_HOST_MEMORY", arguments[0][1], f"no memory for {arguments[1][0]}"
            elif len(arguments) > 4:
                status, thing, literals = arguments[0][1], arguments[3][1], arguments[4][0] or "{}"
            else:
                continue  # the definition
            message = FORMAT.sub("{}", literals).replace("%{}", "{}").replace('\\"', '"')
            found.append(Message(place, status, thing.strip('"'), message.replace("%%", "%")))
    return found


def _text(node) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return _text(node.body) + " | " + _text(node.orelse)
    return "{}"


def of_python() -> list[Message]:
    found = []
    for path in sorted((ROOT / "python/stagehand").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                found.append(Message(f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.exc.func), "",
                                     _text(node.exc.args[0])))
    return found


def main() -> None:
    for message in of_c() + of_python():
        print(*message, sep="\t")


if __name__ == "__main__":
    main()
