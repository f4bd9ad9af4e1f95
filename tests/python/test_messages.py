"""The catalogue of error messages (tools/messages.py) and the page that explains them."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def messages():
    spec = importlib.util.spec_from_file_location("messages", ROOT / "tools/messages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.of_c() + module.of_python()


def test_the_page_quotes_messages_as_they_are():
    """A quoted text of troubleshooting.md is a part of a message; "..." stands for anything."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = re.findall(r'^\| (".*?") \|', page, re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall('"([^"]+)"', cell)]
    assert len(quoted) > 40
    known = [message.text for message in messages()]
    for text in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in text.split("...")), re.DOTALL)
        assert any(pattern.search(message) for message in known), text


def test_the_catalogue_is_whole():
    found = messages()
    assert sum(message.place.startswith("src/") for message in found) > 450
    assert sum(message.place.startswith("python/") for message in found) > 200
