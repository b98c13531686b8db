"""Where cases work: inside one rank of a world that is set up, with a strategy's hooks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distcore import checkpoint
from distcore.checkpoint import Files, Tensors
from distcore.config import RunConfig
from distcore.data.loader import MicroBatches, one_step
from distcore.engine.evaluation import evaluate
from distcore.engine.loop import loss_multiplier, steps
from distcore.engine.trainer import build_run
from distcore.files import write_atomically
from distcore.plugin.contract import Evaluation, MicroBatch, Progress, RankInfo, Run, StepResult, World
from distcore.plugin.hooks import Hooks
from distcore.plugin.sampling import training_plan
from distcore.plugin.task import Datasets
from distcore.testing.problem import Problem

if TYPE_CHECKING:
    from distcore.testing.rank import Subject

HUGE = 1e9
"""A clipping norm that is never reached: the step reports the gradient's norm and changes nothing."""
PATIENCE = 30.0
"""Seconds that a rank waits for another one outside of any collective."""


class Unsynced(Files):
    """The file system without waiting for the disk: nothing here must survive a crash."""

    def sync(self, path: Path) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What some steps of a job came to; ``state`` is whole on every rank."""

    progress: Progress
    losses: list[float]
    norms: list[float]
    rates: list[float]
    state: Tensors


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run under test, ready to train, with its task and data."""

    task: Problem
    data: Datasets
    hooks: Hooks
    run: Run
    folder: Path
    """Of its own, for its checkpoints."""

    def train(self, number: int, progress: Progress | None = None) -> Trained:
        """Train ``number`` optimizer steps from ``progress`` on."""
        done = progress or Progress()
        losses, norms, rates = [], [], []
        for after, result, loss in islice(self.steps(done), number):
            done = after
            losses.append(self._mean(loss))
            norms.append(float("nan") if result.grad_norm is None else float(result.grad_norm))
            rates.append(self._rate())
        path = self.save(done)
        return Trained(progress=done, losses=losses, norms=norms, rates=rates, state=checkpoint.read_tensors(path))

    def steps(self, progress: Progress) -> Iterator[tuple[Progress, StepResult, Tensor]]:
        """The core's loop."""
        return steps(self.run, self.hooks, self.task, self.data.train, progress)

    def save(self, progress: Progress) -> Path:
        """Commit a checkpoint, which every rank can read then."""
        path = self.folder / f"step-{progress.step:08d}"
        return (
            path
            if path.exists()
            else checkpoint.save(self.run, self.hooks, progress, self.folder, {"best": None}, Unsynced())
        )

    def evaluate(self) -> Evaluation:
        """Evaluate on all ranks."""
        return evaluate(self.run, self.hooks, self.task, self.data.evaluation, self.data)

    def rows(self, epoch: int, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of one step, as they come out of the loader."""
        sampler = self.hooks.build_sampler(self.run, training_plan(self.run.config, self.data.train))
        stream = MicroBatches(self.data.train, sampler, self.run.config).stream(epoch, range(step, step + 1))
        return [micro for micro, _ in one_step(stream)]

    def _mean(self, loss: Tensor) -> float:
        mine = loss.double().reshape(1) * self.run.world.speaks
        total = self.hooks.reduce_loss(self.run, mine)
        return float(total) / loss_multiplier(self.run)

    def _rate(self) -> float:
        assert self.run.optimizer is not None  # jobs train
        return float(self.run.optimizer.param_groups[0]["lr"])


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One rank's workplace: ``hooks`` of the strategy under test on ``world``, and a folder that all ranks share."""

    hooks: Hooks
    base: RunConfig
    world: World
    rank_info: RankInfo
    folder: Path
    """Of this case alone."""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def global_batch(self) -> int:
        """Twelve rows, or the next number that all ranks can share."""
        return lcm(12, self.world.size)

    def config(self, **changes: Any) -> RunConfig:
        """The config of a case: small, constant rate, an AdamW whose large epsilon shows a wrong gradient scale."""
        settings: dict[str, Any] = {
            "global_batch_size": self.global_batch,
            "micro_batch_size": max(1, self.global_batch // self.world.size // 2),
            "lr": 0.01,
            "max_steps": 10,
            "optimizer": {"eps": 1e-2, "weight_decay": 0.1},
            "schedule": {"name": "constant"},
            "clip": {"norm": HUGE},
            "data_guard_steps": 0,
        }
        return RunConfig.model_validate(self.base.model_dump() | settings | changes)

    def job(
        self,
        problem: Problem,
        hooks: Hooks | None = None,
        world: World | None = None,
        data: Datasets | None = None,
        **changes: Any,
    ) -> Job:
        """Build a run of the strategy under test, or of other ``hooks`` in a ``world`` of their own."""
        hooks, config = hooks or self.hooks, self.config(**changes)
        data = data or problem.prepare(config)
        run = build_run(config, hooks, world or self.world, problem, data)
        folder = self.folder / (f"job-{next(self._numbers)}" + ("" if world is None else f"-of-{self.world.rank}"))
        return Job(task=problem, data=data, hooks=hooks, run=run, folder=folder)

    def alone(self, problem: Problem, **changes: Any) -> Job:
        """The same job under the core's reference strategy, in this process by itself."""
        from distcore.distributed.single import SingleStrategy

        world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        config: dict[str, Any] = {
            "micro_batch_size": self.global_batch,
            "strategy": "single",
            "strategy_options": {},
            "nproc": 1,
        }
        return self.job(problem, Hooks("single", SingleStrategy()), world, **(config | changes))

    def share(self, value: object) -> list[Any]:
        """Return the ``value`` of every rank, in rank order: through files, so not by what is under test."""
        turn = next(self._numbers)
        write_atomically(self.folder / f"share-{turn}-{self.world.rank}", json.dumps(value))
        files = [self.folder / f"share-{turn}-{rank}" for rank in range(self.world.size)]
        await_true(lambda: all(file.exists() for file in files), PATIENCE, "other ranks did not come so far")
        return [json.loads(file.read_text()) for file in files]


@dataclass(frozen=True, kw_only=True)
class JobLab:
    """Where cases work that start processes of their own: the process that starts the ranks."""

    subject: Subject
    foreign_modules: Callable[[], list[str] | str]
    """Modules of other strategies that a step of training imports, or the line that says why it failed."""


def await_true(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    """Look again and again until ``condition`` holds; raises TimeoutError with ``failure`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(failure)
        time.sleep(0.002)
