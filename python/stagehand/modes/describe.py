"""A runtime in one line: what streams, what stays, the budget, and what a step takes."""

from __future__ import annotations

from .. import _core
from ..arguments import check
from ..errors import StagehandError


def described(runtime) -> str:
    """For repr(): never raises, waits for no step and ends none."""
    session, kind = runtime.session, type(runtime).__name__
    head = f"<{kind} of {runtime.name!r}"
    if session is None:
        return f"{head}, not opened yet>"
    if session.closed:
        return f"{head}, shut down>"
    try:
        return f"{head} on {session.target.torch}: {'; '.join(_parts(session))}>"
    except StagehandError as error:  # another thread has shut it down; a forked process may not ask
        return f"{head}: {type(error).__name__}>"


def report_of(session, path) -> str:
    """The page of a session's report, also written to `path` where one is given."""
    check("path", path, "path", none=True)
    if not session.streaming:
        raise StagehandError(f"all weights of {session.name} stay on the device: there is nothing to report")
    session.steps.close_finished_step()
    session.steps.flush_telemetry()  # waits for steps that the device has not passed
    page = session.core.report(True)
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    return page


def shown(runtime) -> str | None:
    """For notebooks; None where its repr says all that there is."""
    session = runtime.session
    if session is None or session.closed or not session.streaming:
        return None
    try:
        return session.core.report(False)
    except StagehandError:
        return None


def _parts(session) -> list[str]:
    stats = session.core.stats()
    held = _core.format_size(stats["device_bytes"] + session.stay.reserved)
    parts = [f"{held} of {_core.format_size(stats['budget'])} on the device"]
    if not session.streaming:
        return ["all weights stay", *parts]
    units = [session.core.unit_stats(unit.index) for unit in session.units if unit.index >= 0]
    moving = [unit for unit in units if not unit["resident"]]
    parts.insert(0, f"{len(moving)} of {len(units)} units stream, {_core.format_size(sum(u['bytes'] for u in moving))}")
    if stats["parked"]:
        parts.append("parked: its memory is lent to others")
    step = session.core.metrics(0)
    if step is not None and step["step_time_ms"] > 0:
        parts.append(f"{step['step_time_ms']:.1f} ms a step, {step['predicted_ms']:.1f} predicted")
    return parts
