"""SLURM's short form of lists: hosts as ``node[01-04,7],other``, counts as ``2(x3),1``."""

from __future__ import annotations

import re


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list: ``node01`` of ``node[01-04,7],other``."""
    brackets = re.compile(r"\[(\w+)[^\]]*\]")  # of each bracket the first number, with its leading zeros
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)  # up to the first comma outside brackets
    return brackets.sub(r"\1", head.group()) if head else ""


def expand_counts(counts: str) -> list[int]:
    """Return one number a node: ``[2, 2, 2, 1]`` of ``2(x3),1``. Raises ValueError where it is none."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{counts!r} is no list of counts")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded
