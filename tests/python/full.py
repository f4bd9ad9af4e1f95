"""The cases that `make test` leaves to `make test-full` (STH_TEST_FULL=1): repetitions of others.

1. `@pytest.mark.full("what shows the same in make test")`: the test, or the case of a parametrisation.
2. A test with several parameters (`parametrize` marks and fixtures with params) is tried in every combination. In
   `make test` it is tried in as many cases as its longest parameter has values, and each value of each parameter is in
   one of them: case i takes the i-th value of each, and a shorter parameter begins anew. Two by two values stay four
   cases. `@pytest.mark.combinations("why")` keeps all: where a combination may be the only test of a fault.

A case that the command line names, `FILE::TEST[CASE]`, is never left out.
"""

import collections

FEW = 4  # cases, of which none is left out


def axes(item) -> dict[str, tuple]:
    """Parameter: what tells its value, of a case. Parameters of one mark go together, under the name of the first."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        return {}
    together = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        together.update(dict.fromkeys(names, names[0]))
    out: dict[str, tuple] = {}
    for name, value in spec.params.items():
        axis = together.get(name, name)
        out[axis] = (*out.get(axis, ()), id(value))
    return out


def repeated(items) -> set:
    """The cases whose combination `make test` leaves out."""
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append((item, axes(item)))
    out = set()
    for cases in tests.values():
        values = collections.defaultdict(dict)  # of each parameter, numbered as they come
        for _, chosen in cases:
            for name, value in chosen.items():
                values[name].setdefault(value, len(values[name]))
        if len(values) < 2 or len(cases) <= FEW or cases[0][0].get_closest_marker("combinations"):
            continue
        longest = max(len(numbered) for numbered in values.values())
        kept = {tuple(i % len(numbered) for numbered in values.values()) for i in range(longest)}
        out |= {item for item, chosen in cases
                if tuple(numbered[chosen[name]] for name, numbered in values.items()) not in kept}
    return out


def leave_out(config, items: list) -> None:
    """Deselects what `make test` leaves to `make test-full`."""
    if any("[" in argument for argument in config.args):
        return
    out = repeated(items) | {item for item in items if item.get_closest_marker("full")}
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]
