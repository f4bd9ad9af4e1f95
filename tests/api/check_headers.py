#!/usr/bin/env python3
"""Each public header compiles alone as C17 and as C++17 without a warning, stagehand.h includes them all, and
every function's contract (threads, blocking, memory) can be read beside it.

    check_headers.py INCLUDE_DIR COMPILER...
"""

import functools
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from support import tap

include = pathlib.Path(sys.argv[1])
compiler = sys.argv[2:]
headers = sorted(path.relative_to(include).as_posix() for path in (include / "stagehand").glob("*.h"))
DECLARATION = re.compile(r"(/\*(?:(?!\*/).)*\*/)?\s*\bSTH_API\b(?!\s*__attribute__)([^;{]*);", re.DOTALL)
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{include}"]


def compile_text(language: str, standard: str, text: str) -> subprocess.CompletedProcess:
    command = [*compiler, "-x", language, f"-std={standard}", *STRICT, "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True)


def compiles_alone(header: str, language: str, standard: str) -> None:
    if language == "c++" and compile_text("c++", "c++17", "#include <cstdint>\n").returncode:
        raise tap.Skip("no C++ compiler is installed")
    # Twice: the include guard is part of what is promised.
    done = compile_text(language, standard, f'#include "{header}"\n' * 2)
    assert done.returncode == 0, done.stderr


def all_are_included() -> None:
    text = (include / "stagehand/stagehand.h").read_text()
    named = set(re.findall(r'#include "(.+)"', text)) | {"stagehand/stagehand.h"}
    assert named == set(headers), f"differs: {sorted(named ^ set(headers))}"


def every_function_has_a_contract(header: str) -> None:
    """Its own comment says all three things, or the header's opening comment says what holds otherwise."""
    text = (include / header).read_text()
    words = ("Threads:", "Blocks:", "Allocates:")
    opening = text[:text.index("*/")]
    assert "#" not in opening, f"{header} does not begin with a comment"
    if "Unless a function says otherwise" in opening:
        assert all(word in opening for word in words), f"{header}: the general rule leaves something out"
        return
    for comment, declaration in DECLARATION.findall(text):
        name = re.search(r"(\w+)\s*\(", declaration)[1]
        absent = [word for word in words if word not in comment]
        assert not absent, f"{header}: the comment of {name} lacks {' '.join(absent)}"


def main() -> int:
    cases = [("stagehand.h includes every public header", all_are_included)]
    for header in headers:
        cases.append((f"{header}: contracts", functools.partial(every_function_has_a_contract, header)))
        for language, standard in (("c", "c17"), ("c++", "c++17")):
            case = functools.partial(compiles_alone, header, language, standard)
            cases.append((f"{header} as {standard}", case))
    return tap.run(cases)


sys.exit(main())
