"""The laboratory of the cases: a ``Lab`` in each rank, which builds jobs, small training runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distcore import checkpoint
from distcore.checkpoint.files import Files
from distcore.config import RunConfig
from distcore.config.loading import with_changes
from distcore.engine.evaluation import evaluate
from distcore.engine.loader import MicroBatches, one_step
from distcore.engine.loop import Step
from distcore.engine.proof import Proof
from distcore.engine.training import Training
from distcore.files import write_atomically
from distcore.model.optim import optimizer_options
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.contract import Evaluation, MicroBatch, Progress, RankInfo, Run, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import Datasets
from distcore.resolve.dropout_masks import dropout_masks
from distcore.testing.problem import ModelShape, Problem
from distcore.testing.reference import Series
from distcore.testing.store import await_true

if TYPE_CHECKING:
    from distcore.testing.subject import Subject

HUGE = 1e9
"""A clipping norm that no gradient reaches: the step reports the norm of the
gradient and clips nothing.
"""
BY_TOKENS: dict[str, Any] = {
    "micro_batch_size": "auto",
    "micro_batch_tokens": 30,
    "loader": {"forward_tokens": 3},
}
"""Changes to ``Lab.config`` for steps with different numbers of micro-batches and of
rows in a micro-batch.
"""
PATIENCE = 30.0
"""Seconds that a rank waits in ``Lab.share`` for the others."""


class Unsynced(Files):
    """The file system, but without waiting for the disk, to save time: these files need
    not survive a crash.
    """

    def sync(self, path: Path) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Trained(Series):
    """The result of some optimizer steps of a job."""

    progress: Progress
    """How far training is after the last step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A small run that is ready to train, with its task and data."""

    task: Problem
    """The problem to train."""
    training: Training
    """Its training, which has not begun."""
    folder: Path
    """Where this job alone saves checkpoints."""

    @property
    def run(self) -> Run:
        """The run, with model and optimizer."""
        return self.training.run

    @property
    def hooks(self) -> Hooks:
        """The strategy's hooks."""
        return self.training.hooks

    @property
    def data(self) -> Datasets:
        """The rows to train on and to evaluate."""
        return self.training.data

    def train(
        self, number: int, progress: Progress | None = None, interrupted: bool = False
    ) -> Trained:
        """Train for ``number`` optimizer steps from ``progress`` on (default: from
        the start), then save.

        ``interrupted``: also evaluate and save after half of them. Fewer steps if the run ends
        before. Every rank calls. Raises AgreementError if ranks train on the wrong rows.
        """
        return self.saved(self.take_steps(number, progress, interrupted))

    def take_steps(
        self, number: int, progress: Progress | None = None, interrupted: bool = False
    ) -> Trained:
        """Train as ``train`` does, but do not save at the end; the result has no tensors."""
        done = progress or Progress()
        losses, norms, rates = [], [], []
        for step in islice(self.steps(done), number):
            done = step.progress
            grad_norm = step.result.grad_norm
            losses.append(self._mean(step.loss))
            norms.append(float("nan") if grad_norm is None else float(grad_norm))
            rates.append(self._rate())
            if interrupted and len(losses) == number // 2:
                self.evaluate()
                self.save(done)
        return Trained(progress=done, losses=losses, norms=norms, rates=rates, state={})

    def saved(self, trained: Trained) -> Trained:
        """Save after ``take_steps``, and return its result with the tensors of the
        checkpoint. Every rank calls.
        """
        return replace(trained, state=checkpoint.read_tensors(self.save(trained.progress)))

    def steps(self, progress: Progress) -> Iterator[Step]:
        """Train from ``progress`` to the end of the run; yield each step when it is done."""
        self.training.progress = progress
        return self.training.steps()

    def save(self, progress: Progress) -> Path:
        """Save a checkpoint, unless there is one of this step, and return its
        path. Every rank calls.
        """
        path = self.folder / f"step-{progress.step:08d}"
        if path.exists():
            return path
        return checkpoint.save(
            self.run, self.hooks, progress, self.folder, {"best": None}, Unsynced(), proves=True
        )

    def evaluate(self) -> Evaluation:
        """Run the evaluation data through the model; the result is the same on every
        rank. Every rank calls.

        Raises AgreementError if a row comes back twice or not at all.
        """
        return evaluate(self.run, self.hooks, self.task, self.data.evaluation, self.data)

    def rows(self, epoch: int, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of one step as the loader yields them; ``step``
        counts within the epoch.
        """
        plan = training_plan(self.run.config, self.data.train)
        sampler = self.hooks.build_sampler(self.run, plan)
        micro_batches = MicroBatches(self.data.train, sampler, self.run.config)
        stream = micro_batches.stream(epoch, range(step, step + 1))
        return [micro for micro, _ in one_step(stream)]

    def _mean(self, loss: Tensor) -> float:
        """Return the mean loss over the global batch from this rank's share of it."""
        # Other ranks of a data shard have the leader's share again.
        mine = loss.double().reshape(1) * self.run.world.is_shard_leader
        total = self.hooks.reduce_loss(self.run, mine)
        return float(total) / self.run.loss_multiplier

    def _rate(self) -> float:
        """Return the learning rate of the optimizer's first group."""
        assert self.run.optimizer is not None  # jobs train
        return float(self.run.optimizer.param_groups[0]["lr"])


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The laboratory of a case in each rank: the strategy under test in a joined world,
    and a shared folder.
    """

    hooks: Hooks
    """The hooks of the strategy under test."""
    base: RunConfig
    """The config of the strategy under test, which ``config`` completes."""
    world: World
    """The world that the strategy set up."""
    rank_info: RankInfo
    """This process as its launcher describes it."""
    folder: Path
    """A folder for this case alone; all ranks share it."""
    hooks_with: Callable[[Mapping[str, object]], Hooks]
    """Returns hooks of the strategy under test that more extensions hear, given by name."""
    shape: ModelShape = field(default_factory=ModelShape)
    """Blocks and experts of the model of every problem."""
    _numbers: Iterator[int] = field(default_factory=count)
    """Numbers for the names in ``folder``. Every rank runs the same case, so all
    get the same ones.
    """

    @property
    def global_batch(self) -> int:
        """Rows of a global batch: the smallest multiple of 12 that the number of ranks divides."""
        return lcm(12, self.world.size)

    def config(self, **changes: Any) -> RunConfig:
        """Return the config of a small run of ten steps, with ``changes`` by key of ``RunConfig``.

        AdamW's update hardly depends on the scale of the gradient; with the large ``eps`` set here
        it does, so that a wrong scale shows in the parameters. Raises ConfigError for a change that
        is not valid.
        """
        settings: dict[str, Any] = {
            "global_batch_size": self.global_batch,
            "micro_batch_size": max(1, self.global_batch // self.world.size // 2),
            "micro_batch_tokens": None,
            "lr": 0.01,
            "max_steps": 10,
            "optimizer": {"eps": 1e-2, "weight_decay": 0.1},
            "schedule": {"name": "constant"},
            "clip": {"norm": HUGE},
            "data_guard_steps": 0,
            "dropout_masks": dropout_masks(self.base, self.hooks.capabilities, "off"),
        }
        config = RunConfig.model_validate(self.base.model_dump() | settings | changes)
        options = optimizer_options(config)
        changed_options = {f"optimizer.{name}": value for name, value in options.items()}
        return with_changes(config, changed_options)

    def job(
        self,
        problem: Problem,
        hooks: Hooks | None = None,
        world: World | None = None,
        data: Datasets | None = None,
        proof: Proof | None = None,
        **changes: Any,
    ) -> Job:
        """Build a run of ``problem``, with ``changes`` to ``config``. Every rank calls.

        ``hooks`` and ``world`` replace those of the strategy under test, ``data`` those that the
        problem prepares. ``proof`` copies the built model.
        """
        # Taken before anything can refuse: a rank that refuses alone must not fall behind.
        number = next(self._numbers)
        hooks = hooks or self.hooks
        config = self.config(**changes)
        # A problem of a case may have experts though the strategy asks for none.
        experts = problem.experts or self.shape.experts
        problem = replace(problem, blocks=self.shape.blocks, experts=experts)
        data = data or problem.prepare(config)
        training = Training.build(config, hooks, world or self.world, problem, data, proof)
        name = f"job-{number}"
        if world is not None:
            # Each rank has a run of its own, and saves it for itself.
            name = f"{name}-of-{self.world.rank}"
        return Job(task=problem, training=training, folder=self.folder / name)

    def build_alone(
        self, problem: Problem, extensions: Mapping[str, object] | None = None, **changes: Any
    ) -> Job:
        """Build the same run for one process: under the strategy ``single``, in this rank
        alone, on its device.
        """
        from distcore.strategies.single import SingleStrategy

        world = World(rank=0, size=1, local_rank=0, device=self.world.device)
        config: dict[str, Any] = {
            "micro_batch_size": self.global_batch,
            "micro_batch_tokens": None,
            "strategy": "single",
            "strategy_options": {},
            "nproc": 1,
        }
        hooks = Hooks("single", SingleStrategy(), extensions)
        return self.job(problem, hooks, world, **(config | changes))

    def share(self, value: object, patience: float | None = None) -> list[Any]:
        """Return the ``value`` of every rank, any JSON value, in rank order. Every rank calls.

        The values pass through files, because the strategy's own communication is under test.
        Raises TimeoutError if a rank does not call within ``patience`` seconds, by default
        ``PATIENCE``.
        """
        turn = next(self._numbers)
        files = [self.folder / f"share-{turn}-{rank}" for rank in range(self.world.size)]
        write_atomically(files[self.world.rank], json.dumps(value))
        await_true(
            lambda: all(file.exists() for file in files),
            PATIENCE if patience is None else patience,
            "other ranks did not reach the same point",
        )
        return [json.loads(file.read_text()) for file in files]


@dataclass(frozen=True, kw_only=True)
class JobLab:
    """The laboratory of a case that starts its own processes; it runs in the process
    that starts the ranks.
    """

    subject: Subject
    """The strategy under test, with its config."""
    foreign_modules: Callable[[], list[str] | str]
    """Returns the modules of other strategies that a training step imports, or an error line."""
