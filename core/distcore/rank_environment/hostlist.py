"""SLURM's compressed lists: hosts such as ``node[01-04,7],other``, and counts such as ``2(x3),1``."""

from __future__ import annotations

import re


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list: ``node01`` for ``node[01-04,7],other``."""
    brackets = re.compile(r"\[(\w+)[^\]]*\]")  # the first number in each pair of brackets, with leading zeros
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)  # up to the first comma outside brackets
    return brackets.sub(r"\1", head.group()) if head else ""


def expand_counts(counts: str) -> list[int]:
    """Return one count per node: ``[2, 2, 2, 1]`` for ``2(x3),1``. Raises ValueError if ``counts`` is malformed."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{counts!r} is not a list of counts")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded
