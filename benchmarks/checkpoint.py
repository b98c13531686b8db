"""Measure the cost of a save, against a memory copy, torch.save and torch.distributed.checkpoint.

The state has ``--megabytes`` (parameters and two AdamW moments, on the CPU). Blocked:
seconds until training can
continue. Durable: seconds until the bytes are on the disk. Methods alternate within a round;
figures are medians over
rounds. Steps meanwhile: the speed of training steps while a save beside training is written, as a
share of their speed without one.

Bounds: a save beside training blocks for at most 0.3 times as long as a copy into new memory, steps
keep 0.95 of their speed, and memory grows by at most a copy and 256 MiB.

    python benchmarks/checkpoint.py [--megabytes 1200] [--rounds 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint.state_dict_saver as dcp
from torch import Tensor, nn

from distcore import RunConfig
from distcore.checkpoint.saver import Saver
from distcore.engine.build import build_run
from distcore.engine.trainer import set_up
from distcore.plugin.strategy.contract import Progress, RankInfo, Run
from distcore.plugin.strategy.defaults import save_checkpoint
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem

Times = tuple[float, float]
"""Seconds blocked, seconds until durable."""
BLOCKED, SPEED, MEMORY = 0.3, 0.95, 256
"""Bounds: blocked time in memory copies, speed of steps meanwhile, and MiB beside a copy."""


class Methods:
    """The ways to save one state, each into a new folder; methods return the times."""

    def __init__(self, run: Run, hooks: Hooks, folder: Path) -> None:
        self.run, self.hooks, self.folder = run, hooks, folder
        self.memory: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = dict(save_checkpoint(run))  # type: ignore[arg-type]

    def memory_copy(self, path: Path) -> Times:
        """Copy the state into memory that is new to the process, for comparison."""
        start = time.perf_counter()
        torch.cat([tensor.reshape(-1) for tensor in self.state.values()])
        seconds = time.perf_counter() - start
        return seconds, seconds

    def torch_save(self, path: Path) -> Times:
        """Save with torch.save."""
        return measure(lambda: torch.save(self.state, path / "state.pt"), path)

    def dcp_save(self, path: Path) -> Times:
        """Save with torch.distributed.checkpoint."""
        return measure(
            lambda: dcp.save(dict(self.state), checkpoint_id=path / "dcp", no_dist=True), path
        )

    def dcp_async_save(self, path: Path) -> Times:
        """Save asynchronously with torch.distributed.checkpoint."""
        start = time.perf_counter()
        future = dcp.async_save(dict(self.state), checkpoint_id=path / "dcp")
        blocked = time.perf_counter() - start
        future.result()  # type: ignore[union-attr]
        sync(path)
        return blocked, time.perf_counter() - start

    def distcore(self, path: Path) -> Times:
        """Save with distcore."""
        return self._distcore(path, asynchronous=False)

    def distcore_async(self, path: Path) -> Times:
        """Save asynchronously with distcore."""
        return self._distcore(path, asynchronous=True)

    def saver(self, path: Path, asynchronous: bool) -> Saver:
        """Return a saver that writes to ``path``."""
        checkpoints = self.run.config.checkpoints.model_copy(update={"asynchronous": asynchronous})
        config = self.run.config.model_copy(update={"checkpoints": checkpoints, "out": str(path)})
        return Saver(
            replace(self.run, config=config), self.hooks, {"data": "rows", "task_files": {}}
        )

    def _distcore(self, path: Path, asynchronous: bool) -> Times:
        saver = self.saver(path, asynchronous)
        saver._memory = self.memory
        start = time.perf_counter()
        saver.save(Progress(step=1), None)
        blocked = time.perf_counter() - start
        saver.wait()
        return blocked, time.perf_counter() - start


def measure(work: Callable[[], object], path: Path) -> Times:
    """Time ``work``, which blocks until its files are written, and their sync."""
    start = time.perf_counter()
    work()
    sync(path)
    seconds = time.perf_counter() - start
    return seconds, seconds


def sync(path: Path) -> None:
    """Write the files of ``path`` through to the disk, which torch's own methods do not do."""
    for file in [path, *path.rglob("*")]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Big(Problem):
    """A model of linear layers that, with its moments, has ``MEGABYTES``."""

    def build_model(self, config: RunConfig, data: object) -> nn.Module:
        """Build the layers, 16 MiB each."""
        layers = max(1, MEGABYTES // 3 // 16)
        return nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(layers))


