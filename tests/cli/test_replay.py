#!/usr/bin/env python3
"""`stagehand replay`: what one device was asked to do is asked of another."""

import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from cli.tool import DATA, DEVICE, FAILED, OK, USAGE, expect, stagehand, write_safetensors
from support import tap

folder = pathlib.Path()


def traced() -> pathlib.Path:
    """A trace of a model that was streamed, on a device that check has nothing to say about."""
    model, trace, log = folder / "model.safetensors", folder / "trace", folder / "log"
    write_safetensors(model, {f"layers.{i}.weight": ("F32", [64, 64]) for i in range(12)})
    device = f"trace(file={trace})+check(log={log})+sim"
    expect(stagehand("stream", model, "--budget", "100KB", "--steps", 2, "--device", device), OK)
    assert log.read_text() == ""
    return trace


def calls(trace: pathlib.Path) -> list[str]:
    """Its lines without times, and without what asks for times: a slower device does not know them yet."""
    return [line.split(',"us"')[0].split(',"ns"')[0].split(',"done"')[0] for line in trace.read_text().splitlines()
            if '"event_elapsed_ns"' not in line]


def test_the_same_calls_come_out() -> None:
    trace, again = traced(), folder / "again"
    made = trace.read_text().count("\n") - 1
    done = stagehand("replay", trace, "--device", f"trace(file={again})+check+sim")
    expect(done, OK, f"{made} calls, 0 with another status, 0 skipped")
    assert calls(trace) == calls(again)[:len(calls(trace))]


def test_what_fails_now_is_told() -> None:
    done = stagehand("replay", traced(), "--device", "fault(copy_h2d=2)+sim")
    expect(done, FAILED)
    assert "1 with another status" in done.stdout and "copy_h2d was OK and is DEVICE_ERROR" in done.stdout, done.stdout


def test_mistakes() -> None:
    (folder / "no").write_text("no trace\n")
    expect(stagehand("replay", folder / "no"), DATA, "line 1")
    expect(stagehand("replay", folder / "absent"), DATA, "absent")
    expect(stagehand("replay", folder / "no", "--device", "tpu"), DEVICE, "tpu")
    expect(stagehand("replay", folder / "no", "--device", "chek+sim"), USAGE, "chek")
    expect(stagehand("replay"), USAGE)


def main() -> int:
    global folder
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        return tap.run([(test.__name__[5:], test) for test in
                        (test_the_same_calls_come_out, test_what_fails_now_is_told, test_mistakes)])


if __name__ == "__main__":
    sys.exit(main())
