"""Nothing is written twice: no seven lines of code stand in two distributions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 6
"""Lines that two distributions may share: what is longer has one home."""
Window = tuple[str, ...]


def sources() -> dict[str, list[Path]]:
    """The Python files of each distribution, tests aside."""
    plugins = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
    files = {"core": sorted((ROOT / "core").rglob("*.py"))}
    for plugin in plugins:
        files[plugin.name] = sorted(
            file for file in plugin.rglob("*.py") if "tests" not in file.parts
        )
    return files


def lines_of(source: str) -> list[tuple[int, str]]:
    """Number and text of each line that says something: no imports, no
    comments, no lone brackets.
    """
    imports = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = (
        (number, line.strip())
        for number, line in enumerate(source.splitlines(), 1)
        if number not in imports
    )
    return [
        (number, line)
        for number, line in lines
        if not line.startswith("#") and any(map(str.isalnum, line))
    ]


def windows(file: Path) -> Iterator[tuple[Window, str]]:
    """Each run of one line more than the limit, and where it starts."""
    lines = lines_of(file.read_text())
    for start in range(len(lines) - LIMIT):
        run = lines[start : start + LIMIT + 1]
        yield tuple(text for _, text in run), f"{file}:{run[0][0]}"


def shared(distributions: dict[str, list[Path]]) -> list[str]:
    """Pairs of places in different distributions at which the same lines start."""
    first: dict[Window, tuple[str, str]] = {}
    pairs = []
    for name, files in distributions.items():
        for file in files:
            for window, place in windows(file):
                owner, earlier = first.setdefault(window, (name, place))
                if owner != name:
                    pairs.append(f"{earlier} ~ {place}")
    return pairs


def test_no_two_distributions_share_more_than_six_lines() -> None:
    assert len(sources()) > 1
    assert not shared(sources())


def test_seven_lines_are_found_however_they_are_indented_and_commented(tmp_path: Path) -> None:
    body = [f"value_{number} = {number}" for number in range(7)]
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("import os\n\n" + "\n".join(body) + "\n")
    other.write_text(
        "def function():\n" + "\n\n".join(f"    # why\n    {line}" for line in body) + "\n"
    )
    assert shared({"a": [one], "b": [other]}) == [f"{one}:3 ~ {other}:3"]
    assert not shared({"a": [one, other]})
    other.write_text("\n".join(body[:6]) + "\n")
    assert not shared({"a": [one], "b": [other]})
