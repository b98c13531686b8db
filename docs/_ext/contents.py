"""The navigation of the site, from the links of the first page: its list is the only one,
for readers of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.M | re.S)
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)#]+)\.md\)")
"""A link to a whole page, with its text. One to a section of a page is no entry."""


def entries(page: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each section of ``page`` with its links: their texts, and pages without suffix."""
    for section in SECTION.finditer(page):
        heading, body = section.groups()
        yield heading, [(link[1], link[2]) for link in LINK.finditer(body)]


def navigation(page: str) -> str:
    """Return a hidden toctree for each section of ``page``, whose entries have the
    texts of the links.
    """
    trees = []
    for caption, links in entries(page):
        lines = "\n".join(f"{text} <{target}>" for text, target in links)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n")
    return "\n".join(trees)


def on_read(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the navigation to the first page."""
    if name == app.config.root_doc:
        source[0] += "\n" + navigation(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", on_read)
    return {"parallel_read_safe": True}
