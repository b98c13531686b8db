"""The job of a driver, as read from its command line: ``python -m distcore_ray.driver FLAGS -- WORDS``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a Ray cluster."""

    address: str
    """Of the head node, or ``auto``: the cluster that this machine belongs to."""
    least: int
    """Nodes without which nothing starts."""
    most: int
    """Nodes at the most."""
    nproc: int
    """Ranks of each node."""
    gpus: bool
    """Whether each rank needs a GPU."""
    max_restarts: int
    """How often all ranks are started again after one of them has failed."""
    patience: float
    """Seconds: for ranks to end after they were asked to, and for nodes to come."""
    variables: Mapping[str, str]
    """For every rank."""
    words: tuple[str, ...]
    """Arguments of Python: the command of a rank."""
    folder: str
    """In which ranks start."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.least < self.most


def read(argv: Sequence[str]) -> Job:
    """Return the job of a command line, which ``RayLauncher.plan`` wrote."""
    parser = argparse.ArgumentParser(prog="python -m distcore_ray.driver", allow_abbrev=False)
    parser.add_argument("--address", default="auto")
    parser.add_argument("--nodes", default="1:1")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--patience", type=float, default=600)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("words", nargs="+")
    given = parser.parse_args(argv)
    least, _, most = given.nodes.partition(":")
    return Job(
        address=given.address,
        least=int(least),
        most=int(most),
        nproc=given.nproc,
        gpus=given.gpus,
        max_restarts=given.max_restarts,
        patience=given.patience,
        variables=dict(pair.split("=", 1) for pair in given.env),
        words=tuple(given.words),
        folder=os.getcwd(),
    )
