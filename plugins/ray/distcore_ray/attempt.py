"""One attempt: start all ranks on reserved nodes, and pass on their output until
the last has ended.
"""

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
"""Seconds for the other ranks to end by themselves, and to print their errors,
after one has failed.
"""
LOOK = 2
"""Seconds between two checks for new nodes."""


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    kind: str
    """``finished``, ``failed``, ``lost`` (a node or a worker of Ray), ``joined`` (ended
    for more nodes), ``wrong``.
    """
    line: str = ""
    """Message for the user."""
    status: int = 0
    """Exit status."""


class Attempt:
    """All ranks of a run, from their start to their end."""

    def __init__(self, job: RayJob, nodes: Nodes, stopping: Callable[[], bool]) -> None:
        """Prepare an attempt. Once ``stopping()`` is true, ranks are asked to save
        a checkpoint and end.
        """
        self._job, self._nodes, self._stopping = job, nodes, stopping
        self._statuses: dict[int, int | None] = {}
        """Exit status of each ended rank; ``None`` for a rank that Ray has lost."""
        self._first_failed: int | None = None
        """The rank that failed first."""
        self._is_ending = self._node_joined = False

    def run(self) -> Outcome:
        """Start the ranks, pass on their output, and return the outcome. No
        rank is left afterward.
        """
        with self._actors() as ranks:
            try:
                addresses: list[RankAddress] = ray.get(
                    [rank.find_address.remote() for rank in ranks], timeout=START
                )
                given = [
                    {
                        **self._job.variables,
                        **variables_of(n, self._nodes.count, self._job.nproc, addresses[0]),
                    }
                    for n in range(len(ranks))
                ]
                words, folder = self._job.words, self._job.folder
                begun = [
                    rank.start.remote(words, folder, more)
                    for rank, more in zip(ranks, given, strict=True)
                ]
                for problem in ray.get(begun, timeout=START):
                    if problem:
                        return Outcome("wrong", problem, 2)
                self._listen(ranks)
            except (RayError, GetTimeoutError) as error:
                return Outcome(
                    "lost", f"Ray cannot start the ranks: {' '.join(str(error).split())[:200]}", 3
                )
            return self._outcome([place.host for place in addresses])

    @contextmanager
    def _actors(self) -> Iterator[list[Any]]:
        kind = ray.remote(num_cpus=1, num_gpus=int(self._job.gpus), max_restarts=0)(Rank)
        ranks = []
        for node in range(self._nodes.count):
            place = PlacementGroupSchedulingStrategy(
                self._nodes.group, placement_group_bundle_index=node
            )
            ranks += [
                kind.options(scheduling_strategy=place).remote() for _ in range(self._job.nproc)
            ]
        try:
            yield ranks
        finally:
            for rank in ranks:
                ray.kill(rank)
            release(self._nodes)

    def _listen(self, ranks: list[Any]) -> None:
        """Pass on output until the last rank has ended, or the deadline for
        hanging ranks is over.
        """
        asked = {rank.listen.remote(LISTEN): number for number, rank in enumerate(ranks)}
        deadline, look = float("inf"), time.monotonic() + LOOK
        while asked and time.monotonic() < deadline:
            for answer in ray.wait(list(asked), num_returns=1, timeout=LISTEN)[0]:
                number = asked.pop(answer)
                if self._hear(number, answer):
                    asked[ranks[number].listen.remote(LISTEN)] = number
            if self._job.is_elastic and not self._is_ending and time.monotonic() > look:
                look = time.monotonic() + LOOK
                self._node_joined = self._nodes.count < self._job.most and bool(
                    alive_nodes() - self._nodes.known
                )
            if self._is_ending or not (
                self._node_joined or self._stopping() or self._first_failed is not None
            ):
                continue
            self._is_ending = True
            deadline = time.monotonic() + (
                GRACE if self._first_failed is not None else self._job.patience
            )
            for rank in ranks:
                rank.terminate.remote()
        # no answer: the rank hangs, or its node is gone and Ray does not know yet
        for number in asked.values():
            self._note(number, None)

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
    listed = ", ".join(map(str, sorted(numbers)))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"
