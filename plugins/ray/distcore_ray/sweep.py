"""Train the runs of a sweep on a Ray cluster, each as a task of Ray with a driver of its own.

Usage: ``python -m distcore_ray.sweep --address ADDRESS FILE``;
``RayLauncher.plan_sweep`` writes the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from distcore_ray.cluster import nodes_timeout
from distcore_ray.driver import FAILED, STOPPED, on_cluster
from distcore_ray.job import RayJob, read_job

LISTEN = 0.5
"""Seconds between two questions whether the sweep is to stop."""


def main(argv: Sequence[str]) -> int:
    """Train all runs, as many at once as the cluster has room for; return 0, or the status
    of one that failed.
    """
    parser = argparse.ArgumentParser(prog="python -m distcore_ray.sweep", allow_abbrev=False)
    parser.add_argument("--address", default="auto")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args(argv)
    return on_cluster(
        arguments.address,
        partial(_train_all, json.loads(arguments.file.read_text(encoding="utf-8"))),
    )


def train(driver: Sequence[str], log: str, folder: str) -> int:
    """Run one driver in ``folder``, with its output in the file ``log`` there;
    return its exit status.

    A task of Ray. When it is canceled the driver gets SIGTERM, and its ranks save a checkpoint.
    """
    file = Path(folder, log)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as output:
        command = [sys.executable, "-m", "distcore_ray.driver", *driver]
        child = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while child.poll() is None:
                time.sleep(LISTEN)  # Ray's interrupt arrives between two of these, not in a wait
        except KeyboardInterrupt:
            child.terminate()
        return child.wait()


def room_for(job: RayJob) -> int:
    """Return how many such runs the nodes of the cluster take at once, at least 1."""
    kind = "GPU" if job.gpus else "CPU"
    places = 0
    for node in ray.nodes():
        if node["Alive"]:
            # All ranks of a place are on one node.
            places += int(node["Resources"].get(kind, 0)) // job.nproc
    return max(1, places // job.least)


def _train_all(runs: dict[str, dict[str, Any]], stop: threading.Event) -> int:
    """Train all runs, as many at once as the cluster takes; return the exit status.

    Once ``stop`` is set, no run starts, and those that are going save a checkpoint and end.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(train)
    jobs = {name: read_job(run["driver"]) for name, run in runs.items()}
    waiting = list(runs)
    status = 0
    going: dict[Any, str] = {}
    room = room_for(jobs[waiting[0]])
    while going or (waiting and not stop.is_set()):
        while waiting and len(going) < room and not stop.is_set():
            name = waiting.pop(0)
            run = runs[name]
            print(f"{name}: starts, its output is in {run['log']}", file=sys.stderr, flush=True)
            future = task.remote(run["driver"], run["log"], os.getcwd())
            going[future] = name
        ended_runs, _ = ray.wait(list(going), num_returns=1, timeout=LISTEN)
        for ended in ended_runs:
            status = _end(going.pop(ended), ended) or status
        if stop.is_set():
            break
    if not stop.is_set():
        return status
    for run_in_progress in going:
        ray.cancel(run_in_progress, force=False, recursive=False)
    if going:
        patience = max(nodes_timeout(jobs[name]) for name in going.values())
        ray.wait(list(going), num_returns=len(going), timeout=patience)
    return STOPPED


def _end(name: str, ended: Any) -> int:
    """Print how a run ended, and return its exit status."""
    try:
        status: int = ray.get(ended)
    except RayError as error:
        reason = " ".join(str(error).split())[:200]
        print(f"{name}: Ray has lost its driver: {reason}", file=sys.stderr, flush=True)
        return FAILED
    print(f"{name}: ended with exit code {status}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
