"""Ray's side of the driver: the connection, the nodes that are there, and a placement group on some of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from distcore import ConfigError
from distcore_ray.job import Job

PATIENCE = 10
"""Seconds that a placement group gets: for up to a minute a node that was lost still counts as there."""
LEAST = 120
"""Seconds, at the least, for nodes to come: longer than Ray takes to notice that one was lost."""


@dataclass(frozen=True)
class Nodes:
    """Nodes on which ranks may be placed."""

    group: Any
    """Ray's placement group, a bundle for each node."""
    ids: frozenset[str]
    """Of the nodes."""
    known: frozenset[str]
    """Ids of all nodes that were there then, these or not."""

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.ids)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at ``address``; raises ConfigError, one line, if there is none."""
    try:
        # Ray's own screen output drops lines that look alike, as those of steps do.
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray says it by many kinds of errors
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--launcher ray: no Ray cluster to be reached at {address}: {cause}; start this on one of its nodes, or "
            "start one: ray start --head"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def alive() -> frozenset[str]:
    """Return the ids of the nodes that are there, as far as Ray knows."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def reserve(job: Job, stopping: Callable[[], bool]) -> Nodes | None:
    """Return as many nodes as are free, ``job.most`` at the most; ``None`` if ``job.least`` do not come in time.

    Waits for ``patience(job)`` seconds, and ends early once ``stopping()`` is true.
    """
    bundle = {"CPU": job.nproc, **({"GPU": job.nproc} if job.gpus else {})}
    deadline = time.monotonic() + patience(job)
    while time.monotonic() < deadline and not stopping():
        known = alive()
        for count in range(max(job.least, min(len(known), job.most)), job.least - 1, -1):
            group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
            if not stopping() and group.wait(PATIENCE):
                return Nodes(group, frozenset(placement_group_table(group)["bundles_to_node_id"].values()), known)
            remove_placement_group(group)
    return None


def patience(job: Job) -> float:
    """Return the seconds for which nodes are waited for."""
    return max(job.patience, LEAST)


def release(nodes: Nodes) -> None:
    """Give the nodes back."""
    remove_placement_group(nodes.group)
