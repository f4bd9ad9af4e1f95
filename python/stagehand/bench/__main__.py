"""`python -m stagehand.bench`: says which versions there are, then answers each line of JSON, a run, with one."""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    # Other libraries print: only answers may come out here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from .ways import Ways, versions

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(versions())
    ways = Ways()
    for line in sys.stdin:
        say(ways.answer(json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
