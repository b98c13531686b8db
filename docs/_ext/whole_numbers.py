"""A number in a table stays on one line: a browser would break ``1.4e-06`` behind its hyphen."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

NUMBER = re.compile(r"[\d.,]+(e-?\d+)?[†%]?")


def mark_numbers(app: Sphinx, document: nodes.document) -> None:
    """Give each cell that holds a number alone the class ``number``, which
    the style sheet knows.
    """
    for cell in document.findall(nodes.entry):
        if NUMBER.fullmatch(cell.astext()):
            cell["classes"].append("number")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", mark_numbers)
    return {"parallel_read_safe": True}
