"""Reports: a page without network of what a run knows, and a part of it for notebooks."""

import html.parser
import subprocess

import pytest
import stagehand
import torch
from stagehand.__main__ import tool_path
from support import made, runtime, same
from torch import nn

ONE = 128 * 129 * 4


class Page(html.parser.HTMLParser):
    """Tags are closed; the text of each; attributes that would fetch something."""

    VOID = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.fetches = [], [], "", []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetches += [(name, value) for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data


def managed(steps=6, **options):
    model = made(lambda: nn.Sequential(*[nn.Linear(128, 128) for _ in range(10)]))
    stagehand.layer(model, vram_budget=5 * ONE, device="sim", **options)
    with torch.inference_mode():
        for _ in range(steps):
            model(torch.ones(2, 128))
    return model, runtime(model)


def test_the_page_has_the_run_in_it(tmp_path):
    model, own = managed()
    written = own.report_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == written
    page = Page(written)
    units = own.stats["units"]
    stays = sum(unit["resident"] for unit in units)
    assert own.name in page.text and f"{stays} of 10 units stay" in page.text
    assert f"{len(own.telemetry.history) - 2} steps" in page.text
    assert page.tags.count("tr") == 1 + 10 and page.tags.count("svg") == 6
    assert not page.fetches and "script" not in page.tags and "link" not in page.tags
    assert "prefers-color-scheme:dark" in written and "@media print" in written
    assert own.report_html(tmp_path / "report.html")  # again


def test_before_the_first_step_it_says_that_there_is_none():
    _, own = managed(steps=0)
    assert "none has ended yet" in Page(own.report_html()).text


def test_notebooks_show_a_small_table_with_a_picture():
    model, own = managed()
    part = Page(own._repr_html_())
    assert "html" not in part.tags and part.tags.count("svg") == 1 and own.name in part.text
    stagehand.shutdown(model)
    assert own._repr_html_() is None and "shut down" in repr(own)


def test_a_name_from_outside_is_text():
    _, own = managed(name="<img src=x onerror=alert(1)>")
    assert "img" not in Page(own.report_html()).tags and "img" not in Page(own._repr_html_()).tags


def test_a_report_changes_nothing_of_the_run():
    model, own = managed()
    before = own.plan["step_ns"], own.stats["replans"]
    own.report_html()
    own._repr_html_()
    assert own.stats["replans"] == before[1]
    with torch.inference_mode():
        assert same(model(torch.ones(2, 128)), model(torch.ones(2, 128)))


def test_what_cannot_be_reported_says_why(tmp_path):
    model, own = managed()
    with pytest.raises(TypeError, match="path"):
        own.report_html(3)
    with pytest.raises(OSError):
        own.report_html(tmp_path / "no" / "report.html")
    stagehand.shutdown(model)


def test_the_tool_makes_a_page_of_a_telemetry_file(tmp_path):
    model, own = managed(telemetry=tmp_path / "steps.jsonl")
    stagehand.shutdown(model)
    tool = [tool_path(), "report", tmp_path / "steps.jsonl"]
    assert subprocess.run([*tool, "-o", tmp_path / "page.html"], capture_output=True).returncode == 0
    page = Page((tmp_path / "page.html").read_text())
    assert "steps.jsonl" in page.text and "the model's units" in page.text and page.tags.count("svg") == 3
    again = subprocess.run([*tool, "--output", tmp_path / "page.html"], capture_output=True, text=True)
    assert again.returncode == 3 and "page.html" in again.stderr
    assert subprocess.run(tool, capture_output=True).returncode == 2
    assert subprocess.run([*tool, "-x", "y"], capture_output=True).returncode == 2
    wrong = subprocess.run([tool_path(), "report", tmp_path / "page.html", "-o", tmp_path / "x.html"],
                           capture_output=True, text=True)
    assert wrong.returncode == 3 and not (tmp_path / "x.html").exists()
