"""One attempt: start all ranks on reserved nodes, and pass on their output until the last ends."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distcore_ray.actor import Rank, RankAddress, RankOutput, variables_of
from distcore_ray.cluster import Nodes, alive_nodes, release
from distcore_ray.job import RayJob

START = 120
"""Seconds for Ray to start the actors."""
LISTEN = 0.5
"""Seconds that an actor waits for new output."""
GRACE = 15
"""Seconds for the other ranks to end by themselves, with their errors, after one has failed."""
LOOK = 2
"""Seconds between two checks for new nodes."""


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    kind: str
    """``finished``, ``failed``, ``lost``, ``joined`` or ``wrong``.

    ``lost`` is a node or a worker of Ray; ``joined``: the attempt ended for more nodes.
    """
    line: str = ""
    """Message for the user."""
    status: int = 0
    """Exit status."""


class Attempt:
    """All ranks of a run, from their start to their end."""

    def __init__(self, job: RayJob, nodes: Nodes, stopping: Callable[[], bool]) -> None:
        """Prepare an attempt. Once ``stopping()`` is true, ranks save a checkpoint and end."""
        self._job = job
        self._nodes = nodes
        self._stopping = stopping
        self._statuses: dict[int, int | None] = {}
        """Exit status of each ended rank; ``None`` for a rank that Ray has lost."""
        self._first_failed: int | None = None
        """The rank that failed first."""
        self._is_ending = False
        self._node_joined = False

    def run(self) -> Outcome:
        """Start the ranks, pass on their output, and return the outcome; no rank is left then."""
        job = self._job
        with self._actors() as ranks:
            try:
                finding = [rank.find_address.remote() for rank in ranks]
                addresses: list[RankAddress] = ray.get(finding, timeout=START)
                starting = []
                for number, rank in enumerate(ranks):
                    of_rank = variables_of(number, self._nodes.count, job.nproc, addresses[0])
                    variables = {**job.variables, **of_rank}
                    starting.append(rank.start.remote(job.words, job.folder, variables))
                for problem in ray.get(starting, timeout=START):
                    if problem:
                        return Outcome("wrong", problem, 2)
                self._listen(ranks)
            except (RayError, GetTimeoutError) as error:
                reason = " ".join(str(error).split())[:200]
                return Outcome("lost", f"Ray cannot start the ranks: {reason}", 3)
            return self._outcome([address.host for address in addresses])

    @contextmanager
    def _actors(self) -> Iterator[list[Any]]:
        """Start an actor for each rank, the ranks of a node on one bundle; kill them at the end."""
        # No restarts by Ray: a rank alone could not meet the others again.
        as_actor = ray.remote(num_cpus=1, num_gpus=int(self._job.gpus), max_restarts=0)
        actor = as_actor(Rank)
        ranks = []
        for node in range(self._nodes.count):
            on_node = PlacementGroupSchedulingStrategy(
                self._nodes.group, placement_group_bundle_index=node
            )
            placed_actor = actor.options(scheduling_strategy=on_node)
            ranks += [placed_actor.remote() for _ in range(self._job.nproc)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                ray.kill(rank)
            release(self._nodes)

    def _listen(self, ranks: list[Any]) -> None:
        """Pass on output until the last rank ends, or until the deadline for hanging ranks."""
        listening = {rank.listen.remote(LISTEN): number for number, rank in enumerate(ranks)}
        deadline = float("inf")
        next_look = time.monotonic() + LOOK
        while listening and time.monotonic() < deadline:
            answers, _ = ray.wait(list(listening), num_returns=1, timeout=LISTEN)
            for answer in answers:
                number = listening.pop(answer)
                if self._hear(number, answer):
                    listening[ranks[number].listen.remote(LISTEN)] = number
            if self._is_ending:
                continue
            if self._job.is_elastic and time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK
                self._node_joined = self._has_new_node()
            has_failed = self._first_failed is not None
            if not (self._node_joined or self._stopping() or has_failed):
                continue
            self._is_ending = True
            deadline = time.monotonic() + (GRACE if has_failed else self._job.patience)
            for rank in ranks:
                rank.terminate.remote()
        # Without an answer, the rank hangs, or its node is gone and Ray does not know yet.
        for number in listening.values():
            self._note(number, None)

    def _has_new_node(self) -> bool:
        """Return True if the cluster has a new node, and the run may have more nodes."""
        if self._nodes.count >= self._job.most:
            return False
        return bool(alive_nodes() - self._nodes.known)

    def _hear(self, number: int, answer: Any) -> bool:
        """Print the output of a rank. Return True if the rank still runs."""
        try:
            output: RankOutput = ray.get(answer)
        except RayError:
            self._note(number, None)
            return False
        for name, line in output.lines:
            print(line, end="", file=getattr(sys, name), flush=True)
        if output.status is not None:
            self._note(number, output.status)
        return output.status is None

    def _note(self, number: int, status: int | None) -> None:
        """Record how a rank ended; ``None``: Ray has lost it."""
        self._statuses[number] = status
        if status != 0 and self._first_failed is None:
            self._first_failed = number

    def _outcome(self, hosts: list[str]) -> Outcome:
        if self._first_failed is None:
            return Outcome("finished")
        if self._node_joined:
            return Outcome("joined", "another node has come", 143)
        lost = [number for number, status in self._statuses.items() if status is None]
        if lost and not self._stopping():
            names = ", ".join(sorted({hosts[number] for number in lost}))
            return Outcome("lost", f"Ray has lost {_ranks(lost)} on {names}", 3)
        status = self._statuses[self._first_failed] or 0
        where = f"rank {self._first_failed} on {hosts[self._first_failed]}"
        if status < 0:
            return Outcome("failed", f"{where} was killed by {signal.Signals(-status).name}", 3)
        return Outcome("failed", f"{where} ended with exit code {status}", status or 3)


def _ranks(numbers: list[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    listed = ", ".join(map(str, sorted(numbers)))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"
