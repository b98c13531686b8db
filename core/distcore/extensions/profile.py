"""Measure where the time of a step goes: a table, and traces for https://ui.perfetto.dev or chrome://tracing."""

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
from torch.profiler import ProfilerActivity, profile, record_function

from distcore.plugin.contract import Progress, Run, StepResult
from distcore.plugin.hookspecs import hookimpl

log = logging.getLogger("distcore")
PHASES = ("data_wait", "forward", "backward", "optimizer", "logging", "rest")
"""The parts of a step; together they make up all of its time."""
COLLECTIVES = ("gloo:", "nccl:", "ncclKernel", "ncclDevKernel")
"""How the names of communication events begin in torch's traces, on a CPU (gloo) and on a GPU (nccl)."""

Span = tuple[float, float]
"""Start and end, in microseconds."""


@dataclass
class Profile:
    """Time the phases of some steps, then trace a few more; write ``profile.json`` and one trace per rank.

    The timed steps run without the tracer, which would slow them down. On a GPU they wait for the device between
    phases. Communication overlaps with the phases, so it has a column of its own and is not added to the sum. It is
    measured in the traced steps; for a backend that communicates outside of ``torch.distributed`` it is unknown.
    """

    wait: int = 5
    """First steps of this process that are not measured: they allocate, compile and compare rows between ranks."""
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
        self._on_gpu = False

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Warn if the run is too short for a profile."""
        self._on_gpu = run.world.device.type == "cuda"
        need = self.wait + self.steps + self.traced
        if run.total_steps < need and run.world.is_main:
            log.warning(
                "profile: the run has %d steps, fewer than the %d that the profile needs", run.total_steps, need
            )

    # Wrappers with tryfirst are the outermost: what other plugins do in a hook counts as part of its phase.
    @hookimpl(wrapper=True, tryfirst=True)
    def train_step(self, run: Run) -> Generator[None, Tensor, Tensor]:
        """Count what a strategy runs by itself as forward; where it does not, the two hooks below tell more."""
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
        """Count the step; start the tracer after the timed steps, write everything after the traced ones."""
        self._enter("data_wait")
        self._done += 1
        if self._done == self.wait + self.steps:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's tracer prints to stderr when it starts
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else [])
            self._tracer = profile(activities=activities, acc_events=True)
            self._tracer.start()
        elif self._done == self.wait + self.steps + self.traced and self._tracer is not None:
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
        timed = self.wait <= self._done < self.wait + self.steps
        if timed and self._on_gpu:
            torch.cuda.synchronize()
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
        """Write this rank's trace; the main rank also writes profile.json, and prints the table to stderr."""
        out = Path(str(run.config.out))
        tracer.export_chrome_trace(str(out / f"trace-rank{run.world.rank}.json"))
        if not run.world.is_main:
            return
        facts = self._facts(tracer.events() or [], run.world.size)  # type: ignore[no-untyped-call]
        (out / "profile.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        print(table(facts), f"trace: {out / 'trace-rank0.json'}", sep="\n", file=sys.stderr, flush=True)

    def _facts(self, events: Iterable[Any], world_size: int) -> dict[str, Any]:
        """Return the content of profile.json, times in seconds per step; ``None`` for an unknown communication time."""
        seconds = {phase: self._seconds[phase] / self.steps for phase in PHASES}
        total = sum(seconds.values())
        spans = communication(events)
        inside = {phase: sum(parts) / 1e6 / self.traced for phase, parts in spans.items()} if spans else None
        # No collective in the trace: a single process has none, several communicate where torch does not see it.
        unseen = 0.0 if world_size == 1 else None
        total_inside = sum(inside.values()) if inside is not None else unseen
        return {
            "steps": self.steps,
            "seconds_per_step": seconds | {"communication": total_inside, "total": total},
            "communication_in": inside,
        }


def communication(events: Iterable[Any]) -> dict[str, list[float]] | None:
    """Return the microseconds of communication in each phase, one number per traced occurrence of the phase.

    ``events`` are those of a trace. ``None`` if there is no collective among them.
    """
    spans: list[Span] = []
    phases: dict[str, list[Span]] = {phase: [] for phase in PHASES}
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(COLLECTIVES):
            spans.append(span)
        elif event.name.startswith("distcore:") and event.device_type.name == "CPU":
            phases[event.name.removeprefix("distcore:")].append(span)
    busy = union(spans)
    return {name: [overlap(span, busy) for span in parts] for name, parts in phases.items()} if busy else None


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans, in order of time: collectives that run at the same time count once."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def overlap(span: Span, others: Iterable[Span]) -> float:
    """Return how much of ``span`` is covered by ``others``, which do not overlap each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def table(facts: dict[str, Any]) -> str:
    """Return the table of phases: milliseconds per step, share of the step, milliseconds with a collective running."""
    seconds, inside = facts["seconds_per_step"], facts["communication_in"]
    lines = [f"profile of {facts['steps']} steps, rank 0:    ms/step    share  of it communicating"]
    for phase in (*PHASES, "total"):
        share = f"{seconds[phase] / seconds['total']:.1%}"
        part = inside.get(phase, sum(inside.values())) * 1e3 if inside is not None else None
        shown = f"{part:.2f}" if part is not None else "-"
        lines.append(f"  {phase.replace('_', ' '):<28}{seconds[phase] * 1e3:>10.2f}{share:>9}{shown:>22}")
    return "\n".join(lines)
