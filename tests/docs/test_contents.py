"""The first page has one list, and every page of the documentation is in it, or in that of a
page that it names.
"""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs/index.md"
CONTENTS = runpy.run_path(str(ROOT / "docs/_ext/contents.py"))
LISTED_ELSEWHERE = {
    *ROOT.glob("docs/decisions/*.md"),  # by the page of decisions
    *ROOT.glob("examples/*/README.md"),  # by the gallery
} - {ROOT / "docs/decisions/README.md"}


def test_the_list_of_the_first_page_has_each_page_once() -> None:
    listed = [
        (INDEX.parent / f"{target}.md").resolve()
        for _, links in CONTENTS["entries"](INDEX.read_text())
        for _, target in links
    ]
    names = ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    top = [ROOT / name for name in names]
    pages = (
        {*top, *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")}
        - LISTED_ELSEWHERE
        - {INDEX}
    )
    assert sorted(listed) == sorted(pages)


def test_the_navigation_of_the_site_is_made_from_the_list() -> None:
    first = "- Begin: [the start](start.md), [part](start.md#part), [far](https://x.y/z.md)"
    page = f"# Title\n\n## First\n\n{first}\n\n## Next\n\n- [fsdp](../a/README.md)\n"
    assert (
        CONTENTS["navigation"](page)
        == "```{toctree}\n:hidden:\n:caption: First\n\nthe start <start>\n```\n\n"
        "```{toctree}\n:hidden:\n:caption: Next\n\nfsdp <../a/README>\n```\n"
    )
    assert "toctree" not in INDEX.read_text()
