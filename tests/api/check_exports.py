#!/usr/bin/env python3
"""The shared library exports what the public headers declare, which is what symbols.txt lists.

    check_exports.py LIBRARY INCLUDE_DIR   the test
    check_exports.py --update              writes symbols.txt anew from the headers

symbols.txt is kept in the repository so that a change of the interface shows in a review.
"""

import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from support import tap

LIST = HERE / "symbols.txt"


def declared(include: pathlib.Path) -> list[str]:
    names = set()
    for header in (include / "stagehand").glob("*.h"):
        text = re.sub(r"/\*.*?\*/", " ", header.read_text(), flags=re.DOTALL)
        for declaration in re.findall(r"\bSTH_API\b(?!\s*__attribute__)([^;{]*);", text):
            names.add(re.search(r"(\w+)\s*\(", declaration)[1])
    return sorted(names)


def exported(library: pathlib.Path) -> list[str]:
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", library], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return sorted(line.split()[0] for line in lines)


def same(found: list[str], wanted: list[str], what: str) -> None:
    extra, absent = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
    assert not extra and not absent, f"{what}: too many {extra}, missing {absent}"


def main() -> int:
    if sys.argv[1:] == ["--update"]:
        LIST.write_text("".join(f"{name}\n" for name in declared(HERE.parent.parent / "include")))
        return 0
    library, include = map(pathlib.Path, sys.argv[1:])
    listed = LIST.read_text().split()

    def only_ours():
        foreign = [name for name in exported(library) if not name.startswith("sth_")]
        assert not foreign, f"exported without the prefix sth_: {foreign}"

    return tap.run([
        ("only names with the prefix sth_ are exported", only_ours),
        ("every function declared in the headers is exported, and nothing else",
         lambda: same(exported(library), declared(include), "exports against headers")),
        ("symbols.txt lists the functions declared (run check_exports.py --update)",
         lambda: same(listed, declared(include), "symbols.txt against headers")),
    ])


sys.exit(main())
