"""Reports test cases of a Python script the way cmocka does (TAP), so that tests/run.py counts them."""

import traceback


class Skip(Exception):
    """Raised by a case that cannot run here; its text is the reason."""


def run(cases) -> int:
    """Runs `cases`, pairs of a name and a function that raises when it fails. Returns the exit status."""
    failed = 0
    print(f"1..{len(cases)}")
    for number, (name, case) in enumerate(cases, 1):
        try:
            case()
        except Skip as reason:
            print(f"# skip: {reason}\nok {number} - {name} # SKIP")
        except Exception:
            failed += 1
            print(f"not ok {number} - {name}")
            for line in traceback.format_exc().splitlines():
                print(f"# {line}")
        else:
            print(f"ok {number} - {name}")
    return 1 if failed else 0
