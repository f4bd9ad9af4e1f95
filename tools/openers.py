"""Counts the sentences of the documents that open with a word which makes a reader wait for the subject.

    tools/openers.py [--list] [FILE ...]    default: README, CHANGELOG, CONTRIBUTING, docs/*.md, include/**/*.h

Code blocks are left out. A table's cell and a list's item begin a sentence. Of a header the comments count.
Prints the share for each file, and with --list the place of each such sentence."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPENS = re.compile(r"[`*\"(\[]*(?:What|Who|Where|Of|So|Whoever|Whatever|Whose)\b")
ENDS = re.compile(r"(?<=[.!?:])[)*`\"]*\s+(?=[A-Z`*\"(\[])")
ITEM = re.compile(r"\s*(?:[-*#>]+|\d+\.)\s+")
SHORTEST = 3  # words: less is a name, a number, a heading


def files() -> list[pathlib.Path]:
    """The documents that the rule is for."""
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return pages + sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "include").rglob("*.h"))


def _page(text: str) -> list[tuple[int, str]]:
    """(first line, text) of each paragraph, item and cell of a page in Markdown."""
    parts: list[tuple[int, str]] = []
    code = new = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if code or not line.strip() or line.lstrip().startswith("```"):
            new = True
        elif line.startswith("|"):
            parts += [(number, cell.strip()) for cell in line.strip("|").split("|")]
            new = True
        else:
            item = ITEM.match(line)
            if item or new or not parts:
                parts.append((number, line[item.end():] if item else line))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + "\n" + line)
            new = line.startswith("#")
    return parts


def _header(text: str) -> list[tuple[int, str]]:
    """(first line, text) of each paragraph of the comments of a header."""
    parts = []
    for comment in re.finditer(r"/\*+(.*?)\*+/", text, re.DOTALL):
        number = text.count("\n", 0, comment.start(1)) + 1
        body = re.sub(r"^[ \t]*\*?[ \t]?", "", comment[1], flags=re.MULTILINE)
        for paragraph in re.finditer(r"(?:[^\n]+\n?)+", body):
            parts.append((number + body.count("\n", 0, paragraph.start()), paragraph[0]))
    return parts


def sentences(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, sentence) for each sentence of a page or of a header's comments."""
    text = path.read_text()
    found = []
    for number, part in (_page if path.suffix == ".md" else _header)(text):
        starts = [0, *(match.end() for match in ENDS.finditer(part)), len(part)]
        for start, end in zip(starts, starts[1:]):
            words = part[start:end].split()
            if len(words) >= SHORTEST:
                found.append((number + part.count("\n", 0, start), " ".join(words)))
    return found


def count(paths: list[pathlib.Path]) -> tuple[list[tuple[pathlib.Path, int, str]], int]:
    """The sentences that open so, as (file, line, sentence), and how many sentences there are at all."""
    whole = [(path, line, sentence) for path in paths for line, sentence in sentences(path)]
    return [found for found in whole if OPENS.match(found[2])], len(whole)


def main() -> None:
    """Prints the counts."""
    paths = [pathlib.Path(name).resolve() for name in sys.argv[1:] if name != "--list"] or files()
    found, total = count(paths)
    for path in paths:
        here, of = count([path])
        if here and "--list" not in sys.argv:
            print(f"{len(here):4} of {of:4}  {path.relative_to(ROOT)}")
    if "--list" in sys.argv:
        for path, line, sentence in found:
            print(f"{path.relative_to(ROOT)}:{line}: {sentence}")
    print(f"{len(found)} of {total} sentences ({len(found) / total:.1%})")


if __name__ == "__main__":
    main()
