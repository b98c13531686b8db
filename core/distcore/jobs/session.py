"""A training loop of the user's own: the engine begins and ends each step, the user's
code does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.distributed.arithmetic import arithmetic_of, attention_of
from distcore.engine.fit import is_due
from distcore.engine.inner_gradients import refuse_inner_gradients
from distcore.engine.loop import Step as EngineStep
from distcore.engine.mode import set_mode
from distcore.engine.own_step import OwnStep
from distcore.engine.trainer import set_up
from distcore.engine.training import Training
from distcore.errors import ConfigError, TaskError, print_uncaught_on_one_line
from distcore.jobs.train import resolve_here
from distcore.plugin.strategy.contract import Progress, RankInfo, Run, StepResult
from distcore.plugin.task.losses import Loss
from distcore.plugin.task.simple import Simple, given_rows
from distcore.plugin.task.step import Step
from distcore.plugin.task.task import Batch, Datasets, Direction, Losses
from distcore.rank_environment import join
from distcore.resolve.run_folder import check_out

UNHEARD = ("eval_every", "max_restarts", "patience")
"""Keys of a run that evaluates and starts its ranks."""
LEAVES = "leaves the loop"
CALLS = (
    "begins a step",
    "calls step.gradients()",
    "calls step.norm()",
    "calls step.apply()",
    "calls session.mean()",
    "calls session.save()",
    LEAVES,
)
"""What a rank does next in which the others must take part."""


class Session:
    """The strategy, rows, exact sums and checkpoints of ``distcore train``, for a loop
    that the user writes.

    ``with Session(config, model, rows) as session: for step in session: step.gradients(loss);
    step.apply()``. Every rank makes the same calls. A launcher has started the ranks; without one
    there is one.
    """

    _ranks_in_use: ClassVar[bool] = False
    """True while a session of this process has joined other ranks: another one would
    end their process group.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Callable[[], nn.Module],
        rows: Any,
        collate: Callable[[list[Any]], Batch] | None = None,
    ) -> None:
        """Check the config; ``model`` builds the model, after the core has seeded torch.

        ``rows`` is a ``distcore.Dataset``, or a ``torch.utils.data.Dataset`` with a length;
        ``collate`` makes batches of the latter. Raises DistcoreError, one line, for every error
        that the user can correct.
        """
        print_uncaught_on_one_line()
        if isinstance(model, nn.Module) or not callable(model):
            raise TaskError(
                f"Session: model is a {type(model).__name__}; give a function that builds the model"
            )
        _check_unheard(config)
        self._resolved = resolve_here(config, task=SessionTask(model, rows, collate))
        self._rank_info = join(os.environ)
        ranks = self._resolved.config.nproc
        if self._rank_info is None and ranks != 1:
            started = f"start the script by torchrun --nproc-per-node {ranks}"
            raise ConfigError(f"nproc = {ranks}: a Session starts no ranks; {started}")
        self._opened: Training | None = None
        self._progress = Progress()

    def __enter__(self) -> Self:
        """Join the ranks, build the model, and start the run folder or resume from it."""
        resolved, rank_info = self._resolved, self._rank_info or RankInfo()
        if rank_info.size > 1 and Session._ranks_in_use:
            raise TaskError(
                "Session: another one is open on these ranks; leave its `with` block first"
            )
        check_out(resolved.config)
        with ExitStack() as stack:
            if rank_info.size > 1:
                Session._ranks_in_use = True
                stack.callback(setattr, Session, "_ranks_in_use", False)
            stack.enter_context(arithmetic_of(resolved.config))
            self._hooks, world = set_up(resolved, rank_info, listens=False)
            stack.enter_context(refuse_inner_gradients(self._hooks))
            training = Training.begin(world, resolved, self._hooks, rank_info)
            stack.callback(training.saver.close)
            stack.enter_context(attention_of(world.device, training.data.train.lengths))
            self._opened = training
            self._progress = training.progress
            self._began = self._saved = training.progress.step
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Save all unsaved state and leave the process group. After an error do neither: ranks
        may differ in step.
        """
        with self._stack:
            if kind is None:
                self._meet(LEAVES)
                self._save()
                self._training.saver.wait()
                world = self._run.world
                self._opened = None
                self._hooks.teardown(world)

    @property
    def model(self) -> nn.Module:
        """The model as the strategy wraps it."""
        return self._run.model

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints."""
        return self._run.world.is_main

    @property
    def progress(self) -> Progress:
        """Steps, epochs and rows that were done up to the last ``step.apply()``."""
        return self._progress

    def __iter__(self) -> Iterator[Step]:
        """Yield the remaining steps. Raises TaskError if the loop body ends
        a step without ``step.apply()``.
        """
        training, run, hooks = self._training, self._run, self._hooks
        is_open = hooks.capabilities.own_steps and run.config.precision != "fp16"
        with closing(training.steps_by_caller()) as loop:
            while self._progress.step < run.total_steps:
                if self._is_guarded:  # the engine compares rows before the step
                    self._meet("begins a step")
                ready = next(loop)
                set_mode(run, training=True)  # the user's code may have evaluated
                step = (SessionStep if is_open else OnePass)(run, hooks, training.task, ready)
                step.meet = self._meet
                step.ended = partial(self._end_step, loop, ready)
                yield step
                if step.result is None:
                    raise TaskError(
                        f"Session: step {self._progress.step + 1} was left without step.apply()"
                    )

    def _end_step(self, loop: Iterator[EngineStep], ready: EngineStep, result: StepResult) -> None:
        """Let the loop end the step, whose optimizer has stepped; save a checkpoint
        if one is due.
        """
        ready.result = result
        done = next(loop)
        self._progress = self._training.progress = done.progress
        self._training.saver.check()
        if is_due(self._progress.step, self._run.config.save_every):
            self._save()

    def mean(self, share: Tensor) -> float:
        """Return the mean loss over the global batch from this rank's
        ``share``, as ``step.gradients`` returns it.
        """
        self._meet("calls session.mean()")
        run = self._run
        mine = torch.zeros((), device=run.world.device)
        # Other ranks of a data shard have the leader's share again.
        if run.world.is_shard_leader:
            mine = share.detach()
        total = self._hooks.reduce_loss(run, mine.double()[None])
        return total.item() / float(run.loss_multiplier)

    def save(self) -> None:
        """Commit a checkpoint, unless this step already has one."""
        self._meet("calls session.save()")
        self._save()

    def _save(self) -> None:
        if self._saved != self._progress.step:
            self._training.save()
            self._saved = self._progress.step

    @property
    def _is_guarded(self) -> bool:
        """True in the first steps after the session was opened, in which ranks
        compare what they do.
        """
        return self._progress.step < self._began + self._run.config.data_guard_steps

    def _meet(self, call: str) -> None:
        """Raise TaskError on all ranks if one makes another ``call`` than this one; they would
        wait for each other.

        On an accelerator a rank looks in the first steps, and when it leaves: later it would
        wait for the device.
        """
        run, world = self._run, self._run.world
        if world.size == 1:
            return
        mine = torch.zeros(world.size, dtype=torch.float64, device=world.device)
        mine[world.rank] = CALLS.index(call)
        told = self._hooks.reduce_loss(run, mine)
        if call != LEAVES and world.device.type != "cpu" and not self._is_guarded:
            return
        calls = [CALLS[round(number)] for number in told.tolist()]
        if odd := [rank for rank, other in enumerate(calls) if other != calls[0]]:
            raise TaskError(
                f"Session: after step {self._progress.step} rank {odd[0]} {calls[odd[0]]}, and rank"
                f" 0 {calls[0]}; every rank makes the same calls: let all decide by session.mean(),"
                " which is the same on each"
            )

    @property
    def _training(self) -> Training:
        if self._opened is None:
            raise TaskError("Session: is not open; use it in `with Session(...) as session:`")
        return self._opened

    @property
    def _run(self) -> Run:
        return self._training.run


