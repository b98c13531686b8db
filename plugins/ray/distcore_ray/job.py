"""The job of a driver, read from its command line: ``python -m
distcore_ray.driver FLAGS -- WORDS``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A run on a Ray cluster."""

    address: str
    """Address of the head node; ``auto``: this machine's cluster."""
    least: int
    """Minimum number of nodes."""
    most: int
    """Maximum number of nodes."""
    nproc: int
    """Ranks on each node."""
    gpus: bool
    """True if each rank needs a GPU."""
    max_restarts: int
    """Maximum number of restarts of all ranks after the failure of one."""
    patience: float
    """Seconds to wait for ranks to end after a request, and for nodes."""
    variables: Mapping[str, str]
    """Environment variables of every rank."""
    words: tuple[str, ...]
    """Command of a rank: arguments of Python."""
    folder: str
    """Working directory of the ranks."""

    @property
    def is_elastic(self) -> bool:
        """True if the number of nodes may change."""
        return self.least < self.most


def read_job(argv: Sequence[str]) -> RayJob:
    """Parse a command line of ``RayLauncher.plan`` into a job."""
    parser = argparse.ArgumentParser(prog="python -m distcore_ray.driver", allow_abbrev=False)
    parser.add_argument("--address", default="auto")
    parser.add_argument("--nodes", default="1:1")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--patience", type=float, default=600)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args(argv)
    least, _, most = arguments.nodes.partition(":")
    return RayJob(
        address=arguments.address,
        least=int(least),
        most=int(most),
        nproc=arguments.nproc,
        gpus=arguments.gpus,
        max_restarts=arguments.max_restarts,
        patience=arguments.patience,
        variables=dict(pair.split("=", 1) for pair in arguments.env),
        words=tuple(arguments.words),
        folder=os.getcwd(),
    )
