#!/usr/bin/env python3
"""Mutation testing of pure files: makes one small mistake at a time and asks whether the tests notice.

    tools/mutate.py BUILD_DIR [FILE...]        default: every file of TESTS
    tools/mutate.py BUILD_DIR --list FILE      only shows the mutants

BUILD_DIR is a finished Meson build. A mutant changes one relation, one arithmetic or logical operator, one constant by
one or to the other truth value, one condition to its opposite, or drops one statement. It is compiled alone, and each
of the file's test programs is linked with it in the place of the library's own. A mutant is killed when a program
fails, crashes or takes ten times as long; one that the compiler turns into the same code as the original is no mutant;
one that does not compile neither.
Survivors are printed with their line. Those listed in tools/mutants.txt ("FILE: ORIGINAL LINE => MUTATED LINE: why")
are explained: no test could tell them apart, or none should. Ends with 1 where another one survives, or fewer than 90 %
are killed.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPLAINED = pathlib.Path(__file__).with_name("mutants.txt")
LEAST_KILLED = 0.9
SANITIZE = ["-fsanitize=address,bounds", "-fno-sanitize-recover=bounds"]
TESTS = {
    "src/base/arith.c": ["base/arith"],
    "src/base/arith.h": ["base/arith"],
    "src/base/natural.c": ["base/natural"],
    "src/conductor/budget.c": ["conductor/budget", "conductor/search"],
    "src/conductor/phases.c": ["conductor/pure"],
    "src/conductor/policy.c": ["conductor/pure"],
    "src/conductor/tokens.c": ["conductor/pure"],
    "src/core/account.c": ["core/account"],
    "src/core/places.c": ["core/places"],
    "src/core/unit_state.c": ["core/unit_state"],
    "src/store/header.c": ["store/header"],
    "src/store/utf8.c": ["store/utf8"],
}

RELATIONS = {"<": ["<="], "<=": ["<"], ">": [">="], ">=": [">"], "==": ["!="], "!=": ["=="], "&&": ["||"], "||": ["&&"]}
ARITHMETIC = {"+": ["-"], "-": ["+"], "*": ["/"], "/": ["*"], "%": ["/"], "+=": ["-="], "-=": ["+="], "++": ["--"],
              "--": ["++"], "<<": [">>"], ">>": ["<<"], "|": ["&"]}
TOKEN = re.compile(r"->|\+\+|--|<<=|>>=|[-+*/%&|^!<>=]=|&&|\|\||<<|>>|\w+(?:\.\w+)?|[-+*/%&|^!<>=~?:;,.(){}\[\]]")
NUMBER = re.compile(r"(0x[0-9a-fA-F]+|\d+)([uUlL]*)$")
STATEMENT = re.compile(r"^\s+(?!return\b|break\b|continue\b|goto\b|case\b|default\b|else\b|static\b|const\b|do\b)"
                       r"(?:(?:if|while|for) \(.*\) )?"
                       r"((?:\(void\))?[*\w>.\[\]()&-]+(?: (?:[-+*|&]?=) .*|\(.*\)|\+\+|--|));$")
DECLARATION = re.compile(r"^\s*(?:static |const |struct |unsigned |enum )*"
                         r"[a-z_][\w]*(?: \*+|\*+ | )+[\w\[\]]+(?: = |;|,|\[)")


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    line: int  # from 1
    before: str
    after: str

    def key(self) -> str:
        return f"{self.file}: {self.before.strip()} => {self.after.strip()}"


def code_lines(text: str) -> list[str]:
    """The lines with comments, strings, characters and preprocessor lines blanked, at their places."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])
    text = re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.MULTILINE)
    return text.split("\n")


def is_binary(code: str, at: int) -> bool:
    """Whether an operand stands before: then + - * & | are operators between two."""
    before = code[:at].rstrip()
    return bool(before) and (before[-1].isalnum() or before[-1] in "_)]") and not before.endswith(("return", "case"))