class SessionStep(OwnStep):
    """A step of a session; ``apply`` also ends the step. Implements ``distcore.Step``."""

    meet: Callable[[str], None]
    """Compares the next call with those of the other ranks."""
    ended: Callable[[StepResult], None]
    """Ends the step, once the optimizer has stepped."""

    def forward(self, number: int, loss: Loss | None = None) -> Tensor:
        """Return a micro-batch's share of the mean loss over the global batch."""
        if number == 0:
            self.meet("calls step.gradients()")
        return super().forward(number, loss)

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of all ``tensors`` together, such as gradients, over all ranks."""
        self.meet("calls step.norm()")
        return super().norm(tensors)

    def apply(self) -> None:
        """Clip the gradients, step the optimizer and the schedule, and save a
        checkpoint if one is due.
        """
        if self.result is not None:
            raise TaskError("Session: step.apply() was called twice in one step")
        self.meet("calls step.apply()")
        super().apply()
        assert self.result is not None
        self.ended(self.result)


class OnePass(SessionStep):
    """A step whose gradients the engine holds until ``apply``: the loss is all
    that the user decides.
    """

    _loss: Tensor | None = None

    def gradients(self, loss: Loss | None = None) -> Tensor:
        """Have the engine compute the gradients; return this rank's share of the
        loss. Once per step.
        """
        if self._loss is not None:
            self._refuse()
        self.meet("calls step.gradients()")
        scaled = self._step.scaled(loss or self._task_loss)
        self._loss = self._step.passes(self._run, self._step.micros, scaled)
        return self._loss

    def apply(self) -> None:
        """Clip the gradients, step the optimizer and the schedule, and save a
        checkpoint if one is due.
        """
        if self._loss is None:
            self._refuse()
        super().apply()

    def _refuse(self, *_: object, **__: object) -> Any:
        """Raise TaskError, in place of a method of a step that needs its gradients."""
        config = self._run.config
        who = (
            f"strategy {config.strategy!r} with precision = {config.precision!r} keeps the"
            " gradients"
        )
        raise TaskError(
            f"Session: {who}; call step.gradients(loss) once, then step.apply(), and nothing else"
            " of a step"
        )

    _refused: Any = _refuse
    forward = backward = norm = state = zero = _refused
    parameters = property(_refuse)


class SessionTask(Simple):
    """The task of a session: its rows and its model. The loss comes with each step."""

    metrics: ClassVar[Mapping[str, Direction]] = {}

    def __init__(
        self,
        build: Callable[[], nn.Module],
        rows: Any,
        collate: Callable[[list[Any]], Batch] | None,
    ) -> None:
        self._build, self._rows, self._collate = build, rows, collate

    def collate(self, rows: list[Any]) -> Batch:
        """Return rows as a batch, by the user's function if there is one."""
        return self._collate(rows) if self._collate else super().collate(rows)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the rows as a ``distcore.Dataset``."""
        rows = self._rows
        if not hasattr(type(rows), "batch"):
            rows = given_rows(rows, self)
        return Datasets(train=rows, evaluation=rows, test=rows)

    def model(self) -> nn.Module:
        """Return the model."""
        return self._build()

    def row_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Refuse a step without a loss."""
        raise TaskError(
            "Session: step.gradients() needs your loss: a function of model and batch that returns"
            " a sum"
        )


def _check_unheard(config: RunConfig) -> None:
    """Raise ConfigError for the first key of the config that nothing in a Session would heed."""
    unheard = {key: getattr(config, key) for key in UNHEARD}
    # Extensions that are on by default are left out in silence.
    usual = RunConfig().extensions
    for name, setting in config.extensions.items():
        if usual.get(name) != setting:
            unheard[f"extensions.{name}"] = setting
    for key, value in unheard.items():
        if value:
            raise ConfigError(
                f"{key} = {value}: a Session has your loop, and no evaluation, listener or restart;"
                " drop it"
            )
