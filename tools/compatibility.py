"""Write the table of docs/compatibility.md from the packages: python tools/compatibility.py

A distribution with strategies speaks the versions of the hook specs that their capabilities
declare; one with other plugins on hooks, the version of the core in the same tree.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from distcore.plugin.strategy.capabilities import SPEC_VERSION

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/compatibility.md"
MARKS = re.compile(r"(<!-- versions -->\n).*?(<!-- /versions -->)", re.S)


def spoken(package: Path) -> set[int]:
    """The versions of the hook specs that the source of a package is written for; empty if it
    is on no hook.
    """
    declared, hooks = set[int](), False
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "spec_version"
                and isinstance(node.value, ast.Constant)
            ):
                declared.add(int(str(node.value.value)))
            hooks = hooks or (isinstance(node, ast.alias) and node.name == "hookimpl")
    return declared or ({SPEC_VERSION} if hooks else set())


def distributions() -> Iterator[tuple[str, str, str]]:
    """Name of each distribution, the versions that it speaks, and the core that it needs."""
    for file in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        (package,) = file.parent.glob("distcore_*")
        core = next(line for line in project["dependencies"] if line.startswith("distcore-core"))
        yield project["name"], ", ".join(map(str, sorted(spoken(package)))) or "none", core


def table() -> str:
    """A row for all that speak the same versions, and need the same core."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, versions, core in distributions():
        rows.setdefault((versions, core), []).append(name.removeprefix("distcore-"))
    lines = [
        f"| {versions} | `{core}` | {', '.join(names)} |"
        for (versions, core), names in sorted(rows.items())
    ]
    return "\n".join(["| hook specs | needs | `distcore-` |", "|---|---|---|", *lines])


def with_table(text: str) -> str:
    """The page ``text`` with the table between its marks."""
    return MARKS.sub(lambda marks: f"{marks[1]}{table()}\n{marks[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
