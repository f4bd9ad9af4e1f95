#!/usr/bin/env python3
"""The man pages say what the tool says: one page for each command, with the options of `stagehand COMMAND --help` and
their values, no more and no fewer; the codes of `stagehand --help`; and pages that the formatters take without a
warning.

    test_man.py TOOL PAGE..."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import stagehand
from support import tap

PAGES = {pathlib.Path(path).stem: pathlib.Path(path) for path in sys.argv[2:]}
GENERAL = PAGES["stagehand"].read_text()


def listed() -> dict[str, str]:
    """Command -> its line in the tool's help."""
    lines = stagehand("--help").stdout.split("commands:\n")[1].split("\n\n")[0]
    return dict(re.findall(r"^  (\S+) +(.+)$", lines, flags=re.MULTILINE))


def page_of(command: str) -> str:
    return PAGES[f"stagehand-{command}"].read_text()


def helped(command: str) -> tuple[set[tuple[str, str]], str]:
    """(option, what its value is called or "") of the command's help, and its positional arguments."""
    text = stagehand(command, "--help").stdout
    options = re.findall(r"^  --(\S+)(?: (\S+))? +\S", text, flags=re.MULTILINE)
    usage = text.splitlines()[0].removeprefix(f"usage: stagehand {command}")
    return set(options), usage.replace("[options]", "").strip()


def described(page: str) -> list[tuple[str, str]]:
    """The same of the list in a page."""
    return re.findall(r"^\.It Fl Fl (\S+)(?: Ar (\S+))?$", page, flags=re.MULTILINE)


def synopsis(page: str) -> str:
    return page.split(".Sh SYNOPSIS\n")[1].split(".Sh DESCRIPTION")[0]


def test_every_command_has_a_page_and_is_in_the_general_one() -> None:
    assert set(PAGES) == {"stagehand"} | {f"stagehand-{command}" for command in listed()}
    for command, line in listed().items():
        assert f".It Cm {command}\n{line};\n.Xr stagehand-{command} 1" in GENERAL, command
        assert f".Nm stagehand-{command}\n.Nd {line}\n" in page_of(command), command


def test_options_are_those_of_the_help() -> None:
    for command in listed():
        options, _ = helped(command)
        found = described(page_of(command))
        assert len(options) > 1 and len(found) == len(set(found)), command
        assert set(found) == options, f"{command}: differs in {sorted(set(found) ^ options)}"


def test_the_synopsis_shows_every_option_and_argument() -> None:
    for command in listed():
        options, positionals = helped(command)
        shown = set(re.findall(r"Fl Fl ([\w-]+)(?: Ar ([^\s|]+))?", synopsis(page_of(command))))
        assert shown == options - {("help", "")}, f"{command}: differs in {sorted(shown ^ options)}"
        words = re.findall(r"^\.(?:Op )?Ar (.+)$", synopsis(page_of(command)), flags=re.MULTILINE)
        assert " ".join(words).split() == positionals.replace("[", "").replace("]", "").split(), command


def test_exit_codes_are_those_of_the_tool() -> None:
    said = re.findall(r"^  (\d+) +(.+)$", stagehand("--help").stdout.split("exit codes:\n")[1], flags=re.MULTILINE)
    assert len(said) > 4
    assert re.findall(r"^\.It (\d+)\n(.+)$", GENERAL, flags=re.MULTILINE) == said


def test_formatters_do_not_complain() -> None:
    checked = 0
    for page in PAGES.values():
        if shutil.which("mandoc"):
            done = subprocess.run(["mandoc", "-Tlint", "-W", "warning", page], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            checked += 1
        if shutil.which("man") and shutil.which("groff"):
            done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", page], capture_output=True, text=True,
                                  env={**os.environ, "MANWIDTH": "80"})
            assert done.returncode == 0 and not done.stderr, done.stderr
            checked += 1
    if not checked:
        raise tap.Skip("neither mandoc nor man with groff is installed")


if __name__ == "__main__":
    sys.exit(tap.run([(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]))
