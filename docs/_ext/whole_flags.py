"""A flag in code stays on one line: a browser would break ``--max-steps`` behind
each of its hyphens.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.S)
TEXT = re.compile(r"(?<=>)[^<]+")
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def keep_flags(html: str) -> str:
    """Return a page in which each flag in code is a ``<span class="flag">``, which
    the style sheet knows.
    """
    return CODE.sub(
        lambda code: TEXT.sub(
            lambda text: FLAG.sub(r'<span class="flag">\g<0></span>', text[0]), code[0]
        ),
        html,
    )


def on_page(
    app: Sphinx, name: str, template: str, context: dict[str, Any], document: object
) -> None:
    """Mark the flags of the page's body, of which Pygments has colored the code by now."""
    if "body" in context:
        context["body"] = keep_flags(context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", on_page)
    return {"parallel_read_safe": True}
