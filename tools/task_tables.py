"""Write the tables of docs/tasks.md from the specifications of a task and
a dataset: python tools/task_tables.py

Each row is a signature and the first sentence of its docstring up to a semicolon or colon, in the
order of the calls.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from distcore import Dataset
from distcore.plugin.task.dataset_spec import DatasetSpec
from distcore.plugin.task.spec import TaskSpec

PAGE = Path(__file__).parents[1] / "docs/tasks.md"
TABLES: dict[str, tuple[type, ...]] = {"methods": (TaskSpec,), "members": (Dataset, DatasetSpec)}
"""Contents of the tables, by the name in their marks ``<!-- methods -->``
and ``<!-- /methods -->``.
"""


def members(*specs: type) -> Iterator[tuple[str, str]]:
    """Yield each member of the specifications as a user writes it, with the first
    clause of its docstring.
    """
    for name, member in chain.from_iterable(vars(spec).items() for spec in specs):
        if name.startswith("_") and name != "__len__":  # what a protocol has by itself
            continue
        if isinstance(member, property):
            yield name, _first_clause(member)
        elif inspect.isfunction(member):
            arguments = [
                argument for argument in inspect.signature(member).parameters if argument != "self"
            ]
            written = "len(dataset)" if name == "__len__" else f"{name}({', '.join(arguments)})"
            yield written, _first_clause(member)


def _first_clause(member: object) -> str:
    sentence = re.match(r".+?\.(?=\s|$)", inspect.getdoc(member) or "", re.S)
    if sentence is None:
        raise ValueError(f"{member}: its docstring has no sentence")
    clause = re.split(r"[;:](?= )", sentence[0])[0].removesuffix(".") + "."
    return clause.replace("``", "`").replace("\n", " ").replace("|", "\\|")


def with_tables(page: str) -> str:
    """Return the page with each table between its marks."""
    for name, specs in TABLES.items():
        heading = name.removesuffix("s")
        rows = [
            f"| {heading} | |",
            "|---|---|",
            *(f"| `{member}` | {does} |" for member, does in members(*specs)),
        ]
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        _, mark, after = rest.partition(f"<!-- /{name} -->")
        if not mark:
            raise ValueError(f"{PAGE}: has no place for the table of {name}")
        page = "\n".join([f"{before}<!-- {name} -->", *rows, f"{mark}{after}"])
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