MEGABYTES = 1200


def prepare_run(folder: Path) -> tuple[Run, Hooks]:
    """Return a run that has taken a step, so that the optimizer has moments."""
    checkpoints = {"best": None}
    resolved = resolve(
        RunConfig(
            out=str(folder), device="cpu", checkpoints=checkpoints, extensions={"progress": False}
        )
    )
    hooks, world = set_up(resolved, RankInfo())
    run = build_run(resolved.config, hooks, world, Big(), Big().prepare(resolved.config))
    assert run.optimizer is not None
    for parameter in run.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return run, hooks


def step(run: Run, rows: Tensor) -> None:
    """Train the layers one after the other on 256 rows."""
    assert run.optimizer is not None
    for layer in run.module:  # type: ignore[attr-defined]
        layer(rows).square().mean().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def beside(methods: Methods, folder: Path, steps: int = 12) -> tuple[float, float]:
    """Return the speed of steps while saves are written, as a share of their speed, and how
    many bytes memory grew.

    Steps with and without a save alternate, because other programs may use the machine.
    """
    rows, alone, meanwhile, grown = torch.ones(256, 2048), [], [], 0
    saver = methods.saver(folder, asynchronous=True)
    step(methods.run, rows)
    before = psutil.Process().memory_info().rss
    for number in range(steps):
        start = time.perf_counter()
        step(methods.run, rows)
        alone.append(time.perf_counter() - start)
        saver.save(Progress(step=number + 1), None)
        assert saver._pending is not None
        start = time.perf_counter()
        step(methods.run, rows)
        meanwhile.append(time.perf_counter() - start)
        grown = max(grown, psutil.Process().memory_info().rss - before)
        saver.wait()
    return statistics.median(alone) / statistics.median(meanwhile), grown


def main() -> int:
    """Run all methods, print the table, and return the exit code."""
    global MEGABYTES
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: the temporary folder"
    )
    arguments = parser.parse_args()
    MEGABYTES = arguments.megabytes
    names = [
        "memory_copy",
        "torch_save",
        "dcp_save",
        "dcp_async_save",
        "distcore",
        "distcore_async",
    ]
    seconds: dict[str, list[Times]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        run, hooks = prepare_run(Path(root))
        methods = Methods(run, hooks, Path(root))
        # first of all: memory is new to the process
        share, grown = beside(methods, Path(root, "beside"))
        for number in range(arguments.rounds):
            for name in names:
                path = Path(root, f"{name}-{number}")
                path.mkdir()
                seconds[name].append(getattr(methods, name)(path))
                shutil.rmtree(path)
    return show(methods.state, seconds, share, grown)


def show(state: Any, seconds: dict[str, list[Times]], share: float, grown: float) -> int:
    """Print the table; return the exit code."""
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"state of {size / 2**20:.0f} MiB\n")
    print("| method | blocked s | durable s | blocked / memory copy |\n|---|---|---|---|")
    copy = statistics.median(blocked for blocked, _ in seconds["memory_copy"])
    for name, times in seconds.items():
        blocked, durable = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"| {name} | {blocked:.3f} | {durable:.3f} | {blocked / copy:.2f} |")
    ratio = statistics.median(blocked for blocked, _ in seconds["distcore_async"]) / copy
    more = (grown - size) / 2**20
    print(f"\nbeside training: blocked {ratio:.2f} x a memory copy (allowed: {BLOCKED})")
    print(f"steps meanwhile {share:.0%} as fast (at least {SPEED:.0%})")
    print(f"memory: a copy and {more:.0f} MiB (allowed: {MEMORY})")
    return 0 if ratio <= BLOCKED and share >= SPEED and more <= MEMORY else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
