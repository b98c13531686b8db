"""Measure the examples by the suites of their kinds, and list those of
docs/gallery.md: python tools/gallery.py

Each says by its first sentence what it is. Nothing is written while one of them breaks a law.
"""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

from distcore.testing import Finding, suite_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/gallery.md"
MARKS = re.compile(r"(<!-- gallery -->\n).*?(<!-- /gallery -->)", re.S)
MOST = 90
"""Lines of code of an example."""
PLUGINS = {
    "strategy-localsgd": "distcore_localsgd/__init__.py:LocalSGD",
    "task-diffusion": "diffusion.py:Diffusion",
    "optimizer-adan": "adan.py:Adan",
    "tracker-sqlite": "curves.py:Curves",
    "reader-sqlite": "tables.py:Sqlite",
    "launcher-queue": "one_at_a_time.py:Queue",
    "extension-gradientnoise": "gradientnoise.py:GradientNoise",
    "extension-nanguard": "nanguard.py:NanGuard",
}
"""Folder in examples/, which begins with the kind, with file and class."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(file: Path) -> int:
    """Return the number of lines that have code, which comments and docstrings are not."""
    texts = set[int]()
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            texts |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    with file.open("rb") as source:
        tokens = [token for token in tokenize.tokenize(source.readline) if token.type not in LAYOUT]
    # after the encoding
    lines = {line for token in tokens[1:] for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - texts)


def file_of(folder: str) -> Path:
    """Return the file of an example."""
    return ROOT / "examples" / folder / PLUGINS[folder].partition(":")[0]


def measure(folder: str) -> list[Finding]:
    """Return the findings of an example's suite; none of a strategy, which
    its own contract measures.
    """
    kind, target = folder.partition("-")[0], f"{ROOT}/examples/{folder}/{PLUGINS[folder]}"
    if kind == "strategy":
        return []
    return suite_of("extension" if kind == "tracker" else kind).measure(target)


def row(folder: str) -> str:
    """Return the line of an example."""
    docstring = ast.get_docstring(ast.parse(file_of(folder).read_text())) or ""
    says = " ".join(docstring.partition("\n\n")[0].split())
    says = re.sub(r" \(.*?\)", "", says).replace("``", "`")  # the source is in the file
    return f"- [{folder}](../examples/{folder}/README.md): {says}"


def with_list(text: str) -> str:
    """The page ``text`` with the list between its marks."""
    rows = "\n".join(map(row, PLUGINS))
    return MARKS.sub(lambda marks: f"{marks[1]}{rows}\n{marks[2]}", text)


if __name__ == "__main__":
    for name in PLUGINS:
        if broken := [str(finding) for finding in measure(name) if finding.held is False]:
            raise SystemExit("\n".join([name, *broken]))
    PAGE.write_text(with_list(PAGE.read_text()))