def swaps(code: str, at: int, token: str) -> list[str]:
    if token in RELATIONS:
        return RELATIONS[token]
    if token in ("+", "-", "*", "/", "%", "|") and (not is_binary(code, at) or token == "*"
                                                    and DECLARATION.match(code)):
        return []
    if token in ARITHMETIC:
        return ARITHMETIC[token]
    if token in ("true", "false"):
        return ["false" if token == "true" else "true"]
    if number := NUMBER.match(token):
        value = int(number[1], 0)
        return [f"{n}{number[2]}" for n in (value + 1, value - 1) if n >= 0]
    return []


def negations(code: str) -> list[tuple[int, int, str]]:
    """(from, to, text) of each whole condition of if and while, turned round."""
    found = []
    for match in re.finditer(r"\b(?:if|while) \(", code):
        depth = 0
        for at in range(match.end() - 1, len(code)):
            depth += (code[at] == "(") - (code[at] == ")")
            if not depth:
                found.append((match.end(), at, f"!({code[match.end():at]})"))
                break
    return found


def mutants_of(file: str) -> list[Mutant]:
    text = (ROOT / file).read_text()
    found = []
    for number, (line, code) in enumerate(zip(text.split("\n"), code_lines(text)), 1):
        edits = [(match.start(), match.end(), other) for match in TOKEN.finditer(code)
                 for other in swaps(code, match.start(), match[0])]
        edits += [(a, b, "!(" + line[a:b] + ")") for a, b, _ in negations(code)]
        if (statement := STATEMENT.match(code)) and not DECLARATION.match(code):
            edits.append((statement.start(1), statement.end(1), ""))
        found += [Mutant(file, number, line, line[:a] + new + line[b:]) for a, b, new in edits]
    return list(dict.fromkeys(found))


class Bench:
    """Compiles a mutant and runs the tests with it."""

    def __init__(self, build: pathlib.Path, file: str, work: pathlib.Path):
        self.build, self.file, self.work = build, file, work
        self.text = (ROOT / file).read_text()
        commands = json.loads((build / "compile_commands.json").read_text())
        tests = {entry["name"]: entry["cmd"][0] for entry in
                 json.loads((build / "meson-info/intro-tests.json").read_text())}
        self.programs = [pathlib.Path(tests[name]) for name in TESTS[file]]
        self.header = file.endswith(".h")
        wanted = [self.command_for(commands, file)] if not self.header else [
            entry for entry in commands for program in self.programs
            if entry["output"].startswith(str(program.relative_to(build)) + ".p/")]
        self.compiles = [(shlex.split(entry["command"]), entry["output"], entry["file"]) for entry in wanted]
        libraries = subprocess.run(["pkg-config", "--libs", "cmocka", "jansson", "zlib"], check=True,
                                   capture_output=True, text=True).stdout.split()
        self.libraries = [str(build / "libstagehand.a"), *libraries, "-lm", "-ldl", "-lpthread"]
        self.original = self.compile("original", self.text)
        start = time.monotonic()
        assert self.original and self.passes("original", self.original, 60), f"{file}: the tests fail without a change"
        self.limit = 2 + 10 * (time.monotonic() - start)

    def command_for(self, commands: list, file: str) -> dict:
        return next(entry for entry in commands
                    if (pathlib.Path(entry["directory"]) / entry["file"]).resolve() == ROOT / file
                    and "libstagehand" in entry["output"])

    def compile(self, name: str, text: str) -> list[pathlib.Path] | None:
        """The object files that differ from the library's, or None where the text does not compile."""
        folder = self.work / name
        inside = pathlib.Path(self.file).relative_to("src")
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        (folder / inside).write_text(text)
        objects = []
        for command, output, source in self.compiles:
            target = folder / (pathlib.Path(output).name)
            chosen = source if self.header else folder / inside
            words = [word for word in command[:-1] if not word.startswith(("-MQ", "-MF", "-MD"))]
            words = [word for word in words if word not in (output, output + ".d", "-o", "-c", "-Werror", "-g")]
            words[1:1] = [f"-I{folder}", *SANITIZE]  # one element too far is noticed too
            done = subprocess.run([*words, "-o", target, "-c", chosen], cwd=self.build, capture_output=True)
            if done.returncode:
                return None
            objects.append(target)
        return objects

    def code(self, objects: list[pathlib.Path]) -> str:
        """Of what the compiler made, without names and places of the source."""
        made = b""
        for path in objects:
            said = subprocess.run(["objdump", "-dr", "-s", "-j", ".text", "-j", ".rodata", "--no-show-raw-insn", path],
                                  capture_output=True).stdout
            made += said.split(b"\n", 3)[3]
        return hashlib.sha256(made).hexdigest()

    def passes(self, name: str, objects: list[pathlib.Path], limit: float) -> bool:
        for program in self.programs:
            folder = program.with_name(program.name + ".p")
            rest = [] if self.header else sorted(folder.glob("*.o"))
            target = self.work / name / program.name
            subprocess.run(["cc", *SANITIZE, "-o", target, *objects, *rest, *self.libraries], check=True,
                           capture_output=True)
            try:
                done = subprocess.run([target], cwd=self.work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                      timeout=limit, env={**os.environ, "STH_TEST_SOURCE_ROOT": str(ROOT),
                                                          "ASAN_OPTIONS": "allocator_may_return_null=1"})
            except subprocess.TimeoutExpired:
                return False
            if done.returncode:
                return False
        return True

    def judge(self, number: int, mutant: Mutant) -> str:
        """killed, survived, same (as the original) or unbuildable."""
        lines = self.text.split("\n")
        lines[mutant.line - 1] = mutant.after
        name = f"mutant-{number}"
        objects = self.compile(name, "\n".join(lines))
        if not objects:
            verdict = "unbuildable"
        elif self.code(objects) == self.code(self.original):
            verdict = "same"
        else:
            verdict = "survived" if self.passes(name, objects, self.limit) else "killed"
        subprocess.run(["rm", "-rf", self.work / name], check=True)
        return verdict


