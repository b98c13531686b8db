"""Starts ranks on a Ray cluster and watches them: ``python -m distcore_ray.driver FLAGS -- COMMAND``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from distcore import ConfigError, DistcoreError
from distcore_ray.actor import Rank

POLL = 0.5
"""Seconds between two looks at the ranks."""
SETTLE = 10.0
"""Seconds for a placement group: a machine that was turned off counts as alive for some of them."""
START = 120
"""Seconds for actors to start, at least."""
TRIES = 3
"""Starts of actors that may fail one after the other."""
STOPPED = 143
"""Exit status of a run that was asked to stop."""
FAILED = 3
"""Exit status where a rank was killed, or a machine was lost."""


def main(argv: Sequence[str]) -> int:
    """Run the command as ranks until they end; return the exit status."""
    asked = _parse(argv)
    try:
        import ray
    except ImportError:
        print("error: --launcher ray: there is no ray here; pip install 'distcore-ray[ray]'", file=sys.stderr)
        return ConfigError.exit_code
    stop = threading.Event()
    try:
        # No logs of Ray's to this screen: it drops lines that look alike, as those of steps do.
        ray.init(address=asked.address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        print(f"error: --launcher ray: no cluster at {asked.address}: {str(error).splitlines()[0]}", file=sys.stderr)
        return ConfigError.exit_code
    for number in (signal.SIGTERM, signal.SIGINT):  # after init, which has a handler of its own
        signal.signal(number, lambda *_: stop.set())
    try:
        return _run(asked, stop)
    except DistcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        ray.shutdown()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="distcore_ray.driver", allow_abbrev=False)
    parser.add_argument("--address", default="auto")
    parser.add_argument("--nodes", nargs=2, type=int, default=[1, 1], metavar=("MIN", "MAX"))
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--timeout", type=int, default=600)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def _run(asked: argparse.Namespace, stop: threading.Event) -> int:
    """Start the ranks, and again as long as that is allowed: a lost machine counts only where no range was given."""
    from ray.exceptions import RayError

    least, most = asked.nodes
    restarts, failed = asked.max_restarts, 0
    while True:
        try:
            with _placed(asked, stop) as (actors, addresses):
                status, lost = _watch(asked, stop, actors, addresses) if actors else (STOPPED, None)
            failed = 0
        except RayError as error:
            failed += 1
            status, lost = FAILED, "of an actor that was about to start"
            if failed == TRIES:
                cause = str(error).splitlines()[0]
                print(f"error: --launcher ray: actors did not start {TRIES} times: {cause}", file=sys.stderr)
                return status
        if stop.is_set() or not status:
            return status
        if lost:
            print(f"ray: lost the machine {lost}", file=sys.stderr)
        if lost is None or least == most:
            if not restarts:
                return status
            restarts -= 1
        print(f"ray: starts ranks again on {least} to {most} machine(s)", file=sys.stderr, flush=True)


@contextmanager
def _placed(asked: argparse.Namespace, stop: threading.Event) -> Iterator[tuple[list[Any], list[tuple[str, int]]]]:
    """Provide an actor for each rank, and where it is; without one if ``stop`` comes first. Removes them at the end."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, actors = None, []
    try:
        group, nodes = _place(asked, stop)
        for bundle in range(nodes):
            place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
            kind = ray.remote(Rank).options(num_cpus=1, num_gpus=int(asked.gpus), scheduling_strategy=place)
            actors += [kind.remote() for _ in range(asked.nproc)]
        yield actors, ray.get([actor.where.remote() for actor in actors], timeout=max(asked.timeout, START))
    finally:
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)


def _place(asked: argparse.Namespace, stop: threading.Event) -> tuple[Any, int]:
    """Return a placement group and its number of machines, as many as there are; waits for the least number.

    Raises ConfigError where they are not there within the timeout.
    """
    import ray

    bundle = {"CPU": asked.nproc} | ({"GPU": asked.nproc} if asked.gpus else {})
    least, most = asked.nodes
    deadline = time.monotonic() + max(asked.timeout, SETTLE)
    while not stop.is_set():
        for nodes in range(most, least - 1, -1):
            group = ray.util.placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
            if group.wait(SETTLE):
                return group, nodes
            ray.util.remove_placement_group(group)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--launcher ray: not {least} machine(s) with {bundle} free within {asked.timeout} seconds"
            )
    return None, 0


def _watch(
    asked: argparse.Namespace, stop: threading.Event, actors: list[Any], addresses: list[tuple[str, int]]
) -> tuple[int, str | None]:
    """Start the ranks and print their lines until all have ended; return the first bad status, and the lost machine."""
    import ray

    _start(asked, actors, addresses)
    status, lost, deadline = 0, None, float("inf")
    left = dict(enumerate(actors))
    while left and time.monotonic() < deadline:
        time.sleep(POLL)
        for rank in list(left):
            try:
                lines, ended = ray.get(left[rank].look.remote(), timeout=asked.timeout)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                lines, ended, lost = [], FAILED, addresses[rank][0]
            print("".join(lines), end="", flush=True)
            if ended is not None:
                del left[rank]
                status = status or (ended if ended >= 0 else FAILED)
        if (status or stop.is_set()) and deadline == float("inf"):
            deadline = time.monotonic() + asked.timeout
            for actor in left.values():
                with suppress(ray.exceptions.RayError):
                    actor.stop.remote()
    return (STOPPED if stop.is_set() and status else status or (FAILED if left else 0)), lost


def _start(asked: argparse.Namespace, actors: list[Any], addresses: list[tuple[str, int]]) -> None:
    import ray

    address, port = addresses[0]
    given = dict(pair.split("=", 1) for pair in asked.env)
    for rank, actor in enumerate(actors):
        place = {
            "RANK": rank,
            "WORLD_SIZE": len(actors),
            "LOCAL_RANK": rank % asked.nproc,
            "LOCAL_WORLD_SIZE": asked.nproc,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "DISTCORE_LAUNCHER": "ray",
        }
        variables = given | {name: str(value) for name, value in place.items()}
        ray.get(actor.start.remote(asked.command, variables, os.getcwd()), timeout=max(asked.timeout, START))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
