"""The first page of the documentation, at the top of the site as well: no reader is sent on
from an empty page.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def at_the_top(page: str, folder: str) -> str:
    """Return the HTML of a page of ``folder`` so that its links hold one folder higher."""
    return page.replace("<head>", f'<head>\n    <base href="{folder}/index.html">', 1)


def write(app: Sphinx, failed: Exception | None) -> None:
    """Write ``index.html`` at the top of the site."""
    folder = app.config.root_doc.partition("/")[0]
    page = Path(app.outdir, folder, "index.html")
    if failed is None and page.is_file():
        top = at_the_top(page.read_text(encoding="utf-8"), folder)
        Path(app.outdir, "index.html").write_text(top, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
