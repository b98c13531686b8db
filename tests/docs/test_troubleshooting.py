"""Every message that docs/troubleshooting.md explains is still one that the sources can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
HEADINGS = re.findall(r"^### `(.+)`$", PAGE, re.M)
HOLE = "\0"
FIXED = 10
"""Letters that a message must have beside its values to tell it from others."""


def texts(tree: ast.Module) -> Iterator[str]:
    """Every string of a module, with a hole for each value that an f-string puts in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def messages() -> list[str]:
    """Texts of the sources that are long enough to be a message, each value in them a hole."""
    files = [*(ROOT / "core").rglob("*.py"), *ROOT.glob("plugins/*/distcore_*/**/*.py")]
    literals = {text for file in files for text in texts(ast.parse(file.read_text()))}
    return [text for text in literals if len(re.findall("[a-z]", text)) >= FIXED]


def is_said(heading: str) -> bool:
    """Whether the heading is some message of the sources, with its values filled in or
    left out by ``…``.
    """
    parted = (message.split(HOLE) for message in messages())
    # the rest needs no pattern
    near = (parts for parts in parted if max(parts, key=len) in heading)
    return any(re.fullmatch(".*".join(map(re.escape, parts)), heading) for parts in near)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_message_is_one_of_ours(heading: str) -> None:
    assert is_said(heading)


def test_the_page_explains_many_and_says_what_to_do_about_each() -> None:
    assert len(HEADINGS) >= 10
    for section in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        assert "**Cause:**" in section, section
        assert "**Do:**" in section, section


@pytest.mark.parametrize(
    "heading", ["global_batch_size = 30: …", "no strategy called 'x' (installed: …)", "…"]
)
def test_a_message_that_nobody_says_is_noticed(heading: str) -> None:
    assert not is_said(heading)
