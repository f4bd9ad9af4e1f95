#!/usr/bin/env python3
"""What every command of the tool has in common: help, version, wrong usage, exit codes."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, OK, USAGE, expect, stagehand
from support import tap


def commands() -> list[str]:
    listed = stagehand("--help").stdout.split("commands:\n")[1].split("\n\n")[0]
    return re.findall(r"^  (\S+)", listed, flags=re.MULTILINE)


def test_help() -> None:
    expect(stagehand("--help"), OK, "usage: stagehand COMMAND", "inspect", "exit codes:")
    assert stagehand("-h").stdout == stagehand("help").stdout == stagehand("--help").stdout


def test_help_of_each_command() -> None:
    assert "inspect" in commands()
    for command in commands():
        expect(stagehand(command, "--help"), OK, f"usage: stagehand {command}", "--help", "options:")
        assert stagehand(command, "-h").stdout == stagehand(command, "--help").stdout


def test_version() -> None:
    done = stagehand("--version")
    assert done.returncode == OK and re.fullmatch(r"stagehand \d+\.\d+\.\d+\n", done.stdout), done.stdout


def test_wrong_commands() -> None:
    expect(stagehand(), USAGE, "no command")
    expect(stagehand("inspekt"), USAGE, "did you mean 'inspect'?")
    expect(stagehand("ins"), USAGE, "did you mean 'inspect'?")
    expect(stagehand("frobnicate"), USAGE, "'frobnicate'", "--help")
    expect(stagehand(""), USAGE, "unknown command")
    expect(stagehand("x" * 10000), USAGE, "unknown command")


def test_wrong_options() -> None:
    for command in commands():
        expect(stagehand(command, "--frobnicate"), USAGE, command, "--frobnicate", "--help")
        expect(stagehand(command, "--helb"), USAGE, "did you mean --help?")
        expect(stagehand(command, "-x"), USAGE, "-x")
        expect(stagehand(command, "--" + "x" * 10000), USAGE, "unknown option")
    expect(stagehand("inspect"), USAGE, "missing argument", "PATH")
    expect(stagehand("inspect", "a", "b"), USAGE, "'b'")
    expect(stagehand("inspect", "--json=yes", "a"), USAGE, "takes no value")


def test_double_dash() -> None:
    expect(stagehand("inspect", "--", "--json"), DATA, "--json", "NOT_FOUND")


def test_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = stagehand("--help", stdout=full)
    assert done.returncode == DATA and "writing the output failed" in done.stderr, done


if __name__ == "__main__":
    sys.exit(tap.run([(name[5:], case) for name, case in list(globals().items()) if name.startswith("test_")]))
