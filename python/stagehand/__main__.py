"""`python -m stagehand`: runs the tool that was installed with this package, in place of this process."""

import importlib.metadata
import os
import sys


def tool_path() -> str:
    """Path of the installed tool, as the distribution's own list of files has it."""
    # A wheel that carries its libraries keeps the program in *.scripts, behind a launcher in bin.
    places = ("stagehand_offload.scripts", "bin")
    files = [file for file in importlib.metadata.files("stagehand-offload") or [] if file.name == "stagehand"]
    for place in places:
        for file in files:
            if file.parent.name == place:
                return os.path.abspath(os.fspath(file.locate()))
    raise SystemExit("stagehand: the tool was not installed with this package; reinstall stagehand-offload")


def main() -> None:
    path = tool_path()
    os.environ.setdefault("STAGEHAND_PYTHON", sys.executable)  # what `stagehand bench` runs models with
    os.execv(path, ["stagehand", *sys.argv[1:]])


if __name__ == "__main__":
    main()
