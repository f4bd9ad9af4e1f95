"""The settings of the documents' site: `make docs` builds build/site from the pages here."""

import os
import pathlib
import re
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "_site"))


def _version() -> str:
    header = (ROOT / "include/stagehand/stagehand.h").read_text()
    return ".".join(re.search(rf"VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


project = "Stagehand"
author = "the Stagehand authors"
release = os.environ.get("DOCS_VERSION") or _version()  # a tag, where the site is built from one
version = release
html_title = f"Stagehand {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "public_python", "public_headers"]
root_doc = "README"
exclude_patterns = ["_site", "man"]
source_suffix = {".md": "markdown"}
nitpicky = False
smartquotes = False  # texts of errors and code are searched as they are
default_role = "literal"  # docstrings write `name` for code

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["ref.python"]  # two classes of one name: each page names the right one
highlight_language = "none"  # fences without a language are drawings and output

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

html_theme = "furo"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "native"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}

LINK = re.compile(r"\]\(([\w./-]+)\.md(?:#[\w-]+)?\)")
NAMED = re.compile(r"\[[\w/-]+\.md\](?=\(([\w/-]+)\.md)")  # a page's file name: the site shows the title
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./(?!README\.md)[\w./-]+|man)\)")


def _read(app, name: str, source: list[str]) -> None:
    """README lists all pages, by section: the navigation comes from these sections. A link to a source file becomes the
    file's name, because the site holds the pages alone."""
    text = OUTSIDE.sub(r"\1", source[0]).replace("](../README.md", "](start.md")
    text = NAMED.sub("[]", text)
    if name == root_doc:
        parts = re.split(r"^(## .*)$", text, flags=re.MULTILINE)
        for i in range(1, len(parts), 2):
            pages = dict.fromkeys(LINK.findall(parts[i + 1]))
            if pages:
                parts[i + 1] += "\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n\n".format(
                    parts[i].removeprefix("## "), "\n".join(pages))
        text = "".join(parts)
    source[0] = text


def _index(app, error) -> None:
    """Browsers open a folder's index.html."""
    if not error and app.builder.name == "html":
        shutil.copyfile(pathlib.Path(app.outdir) / "README.html", pathlib.Path(app.outdir) / "index.html")


def setup(app) -> None:
    app.connect("source-read", _read)
    app.connect("build-finished", _index)