def explained() -> dict[str, str]:
    if not EXPLAINED.exists():
        return {}
    lines = [line for line in EXPLAINED.read_text().splitlines() if line and not line.startswith("#")]
    return {key: why for key, _, why in (line.rpartition(" -- ") for line in lines)}


def run_file(build: pathlib.Path, file: str, known: dict[str, str]) -> tuple[int, int, int, list[Mutant]]:
    mutants = mutants_of(file)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(build, file, pathlib.Path(folder))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            verdicts = list(pool.map(bench.judge, range(len(mutants)), mutants))
    judged = [pair for pair in zip(mutants, verdicts) if pair[1] in ("killed", "survived")]
    survivors = [mutant for mutant, verdict in judged if verdict == "survived"]
    reasons = [mutant for mutant in survivors if mutant.key() in known]
    killed = len(judged) - len(survivors)
    print(f"{file}: {killed} of {len(judged)} killed ({100 * killed / len(judged):.1f} %), "
          f"{len(reasons)} of {len(survivors)} survivors explained", flush=True)
    for mutant in survivors:
        if mutant.key() not in known:
            print(f"  {mutant.line}: {mutant.before.strip()}\n      => {mutant.after.strip()}", flush=True)
    return len(judged), killed, len(reasons), survivors


def main() -> int:
    words = sys.argv[1:]
    listing = "--list" in words
    build, *files = [word for word in words if word != "--list"]
    files = files or sorted(TESTS)
    if listing:
        for mutant in [mutant for file in files for mutant in mutants_of(file)]:
            print(f"{mutant.file}:{mutant.line}: {mutant.before.strip()}\n    => {mutant.after.strip()}")
        return 0
    build, known, judged, killed, unexplained = pathlib.Path(build).resolve(), explained(), 0, 0, 0
    for file in files:
        all_of, dead, reasons, survivors = run_file(build, file, known)
        judged, killed, unexplained = judged + all_of, killed + dead, unexplained + len(survivors) - reasons
    print(f"{killed} of {judged} mutants killed ({100 * killed / judged:.1f} %), {unexplained} survivors "
          "without a reason")
    return 1 if unexplained or killed < LEAST_KILLED * judged else 0


if __name__ == "__main__":
    sys.exit(main())
