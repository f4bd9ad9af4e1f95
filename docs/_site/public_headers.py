"""The C reference: the directive `header` documents a public header, from its comments.

    ```{eval-rst}
    .. header:: runtime.h
    ```

A header is read as it is written: a comment describes the declarations that follow it without an empty line, and a
comment alone is text. Declarations with braces are shown as they are, with the comments inside them."""

import pathlib
import re

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.util import logging

HEADERS = pathlib.Path(__file__).resolve().parents[2] / "include/stagehand"
PIECE = re.compile(r"/\*(?P<comment>.*?)\*/|(?P<define>#(?:\\\n|[^\n])*)|(?P<blank>\n[ \t]*\n)|(?P<other>\S)",
                   re.DOTALL)
WORD = re.compile(r"\b(sth_\w+|STH_\w+)")
SKIPPED = re.compile(r"#\s*(ifndef|if|endif|else|elif|undef|include|define (STAGEHAND_\w+_H|STH_API))")


def declaration(text: str, start: int) -> int:
    """The end of the declaration that begins at `start`: behind its semicolon and a comment on the same line."""
    depth, at = 0, start
    while at < len(text):
        if text.startswith("/*", at):
            at = text.index("*/", at) + 2
            continue
        c = text[at]
        depth += (c in "({") - (c in ")}")
        at += 1
        if c == ";" and depth == 0:
            break
    rest = re.compile(r"[ \t]*/\*.*?\*/", re.DOTALL).match(text, at)
    return rest.end() if rest else at


def pieces(text: str):
    """(kind, text) of a header: comment, define, blank, declaration."""
    text = re.sub(r'#ifdef __cplusplus\n.*?#endif\n', "", text, flags=re.DOTALL)
    at = 0
    while match := PIECE.search(text, at):
        kind, at = match.lastgroup, match.end()
        if kind == "other":
            at = declaration(text, match.start())
            yield "declaration", text[match.start():at]
        elif kind == "blank":
            yield kind, ""
        elif kind == "define" and SKIPPED.match(match[0]):
            continue
        else:
            yield kind, match[0]


def groups(text: str):
    """(comment, declarations) in order; either may be empty."""
    comment, found = "", []
    for kind, piece in pieces(text):
        if kind == "comment" or kind == "blank":
            if found or kind == "blank" and comment:
                yield comment, found
                comment, found = "", []
            if kind == "comment":
                comment = piece
        else:
            found.append(piece)
    if comment or found:
        yield comment, found


def lines_of(comment: str) -> list[str]:
    body = comment.removeprefix("/*").removesuffix("*/")
    return [re.sub(r"^ ?\* ?", "", line) if i else line.strip() for i, line in enumerate(body.split("\n"))]


def escape(text: str) -> str:
    def part(word: str) -> str:
        if word.startswith("`"):
            return f"\\ `{word}`\\ "
        word = re.sub(r"([*`|\\]|_(?!\w))", r"\\\1", word)
        return WORD.sub(lambda m: f"\\ :c:expr:`{m[1]}`\\ " if m[1].startswith("sth_") else f"\\ ``{m[1]}``\\ ", word)
    return "".join(part(word) for word in re.split(r"(`[^`\n]+`)", text))


def prose(comment: str) -> list[str]:
    """A comment as reStructuredText: "- " begins a point, and other lines that are indented by four are code."""
    made, mode = [], "text"
    for line in lines_of(comment):
        words, indent = line.strip(), len(line) - len(line.lstrip())
        if not words:
            made.append("")
            mode = mode if mode == "code" else "text"
            continue
        if words.startswith("- ") and mode != "code":
            now = "point"
        elif mode == "point" and indent:
            now = "point"
        else:
            now = "code" if indent >= 4 else "text"
        if now != mode or words.startswith("- "):
            made += ["", "::", ""] if now == "code" and mode != "code" else [""]
        lead = "  " if now == "point" and not words.startswith("- ") else ""
        made.append("    " + line if now == "code" else lead + escape(words))
        mode = now
    return made


def signature(text: str) -> str:
    text = re.sub(r"/\*.*?\*/|STH_API", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text).strip().rstrip(";").strip()


def described(comment: str, declarations: list[str]) -> list[str]:
    body = ["   " + line for line in prose(comment)] if comment else []
    lines, functions = [], []

    def flush():
        nonlocal functions, body
        if functions:
            lines.append(f".. c:function:: {functions[0]}")
            lines.extend(" " * 16 + other for other in functions[1:])
            lines.extend(["", *body, ""])
            functions, body = [], []

    for text in declarations:
        if text.startswith("STH_API"):
            functions.append(signature(text))
            continue
        flush()
        kind, name = object_of(text)
        lines += [f".. c:{kind}:: {name}", "", *body, ""] if kind else [*(line[3:] for line in body), ""]
        body = []
        if "{" in text or "\n" in text or not kind or text.startswith("#"):
            pad = "   " if kind else ""
            lines += [f"{pad}.. code-block:: c", "", *(f"{pad}   {line}" for line in text.splitlines()), ""]
    flush()
    return lines


def object_of(text: str) -> tuple[str, str]:
    """(directive, name) of a declaration that is no function; ("", "") if it has no name."""
    if match := re.match(r"#\s*define (\w+(?:\([\w, .]*\))?)", text):
        return "macro", match[1]
    if match := re.match(r"typedef (struct|union|enum) (\w+)\s*\{", text):
        return match[1], match[2]
    if match := re.fullmatch(r"typedef struct (\w+) (\w+);", text):
        return "struct", match[1]
    if text.startswith("typedef") and (match := re.search(r"\(\*(\w+)\)\(|(\w+);", signature(text) + ";")):
        return "type", match[1] or match[2]
    if match := re.match(r"struct (\w+)\s*\{", text):
        return "struct", match[1]
    return "", ""


class Header(Directive):
    required_arguments = 1

    def run(self):
        path = HEADERS / self.arguments[0]
        env = self.state.document.settings.env
        env.note_dependency(str(path))
        env.metadata.setdefault(env.docname, {}).setdefault("headers", []).append(path.name)
        lines: list[str] = []
        for comment, found in groups(path.read_text()):
            lines += described(comment, found) if found else [*prose(comment), ""]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source=str(path)), 0, node)
        return node.children


def all_listed(app, env):
    """A header that no page documents fails a build with -W."""
    listed = {name for data in env.metadata.values() for name in data.get("headers", ())}
    for path in sorted(HEADERS.glob("*.h")):
        if path.name not in listed:
            logging.getLogger(__name__).warning("%s is on no page of the C reference", path.name)


def setup(app):
    app.add_directive("header", Header)
    app.connect("env-updated", lambda app, env: all_listed(app, env))
    return {"parallel_read_safe": True}
