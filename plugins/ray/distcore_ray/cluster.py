"""The driver's interface to Ray: the connection, the alive nodes, and placement groups."""

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
from distcore_ray.job import RayJob

PATIENCE = 10
"""Seconds to wait for a placement group. Ray counts a lost node as alive for up to a minute."""
LEAST = 120
"""Minimum number of seconds to wait for nodes: longer than Ray takes to notice a lost one."""


@dataclass(frozen=True)
class Nodes:
    """Nodes reserved for ranks."""

    group: Any
    """Ray's placement group, with a bundle for each node."""
    ids: frozenset[str]
    """Ids of the nodes."""
    known: frozenset[str]
    """Ids of all nodes alive at the time of the reservation."""

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.ids)


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect to the cluster at ``address``, and disconnect at the end.

    Raises ConfigError, one line, without one.
    """
    try:
        # Ray's own output drops similar lines, such as those of steps.
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises many kinds of errors
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--launcher ray: no Ray cluster to be reached at {address}: {cause}; start this on one"
            " of its nodes, or start one: ray start --head"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def alive_nodes() -> frozenset[str]:
    """Return the ids of the nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def reserve(job: RayJob, stopping: Callable[[], bool]) -> Nodes | None:
    """Reserve as many free nodes as possible; return ``None`` with too few.

    They are ``job.least`` to ``job.most``. Waits for ``nodes_timeout(job)`` seconds, and ends early
    once ``stopping()`` is true.
    """
    bundle = {"CPU": job.nproc}
    if job.gpus:
        bundle["GPU"] = job.nproc
    deadline = time.monotonic() + nodes_timeout(job)
    while time.monotonic() < deadline and not stopping():
        alive = alive_nodes()
        most = max(job.least, min(len(alive), job.most))
        # One less at a time: other programs may have taken a node.
        for count in range(most, job.least - 1, -1):
            group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
            if not stopping() and group.wait(PATIENCE):
                node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
                return Nodes(group, frozenset(node_of_bundle.values()), alive)
            remove_placement_group(group)
    return None


def nodes_timeout(job: RayJob) -> float:
    """Return the number of seconds to wait for nodes."""
    return max(job.patience, LEAST)


def release(nodes: Nodes) -> None:
    """Release the reserved nodes."""
    remove_placement_group(nodes.group)
