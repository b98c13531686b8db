"""Mean loss and speed between two log lines, without waiting for the device in every step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from distcore.distributed.devices import peak_memory
from distcore.engine.loop import Step
from distcore.model.optim import logged_rate
from distcore.plugin.strategy.contract import Progress, Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.tally import Request

log = logging.getLogger("distcore")


class Meter:
    """Adds up training time, without evaluations and saves, and the loss between log lines."""

    def __init__(self, progress: Progress, unlogged: tuple[float, int] = (0.0, 0)) -> None:
        """Start the clock at ``progress``.

        ``unlogged`` is the sum of the loss since the last log line before it, and its items.
        """
        self.seconds = 0.0
        """Training time of this process, in seconds."""
        self.began = self._last = progress
        """Where this process started to train."""
        self._seconds_at_last = 0.0
        self._loss: Tensor | float = 0.0
        self._loss_before, self._items = unlogged
        self._losses: list[Tensor] = []
        self.lost_since: int | None = None
        """First of the latest steps whose losses are not finite on some rank.

        ``None`` if the latest loss is finite.
        """
        self._running_since = time.perf_counter()

    def add(self, loss: Tensor, items: int) -> None:
        """Add the loss of one step, as ``steps`` yields it: a mean over ``items``.

        It stays on the device: reading it would wait for the step.
        """
        self._loss = loss.double() * items + self._loss
        self._items += items
        self._losses.append(loss)

    def continue_exactly(self, run: Run) -> None:
        """Under ``exact``, let the first data shard go on with the sum from before the start.

        It has the whole loss of each step, so that the sum is then added in the same order, and
        has the same bits, as without an interruption.
        """
        if run.config.exact is not None:
            self._loss = self._loss_before if run.world.shard == 0 else 0.0
            self._loss_before = 0.0

    def unlogged(self, run: Run, hooks: Hooks) -> tuple[float, int]:
        """Return the sum of the loss since the last log line, and its items; every rank calls."""
        if not self._items:  # the same on every rank
            return 0.0, 0
        total = hooks.reduce_loss(run, self._own_loss(run)[None]).item()
        return total / run.loss_multiplier + self._loss_before, self._items

    def _own_loss(self, run: Run) -> Tensor:
        """Return this rank's part of the loss since the last log line; 0 if another one has it."""
        loss = self._loss if run.world.is_shard_leader else 0.0
        return torch.as_tensor(loss, dtype=torch.float64, device=run.world.device)

    def record(
        self, run: Run, hooks: Hooks, step: Step, requested: bool
    ) -> tuple[dict[str, float], bool, frozenset[Request]]:
        """Return the values to log, True if a stop is ``requested`` on any rank, and listeners'
        requests.

        Every rank calls.

        The record has the mean loss and the means of logged values, over all ranks since the last
        record, the speed in samples per second, and the peak memory of this rank. One sum over
        ranks serves all, which saves a collective.
        """
        progress = step.progress
        loss = self._own_loss(run)
        stop_request = loss.new_tensor(float(requested))
        requests, means, (total, stop_requests) = agree_on_tally(run, hooks, loss, stop_request)
        if math.isfinite(total):
            self.lost_since = None
            self._losses = []
        else:
            self.find_lost(run, hooks, progress)
        self._tick()
        seconds = self.seconds - self._seconds_at_last
        record: dict[str, float] = {
            "step": progress.step,
            "epoch": run.epochs_at(progress),
            "samples": progress.samples,
            "loss": (total / run.loss_multiplier + self._loss_before) / max(1, self._items),
            "lr": logged_rate(run.optimizer, float(run.config.lr)) if run.optimizer else 0.0,
            "samples_per_second": (progress.samples - self._last.samples) / seconds,
            "peak_memory_bytes": peak_memory(run.world.device),
        }
        record |= means
        if run.loss_scale is not None:
            record["skipped_steps"] = progress.skipped
            self._say_skipped(run, progress)
        if step.result.grad_norm is not None:
            record["grad_norm"] = float(step.result.grad_norm)
        self._last = progress
        self._seconds_at_last = self.seconds
        self._loss = self._loss_before = 0.0
        self._items = 0
        return record, stop_requests > 0, requests

    def _say_skipped(self, run: Run, progress: Progress) -> None:
        """Log how many steps since the last record changed no weight."""
        skipped = progress.skipped - self._last.skipped
        steps = progress.step - self._last.step
        if skipped and run.loss_scale is not None:
            scale = run.loss_scale.state_dict()["scale"]
            log.warning(
                "fp16: %d of the last %d steps overflowed and changed no weight, and the schedule"
                " waited; the loss scale is now %g",
                skipped,
                steps,
                scale,
            )

    def find_lost(self, run: Run, hooks: Hooks, progress: Progress) -> None:
        """Look for losses that are not finite among those since the last look; all ranks call."""
        lost_here = self.lost_since or 0  # 0: the latest loss is finite
        if self._losses:
            finite = torch.stack(self._losses).isfinite().tolist()
            oldest = progress.step - len(finite) + 1
            finite_steps = [oldest + index for index, is_finite in enumerate(finite) if is_finite]
            if finite[-1]:
                lost_here = 0
            elif finite_steps:
                lost_here = finite_steps[-1] + 1
            else:
                lost_here = lost_here or oldest
            self._losses = []
        mine = torch.tensor([lost_here], device=run.world.device)
        steps_of_ranks = hooks.gather_outputs(run, {"lost": mine})["lost"].tolist()
        self.lost_since = min((step for step in steps_of_ranks if step), default=None)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock inside the ``with`` block."""
        self._tick()
        yield
        self._running_since = time.perf_counter()

    def samples_per_second(self, progress: Progress) -> float:
        """Return the mean training speed of this process, over all ranks."""
        self._tick()
        return (progress.samples - self.began.samples) / self.seconds if self.seconds else 0.0

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._running_since
        self._running_since = now


def agree_on_tally(
    run: Run, hooks: Hooks, *values: Tensor
) -> tuple[frozenset[Request], dict[str, float], list[float]]:
    """Return requests and means of all ranks, and the sums of ``values``; every rank calls.

    ``values`` are float64 scalars.
    """
    from_tally = run.tally.take(run.world.device)
    mine = torch.cat([from_tally, *(value[None] for value in values)])
    summed = hooks.reduce_loss(run, mine).tolist()
    count = len(from_tally)
    return *run.tally.read(summed[:count]), summed[count:]


def agree_on_stop(run: Run, hooks: Hooks, requested: bool) -> bool:
    """Return True if a stop was ``requested`` on any rank; every rank calls."""
    mine = torch.tensor([float(requested)], device=run.world.device)
    ranks_that_request = hooks.reduce_loss(run, mine)
    return bool(ranks_that_request)
