"""The site's sources: pictures, and reference pages that leave nothing public out. `make docs` builds the site and
checks links between pages."""

import importlib.util
import pathlib
import re

import stagehand

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {page.name: page.read_text() for page in (ROOT / "docs/reference").glob("*.md")}


def test_each_picture_is_drawn_by_the_script():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/_site/pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = {name: draw().svg() for name, draw in pictures.PICTURES.items()}
    assert drawn == {path.stem: path.read_text() for path in (ROOT / "docs/pictures").glob("*.svg")}
    used = " ".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert all(f"pictures/{name}.svg" in used for name in drawn)


def test_the_reference_has_each_header_once():
    listed = [name for text in PAGES.values() for name in re.findall(r"\.\. header:: (\S+)", text)]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "include/stagehand").glob("*.h"))


def test_the_reference_has_each_name_of_the_package_once():
    text, modules = PAGES["python.md"], PAGES["python-modules.md"]
    lists = re.findall(r"public-names:: stagehand\n\n((?:   .+\n)+)", text)
    listed = [name for names in lists for name in names.split()]
    named = set(re.findall(r"public-names:: stagehand\.(\w+)", text + modules))
    assert len(listed) == len(set(listed))
    assert set(stagehand.__all__) - {"__version__"} - named == set(listed) | {"OffloadedAdamW"}
