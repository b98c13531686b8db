"""HTML pages of one file, which work alone: without scripts and without network."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6877; --paper: #fff; --line: #d8dee6;
  --a: #3b6fb6; --b: #d98a29; --c: #4b9e6a; --d: #9aa5b1; --e: #b3476b; --f: #7a5cc0; --g: #2b9a9f; --h: #8a6d3b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b4; --paper: #14181e; --line: #323b47;
  --a: #6fa0e0; --b: #e6a755; --c: #70bd8d; --d: #66717e; --e: #dd7fa0; --f: #a78fe6; --g: #5cc5ca; --h: #c2a36b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
code { overflow-wrap: anywhere; } p.soft, li { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
tr.reference td:first-child { font-weight: 600; }
table.texts { white-space: pre-wrap; } table.texts td { text-align: left; vertical-align: top; }
ul.remarks li { color: var(--ink); }
svg { width: 100%; max-width: 760px; height: auto; font-size: 12px; }
svg text { fill: var(--ink); } svg .name { text-anchor: end; } svg .tick { text-anchor: middle; fill: var(--soft); }
svg .scale { text-anchor: end; fill: var(--soft); }
svg .axis { stroke: var(--soft); } svg .grid { stroke: var(--line); }
svg .whisker { stroke: var(--ink); fill: none; } .dot { fill: var(--a); }
.a { fill: var(--a); background: var(--a); } .b { fill: var(--b); background: var(--b); }
.c { fill: var(--c); background: var(--c); } .d { fill: var(--d); background: var(--d); }
.e { fill: var(--e); background: var(--e); } .f { fill: var(--f); background: var(--f); }
.g { fill: var(--g); background: var(--g); } .h { fill: var(--h); background: var(--h); }
svg .curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; } svg .dashed { stroke-dasharray: 5 3; }
.curve.a { stroke: var(--a); } .curve.b { stroke: var(--b); } .curve.c { stroke: var(--c); }
.curve.d { stroke: var(--d); } .curve.e { stroke: var(--e); } .curve.f { stroke: var(--f); }
.curve.g { stroke: var(--g); } .curve.h { stroke: var(--h); }
.legend span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; border-radius: 2px; }
"""
COLOURS = "abcdefgh"
"""The classes of the style that are colors."""


def command_line() -> str:
    """Return the command that runs, as a user would type it."""
    return shlex.join(["distcore", *sys.argv[1:]])


def document(title: str, command: str, body: str) -> str:
    """Return a page of its own: the title, the command that made it, and ``body``, which is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{title}</h1>\n<p><code>{escape(command)}</code></p>\n{body}</body></html>\n"
    )


def html_table(names: Sequence[str], rows: Iterable[Sequence[str]], reference: int | None = None) -> str:
    """Return a table as HTML; ``reference`` is the number of the row that stands out."""
    body = ""
    for index, row in enumerate(rows):
        marked = ' class="reference"' if index == reference else ""
        body += f"<tr{marked}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n"
    return _table("", names, body)


def text_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, which keep their line breaks, as HTML."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return _table(' class="texts"', names, body)


def shaded_table(names: Sequence[str], rows: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return a table of counts as HTML: each row has a name, and a cell is the darker the more of its row it has."""
    body = ""
    for name, counts in rows:
        total = sum(counts) or 1
        shades = [f"color-mix(in srgb, var(--a) {70 * count // total}%, transparent)" for count in counts]
        cells = "".join(
            f'<td style="background: {shade}">{count}</td>' for shade, count in zip(shades, counts, strict=True)
        )
        body += f"<tr><td>{escape(name)}</td>{cells}</tr>\n"
    return _table("", names, body)


def remark_list(lines: Iterable[str]) -> str:
    """Return the remarks below a table as HTML."""
    return f'<ul class="remarks">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """Return what the colors mean as HTML: pairs of a color, one of ``COLOURS``, and its meaning."""
    shown = "".join(f'<span class="{color}"></span>{escape(what)}' for color, what in keys)
    return f'<small class="legend">{shown}</small>'


def _table(kind: str, names: Sequence[str], body: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
