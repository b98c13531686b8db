"""Run ranks on a Ray cluster, and restart them after the loss of a node.

Usage: ``python -m distcore_ray.driver FLAGS -- WORDS``.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

from distcore import ConfigError
from distcore_ray.attempt import Attempt, Outcome
from distcore_ray.cluster import connect, nodes_timeout, reserve
from distcore_ray.job import RayJob, read_job

STOPPED = 143
"""Exit status after SIGTERM or Ctrl-C, when ranks have saved a checkpoint."""
FAILED = 3
"""Exit status if no rank has one."""
WRONG = 2
"""Exit status of ranks with a wrong config, which another attempt cannot mend."""


def main(argv: Sequence[str]) -> int:
    """Run the job to its end; return the exit status."""
    job = read_job(argv)
    return on_cluster(job.address, partial(run, job))


def on_cluster(address: str, work: Callable[[threading.Event], int]) -> int:
    """Connect to the cluster, do ``work``, and return its exit status.

    Its argument is set by SIGTERM and Ctrl-C.
    """
    stop = threading.Event()
    try:
        with connect(address):
            _install_signal_handlers(stop)  # after Ray has installed its own handlers
            return work(stop)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(job: RayJob, stop: threading.Event) -> int:
    """Start all ranks, and restart them if allowed; return the exit status."""
    restarts, before, outcome = 0, frozenset[str](), Outcome("failed")
    while not stop.is_set():
        nodes = reserve(job, stop.is_set)
        if nodes is None:
            break
        # a worker died, but its node is alive
        if outcome.kind == "lost" and job.is_elastic and nodes.ids == before:
            restarts += 1
        if restarts > job.max_restarts:
            return _end(outcome)
        if outcome.line:
            _say(f"{outcome.line}: going on with {nodes.count} node(s)")
        before = nodes.ids
        outcome = Attempt(job, nodes, stop.is_set).run()
        if outcome.kind == "finished":
            return 0
        if stop.is_set():
            break
        if outcome.kind == "joined" or (outcome.kind == "lost" and job.is_elastic):
            continue
        restarts += 1
        if outcome.status == WRONG or restarts > job.max_restarts:
            return _end(outcome)
    if stop.is_set():
        return STOPPED
    _say(
        f"error: Ray has no {job.least} node(s) with {job.nproc} free"
        f" CPU(s){' and GPU(s)' * job.gpus} each, within {nodes_timeout(job):g} seconds"
    )
    return FAILED


def _end(outcome: Outcome) -> int:
    if outcome.status != WRONG or outcome.kind == "wrong":  # else the rank has printed the error
        _say(f"error: {outcome.line}")
    return outcome.status


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _install_signal_handlers(stop: threading.Event) -> None:
    """Make SIGTERM and the first Ctrl-C set ``stop``.

    A second Ctrl-C ends the driver, and so all ranks.
    """

    def ask(number: int, frame: object) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
