"""A training loop of the user's own: the engine begins and ends each step, the user's
code does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from distcore import registry
from distcore.config import RunConfig
from distcore.distributed.arithmetic import arithmetic_of, attention_of
from distcore.engine.evaluation import evaluate
from distcore.engine.fit import catch_stop_signals, is_due
from distcore.engine.inner_gradients import refuse_inner_gradients
from distcore.engine.loop import Step as EngineStep
from distcore.engine.meter import Meter
from distcore.engine.mode import set_mode
from distcore.engine.trainer import set_up
from distcore.engine.training import Training
from distcore.errors import ConfigError, StoppedError, TaskError, print_uncaught_on_one_line
from distcore.jobs.session_step import OnePass, SessionStep
from distcore.jobs.session_task import Judged, LoopState, Outputs, SessionTask
from distcore.jobs.train import resolve_here
from distcore.plugin.report import Report
from distcore.plugin.strategy.contract import Evaluation, Progress, RankInfo, Run, StepResult
from distcore.plugin.task.step import Step
from distcore.plugin.task.task import Batch, Datasets
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
    "calls session.evaluate()",
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
        self._collate = collate
        self._opened: Training | None = None
        self._progress = Progress()
        self._state = LoopState()
        self._last_evaluation: Evaluation | None = None

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
            self._hooks, world = set_up(resolved, rank_info, own={"session": self._state})
            stack.enter_context(refuse_inner_gradients(self._hooks))
            training = Training.begin(world, resolved, self._hooks, rank_info)
            stack.callback(training.saver.close)
            stack.enter_context(attention_of(world.device, training.data.train.lengths))
            self._hooks.on_run_start(training.run, training.progress, training.task, training.data)
            self._signals = stack.enter_context(catch_stop_signals())
            self._meter = Meter(training.progress, training.run.tally.unlogged)
            self._meter.continue_exactly(training.run)
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

        Raises StoppedError if SIGTERM or Ctrl-C came after the last step.
        """
        with self._stack:
            if kind is not None and not issubclass(kind, StoppedError):
                return
            if kind is None:
                self._meet(LEAVES)
                self._save()
            self._training.saver.wait()
            if kind is None and not self._signals:
                self._hooks.on_run_end(self._run, self._report())
            stopped = self._stopped() if kind is None and self._signals else None
            world = self._run.world
            self._opened = None
            self._hooks.teardown(world)
            if stopped is not None:
                raise stopped

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

    @property
    def state(self) -> dict[str, Any]:
        """What the loop keeps beside the model: JSON values by name, equal on all ranks.

        A checkpoint has them as they are at the end of the loop's body, and a resumed session has
        them back.
        """
        return self._state.values

    def __iter__(self) -> Iterator[Step]:
        """Yield the remaining steps. At the end of the loop's body log, and save a checkpoint, if
        one is due.

        Raises TaskError if the body ends a step without ``step.apply()``, and StoppedError after
        SIGTERM or Ctrl-C, once a checkpoint has the step.
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
                self._end_body(ready, has_loss=step.share is not None)

    def _end_step(
        self,
        loop: Iterator[EngineStep],
        ready: EngineStep,
        result: StepResult,
        share: Tensor | None,
    ) -> None:
        """Let the loop end the step, whose optimizer has stepped; ``share`` is this rank's part of
        its loss, if one is known.
        """
        ready.result = result
        ready.loss = torch.zeros((), device=self._run.world.device) if share is None else share
        done = next(loop)
        self._progress = self._training.progress = done.progress
        self._meter.add(done.loss, done.items)
        self._training.saver.check()

    def _end_body(self, step: EngineStep, has_loss: bool) -> None:
        """Log and save after the loop's body, if it is time; raise StoppedError if a signal came.

        Not in ``step.apply()``: the rest of the body may change the state.
        """
        run, config = self._run, self._run.config
        # Several ranks agree to stop at a log line; a single one stops at once.
        stopping = bool(self._signals) and run.world.size == 1
        if is_due(self._progress.step, config.log_every):
            record, stopping, _ = self._meter.record(run, self._hooks, step, bool(self._signals))
            if not has_loss:
                del record["loss"]
            self._hooks.on_log(run, record)
        if stopping or is_due(self._progress.step, config.save_every):
            self._save()
        if stopping:
            raise self._stopped()

    def _stopped(self) -> StoppedError:
        """Return the error of a session that a signal has ended."""
        done, total = self._progress.step, self._run.total_steps
        line = f"stopped after step {done} of {total}; go on with resume='auto'"
        # Another rank's signal may have stopped this one.
        return StoppedError(line, *(128 + number for number in self._signals[:1]))

    def log(self, **values: float) -> None:
        """Send values of the loop's own to ``metrics.jsonl`` and to trackers, as ``train/NAME``.

        The main rank's are written. No rank waits for another.
        """
        self._hooks.on_log(self._run, {"step": self._progress.step, **values})

    def evaluate(self, rows: Any, outputs: Outputs) -> dict[str, float]:
        """Return the mean of each of ``outputs`` over all rows, each of them once, on every rank.

        ``rows`` are a ``distcore.Dataset`` or a ``torch.utils.data.Dataset`` with a length.
        ``outputs(model, batch)`` returns a value for each row, shape ``(n,)``, or several by name.
        With a moving average of the weights it is the average that is evaluated.
        ``metrics.jsonl`` and trackers have the means as ``eval/NAME``.
        """
        self._meet("calls session.evaluate()")
        training = self._training
        task = Judged(outputs, rows, self._collate)
        dataset = task.dataset()
        data = Datasets(train=dataset, evaluation=dataset, test=dataset)
        with self._meter.pause():
            evaluation = evaluate(training.run, self._hooks, task, dataset, data)
            self._hooks.on_evaluation_end(training.run, self._progress, evaluation)
        self._last_evaluation = evaluation
        return cast("dict[str, float]", dict(evaluation.metrics))

    def _report(self) -> Report:
        """Return what listeners are told at the end of a session, which tests nothing."""
        run, last = self._run, self._last_evaluation
        report = {
            "strategy": self._hooks.name,
            "world_size": run.world.size,
            "device": run.world.device.type,
            "precision": run.config.precision,
            "steps": self._progress.step,
            "samples": self._progress.samples,
            "data": {},
            "evaluation": last.summary() if last else {},
            "evaluations": {},
            "metrics": {},
            "out": str(run.config.out),
        }
        return cast("Report", report)

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
            with self._meter.pause():
                self._training.save(self._meter.unlogged(self._run, self._hooks))
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


def _check_unheard(config: RunConfig) -> None:
    """Raise ConfigError for the first key of the config that nothing in a Session would heed.

    Of extensions it hears those that say ``in_any_loop``, such as trackers.
    """
    unheard = {key: getattr(config, key) for key in UNHEARD}
    # Extensions that are on by default are left out in silence.
    usual = RunConfig().extensions
    for name, setting in config.extensions.items():
        if setting and usual.get(name) != setting and not _is_heard(name):
            unheard[f"extensions.{name}"] = setting
    for key, value in unheard.items():
        if value:
            raise ConfigError(
                f"{key} = {value}: a Session has your loop, and no evaluation, listener or restart;"
                " drop it"
            )


def _is_heard(extension: str) -> bool:
    """Return True for an extension that listens to a Session, too; an unknown one is told later."""
    is_known = ".py:" in extension or extension in registry.offers("extensions")
    return is_known and getattr(registry.load("extensions", extension), "in_any_loop", False)
