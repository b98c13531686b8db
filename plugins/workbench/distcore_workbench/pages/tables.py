"""Tables of a page. On a narrow screen each row becomes a list of heading and value."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape

SHADES = 10
"""Steps from no color to the full one in a shaded table."""
MANY = 12
"""Columns beyond which a table is set smaller."""
SHORT = 12
"""Characters of a cell that stays in one line."""
LONGEST_PIECE = 20
"""Characters of a word that do not break."""
LONG_WORD = r"[^/,._=:-]*[/,._=:-]+|[^/,._=:-]+"
"""The parts of a long word, each with the marks at its end."""


def html_table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    reference: int | None = None,
    colors: Sequence[str] = (),
) -> str:
    """Return a table as HTML.

    ``reference`` is the number of the row that stands out; ``colors`` are those of the
    rows, such as ``--a``.
    """
    body = ""
    for index, row in enumerate(rows):
        marked = ' class="reference"' if index == reference else ""
        swatch = f'<i style="background: var({colors[index]})"></i>' if colors else ""
        first, *others = _cells(names, row)
        body += f"<tr{marked}><th>{swatch}{_breakable(first[1])}</th>"
        body += "".join(_cell(name, cell) for name, cell in others) + "</tr>\n"
    return _table("rows many" if len(names) > MANY else "rows", names, body)


def turned_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table with a column for each of ``rows``, as HTML."""
    heading, *others = zip(names, *rows, strict=True)
    return _table("turned", heading, "".join(_row(line) for line in others))


def text_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, which keep their line breaks, as HTML."""
    body = ""
    for row in rows:
        cells = (
            f'<td data-name="{escape(name)}">{escape(cell)}</td>'
            for name, cell in _cells(names, row)
        )
        body += f"<tr>{''.join(cells)}</tr>\n"
    return _table("texts", names, body)


def shaded_table(names: Sequence[str], rows: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return a table of counts as HTML: the more of its row a cell has, the darker it is."""
    body = ""
    for name, counts in rows:
        total = sum(counts) or 1
        cells = ""
        for count in counts:
            cells += f'<td class="s{SHADES * count // total}">{count}</td>'
        body += f"<tr><th>{escape(name)}</th>{cells}</tr>\n"
    return _table("shaded", names, body)


def remark_list(lines: Iterable[str]) -> str:
    """Return the remarks below a table as HTML; nothing if there are none."""
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="remarks">{listed}</ul>' if listed else ""


def _cell(name: str, text: str) -> str:
    kind = ' class="short"' if len(text) <= SHORT else ""
    return f'<td data-name="{escape(name)}"{kind}>{_breakable(text)}</td>'


def _cells(names: Sequence[str], row: Sequence[str]) -> list[tuple[str, str]]:
    """Return the cells of a row, each with the name of its column."""
    return list(zip(names, row, strict=True))


def _row(cells: Sequence[str]) -> str:
    first, *others = cells
    cells = "".join(f"<td>{_breakable(cell)}</td>" for cell in others)
    return f"<tr><th>{_breakable(first)}</th>{cells}</tr>\n"


def _table(kind: str, names: Sequence[str], body: str) -> str:
    head = "".join(f"<th>{_breakable(name)}</th>" for name in names)
    return (
        '<div class="wide"><table'
        f' class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
    )


def _breakable(text: str) -> str:
    """Return a cell as HTML: a long word in it may break after a mark, and anywhere before
    it gets too long.
    """
    words = []
    for word in text.split(" "):
        pieces = [
            piece
            for part in re.findall(LONG_WORD, word)
            for piece in textwrap.wrap(part, LONGEST_PIECE)
        ]
        words.append(
            "<wbr>".join(map(escape, pieces)) if len(word) > LONGEST_PIECE else escape(word)
        )
    return " ".join(words)
