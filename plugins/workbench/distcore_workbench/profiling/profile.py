"""Measure where the time of a step goes: a table, and traces for
https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from distcore import Progress, Run, StepResult, hookimpl
from distcore.launchers.processes import close_stderr
from distcore_workbench.profiling.phases import PHASES, communication, table

log = logging.getLogger("distcore")


@dataclass
class Profile:
    """Time the phases of some steps, then trace a few more; write ``profile.json`` and
    one trace per rank.

    The timed steps run without the tracer, which would slow them down. On an accelerator they
    wait for the device
    between phases. ``data_wait`` is from the end of a step to the next forward pass:
    choosing and collating rows; ``forward`` and ``backward`` are all micro-batches, with the
    collectives that they wait for; ``optimizer`` is clipping, step and clearing gradients;
    ``logging`` is the sum over ranks at a log line, and the extensions that hear it; ``rest`` is
    schedule, progress and hooks. Communication overlaps with the phases, so it has a column of its
    own and is not added to the sum. Its share of each phase is measured in the traced steps;
    for a backend that communicates outside of ``torch.distributed`` it is unknown. A run of fewer
    steps is profiled as far as they go.
    """

    # it changes no gradient, so strategies that have none before their step take it
    only_looks = True

    wait: int = 5
    """First steps of this process that are not measured: they allocate, compile and
    compare rows between ranks.
    """
    steps: int = 10
    """Steps whose phases are timed."""
    traced: int = 3
    """Steps that are traced after the timed ones."""

    def __post_init__(self) -> None:
        self._done = 0
        self._phase = "rest"
        self._since = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._tracer: profile | None = None
        self._range: record_function | None = None
        self._device = torch.device("cpu")
        self._plan = StepWindows(self.wait, self.steps, self.traced)

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress) -> None:
        """Make do with the steps that there are, and warn if these are too few."""
        self._device = run.world.device
        self._phase, self._since = "data_wait", time.perf_counter()
        left, whole = run.total_steps - progress.step, self._plan
        self._plan = whole.within(left)
        if self._plan is not whole and run.world.is_main:
            log.warning(
                "profile: %d step(s) to train, a whole profile needs %d: %s",
                left,
                whole.end,
                self._plan,
            )

    # Wrappers with tryfirst are the outermost: what other plugins do in a hook counts as part
    # of its phase.
    @hookimpl(wrapper=True, tryfirst=True)
    def train_step(self, run: Run) -> Generator[None, Tensor, Tensor]:
        """Count a strategy's own ``train_step`` as forward; for the default, the two hooks
        below split the passes.
        """
        self._enter("forward")
        answer = yield
        self._enter("rest")
        return answer

    @hookimpl(wrapper=True, tryfirst=True)
    def accumulate(
        self, run: Run, last: bool
    ) -> Generator[None, AbstractContextManager[object], AbstractContextManager[object]]:
        """A micro-batch has arrived: its forward pass begins."""
        self._enter("forward")
        return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def backward(self, run: Run, loss: Tensor) -> Generator[None, Tensor, Tensor]:
        """Time the backward pass."""
        self._enter("backward")
        answer = yield
        self._enter("rest")
        return answer

    @hookimpl(wrapper=True, tryfirst=True)
    def step(self, run: Run) -> Generator[None, StepResult, StepResult]:
        """Time the optimizer step."""
        self._enter("optimizer")
        answer = yield
        self._enter("rest")
        return answer

    @hookimpl(wrapper=True, tryfirst=True)
    def reduce_loss(self, run: Run, values: Tensor) -> Generator[None, Tensor, Tensor]:
        """The loop begins to log."""
        self._enter("logging")
        return (yield)

    @hookimpl(trylast=True)
    def on_log(self, run: Run) -> None:
        """The loop has logged, and waits for data again."""
        self._enter("data_wait")

    @hookimpl(trylast=True)
    def on_step_end(self, run: Run, progress: Progress) -> None:
        """Count the step; start the tracer after the timed steps, write everything
        after the traced ones.
        """
        self._enter("data_wait")
        self._done += 1
        plan = self._plan
        if plan.traced and self._done == plan.wait + plan.steps:
            # else torch's tracer prints to stderr when it starts
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            on_cpu = self._device.type == "cpu"
            activities = {ProfilerActivity.CPU} if on_cpu else supported_activities()  # type: ignore[no-untyped-call]
            self._tracer = profile(activities=activities, acc_events=True)
            with close_stderr():
                self._tracer.start()
        elif self._done == plan.end and self._tracer is not None:
            self._close_range()
            self._tracer.stop()
            self._write(run, self._tracer)
            self._tracer = None

    @hookimpl(trylast=True)
    def on_evaluation_end(self) -> None:
        """Leave the evaluation out of the times."""
        self._since = time.perf_counter()

    @hookimpl(trylast=True)
    def on_checkpoint(self) -> None:
        """Leave the checkpoint out of the times."""
        self._since = time.perf_counter()

    def _enter(self, phase: str) -> None:
        """End the current phase and start ``phase``: add up its time, and mark it in the trace."""
        timed = self._plan.wait <= self._done < self._plan.wait + self._plan.steps
        if timed and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        if timed:
            self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        if self._tracer is not None:
            self._close_range()
            self._range = record_function(f"distcore:{phase}")
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self, run: Run, tracer: profile) -> None:
        """Write this rank's trace; the main rank also writes profile.json, and prints
        the table to stderr.
        """
        out = Path(str(run.config.out))
        tracer.export_chrome_trace(str(out / f"trace-rank{run.world.rank}.json"))
        if not run.world.is_main:
            return
        facts = self._facts(tracer.events() or [], run.world.size)  # type: ignore[no-untyped-call]
        (out / "profile.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        print(
            table(facts),
            f"trace: {out / 'trace-rank0.json'}",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )

    def _facts(self, events: Iterable[Any], world_size: int) -> dict[str, Any]:
        """Return the content of profile.json, times in seconds per step; ``None`` for
        an unknown communication time.
        """
        seconds = {phase: self._seconds[phase] / self._plan.steps for phase in PHASES}
        total = sum(seconds.values())
        shares = communication(events)
        # Shares, because a traced step takes longer than a timed one: times of the two do not go
        # into one table.
        inside = (
            {phase: share * seconds[phase] for phase, share in shares.items()} if shares else None
        )
        # No collective in the trace: a single process has none, several communicate where torch
        # does not see it.
        unseen = 0.0 if world_size == 1 else None
        total_inside = sum(inside.values()) if inside is not None else unseen
        return {
            "steps": self._plan.steps,
            "traced_steps": self._plan.traced,
            "seconds_per_step": seconds | {"communication": total_inside, "total": total},
            "communication_in": inside,
        }


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The steps of a process to skip, to time and to trace, in this order."""

    wait: int
    """First steps, which are not measured."""
    steps: int
    """Steps after ``wait`` to time."""
    traced: int
    """Steps after those to trace; 0: no profile is written."""

    @property
    def end(self) -> int:
        """Steps until the profile is written."""
        return self.wait + self.steps + self.traced

    def within(self, left: int) -> StepWindows:
        """Return the windows for ``left`` steps: these if they fit, else smaller ones."""
        if self.end <= left:
            return self
        if left < 2:
            return StepWindows(0, 0, 0)
        quarter = left // 4
        wait = min(self.wait, quarter)
        traced = min(self.traced, max(1, quarter))
        steps = min(self.steps, left - wait - traced)
        return StepWindows(wait, steps, traced)

    def __str__(self) -> str:
        if not self.traced:
            return "none is written"
        return f"{self.wait} not measured, {self.steps} timed, {self.traced} traced"
