"""A run compares its first steps and evaluated rows with one plain process, before it trusts them.

The laws are measured on the project's own problems. A user's module may do what none of them does:
hooks on parameters, weights that forward writes, state of its own. So the main rank keeps a plain
copy of the model and repeats the first global batches on it, uncut, in plain PyTorch (``replay``);
a difference ends the run. Nothing is paid after that.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distcore import checkpoint
from distcore.config import RunConfig
from distcore.distributed.agreement import broadcast_from_main, on_all_ranks
from distcore.distributed.devices import free_memory, held_memory, peak_memory, reset_peak
from distcore.engine.evaluation import first_micro_batch, forward_all
from distcore.engine.loop import Step
from distcore.engine.replay import (
    PlainCopy,
    Replayed,
    plain_outputs,
    replay,
    untouched_generators,
    without_gradient_hooks,
)
from distcore.errors import CheckpointError, DistcoreError, TaskError
from distcore.launchers.processes.failures import one_line
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.contract import Progress, Run, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.outputs import Collected, gather_leaders
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import Datasets, Task

log = logging.getLogger("distcore")

STEPS = 2
"""Optimizer steps that are proved."""
MOST_SECONDS = 20.0
"""Longest replay, in seconds, that ``prove: auto`` takes upon itself."""
PART_OF_MEMORY = 0.25
"""Part of the free memory that the copy and its replay may take under ``prove: auto``."""
COPIES = 6
"""Sets of fp32 weights in a replay: weights, gradients, two moments, and two copies to compare."""
ADVICE = "--prove off trains without this proof"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Largest relative differences of a right run from one plain process, by what is compared."""

    loss: float
    """Of the mean loss of a step."""
    norm: float
    """Of the norm of its gradient."""
    buffer: float
    """Of a buffer, over its change."""
    update: float
    """Of all trained weights, over their change."""
    outputs: float
    """Of the outputs of evaluated rows, over the largest."""


BOUNDS = {
    # Measured over right and wrong jobs, which lie factors of 235 to 16,000 apart: docs/laws.md.
    "fp32": Bounds(loss=1e-4, norm=1e-4, buffer=1e-3, update=3e-3, outputs=1e-3),
    # The update of a right run in bf16 is 2.4e-2 apart, as Adam steps by the sign of noise.
    "bf16": Bounds(loss=1e-3, norm=1e-3, buffer=5e-2, update=math.inf, outputs=5e-2),
}
"""Bounds by precision; other precisions are not proved."""

ROUNDING = 10
"""A difference shows nothing up to this many times that of another order of rows in one process."""

CAUSES = {
    "loss": (
        "weights that forward writes or reads as numbers, a child's weight read in its parent's"
        " forward (larger units of sharding may do: strategy_options.wrap), random numbers of"
        " its own"
    ),
    "norm": (
        "hooks on parameters, gradients with respect to inputs, a loss that bypasses model(...)"
    ),
    "update": (
        "hooks on parameters, weights that forward writes, attributes that the optimizer reads"
    ),
    "buffer": "state that forward updates",
    "outputs": (
        "state that differs between training and evaluation, weights that forward writes, a child's"
        " weight read in its parent's forward (larger units of sharding may do:"
        " strategy_options.wrap)"
    ),
}
"""Known causes of a difference, by what differs."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a run is from one plain process."""

    loss: float = 0.0
    """Largest relative difference of a step's mean loss."""
    norm: float = 0.0
    """Largest relative difference of a step's gradient norm."""
    update: float = 0.0
    """Of all trained weights together: L2 of the difference over L2 of their change."""
    buffer: float = 0.0
    """Largest difference of a buffer, or of a frozen weight that forward moves, over its change.

    It is infinite if a buffer of integers differs at all.
    """
    names: dict[str, str] = field(default_factory=dict)
    """The tensor that differs most, for ``update`` and ``buffer``."""

    def beyond(self, bounds: Bounds) -> str:
        """Return the figure that is beyond its bound; empty if none is. A NaN is."""
        for figure in ("buffer", "loss", "norm", "update"):
            if not getattr(self, figure) <= getattr(bounds, figure):
                return figure
        return ""

    @property
    def largest(self) -> float:
        """The largest difference of loss and norm, for the line of a run that is proved."""
        return max(self.loss, self.norm)


class Proof:
    """The proof of one run; every rank has one and calls alike, the main rank has the copy."""

    def __init__(self, config: RunConfig, task: Task, hooks: Hooks, world: World) -> None:
        """Begin before the model is built."""
        self._bound = BoundTask.wrap(task)
        self._why_not = why_not(config, self._bound, hooks.capabilities)
        self._wanted = config.prove != "off"
        self._copies = world.is_main and self._wanted and not self._why_not
        self._plain: PlainCopy | None = None
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._began = 0.0
        self._memory_before = 0
        self._peak_without_copy = peak_memory(world.device)
        self._evaluated_rows = np.empty(0, dtype=np.int64)
        self._steps = STEPS
        self._changers = hooks.changers
        self._evaluation_writes: set[str] = set()
        self.facts: dict[str, Any] = {
            "steps": 0,
            "why": self._why_not if self._wanted else "not asked for",
        }
        """The entry ``proof`` of the report."""

    def keep(self, config: RunConfig, data: Datasets, built: nn.Module) -> None:
        """Copy the model that was just built, before the strategy touches it.

        ``config`` is complete, and ``data`` are the datasets as the task prepared them.
        """
        if not self._copies:
            return
        plain = PlainCopy(config, self._bound, data)
        try:
            plain.build(built)
        except Exception as error:  # any class: a second call of the task's code may fail anyhow
            self._why_not = f"the model cannot be built a second time: {_line_of(error)}"
        else:
            self._plain = plain

    def start(self, run: Run, hooks: Hooks, data: Datasets, progress: Progress) -> None:
        """Prove the first rows of the evaluation; decide whether steps follow.

        Every rank calls, before the first step.
        """
        if not self._wanted:
            return
        if run.config.prove == "auto" and run.total_steps <= STEPS:
            self._end()
            self.facts = {
                "steps": 0,
                "why": "no step follows those that would be proved; --prove on proves them",
            }
            return
        if progress.step:
            self._why_not = "the run goes on from a checkpoint"
        elif not self._why_not:
            self._why_not = self._too_large(run)
        self._agree(run, hooks)
        self._steps = min(STEPS, run.total_steps)
        if self._wanted:
            with self._uncounted(run, then="starting"):
                self._prove_evaluation(run, hooks, data)
        self._began = time.perf_counter()
        self._memory_before = held_memory(run.world.device)

    def note(self, run: Run, hooks: Hooks, step: Step) -> None:
        """Take a step of the run; after the last that is proved, compare.

        Every rank calls after each of the first steps.

        Raises TaskError, one line, on all ranks if the run differs from one plain process.
        """
        if not self._wanted:
            return
        loss = step.loss.detach().double()
        share = loss.reshape(1).to(run.world.device)
        # Ranks of one data shard have the same share: its leader alone counts.
        mine = share if run.world.is_shard_leader else torch.zeros_like(share)
        total = hooks.reduce_loss(run, mine)
        self._losses.append(float(total) / run.loss_multiplier)
        norm = step.result.grad_norm
        self._norms.append(math.nan if norm is None else float(norm))
        with self._uncounted(run, then="data"):
            if step.progress.step == 1:
                self._why_not = self._why_not or self._too_slow(run)
                self._agree(run, hooks)
            if self._wanted and step.progress.step == self._steps:
                self._compare(run, hooks, step.progress)
                self._end()

    def _end(self) -> None:
        """Prove no further steps, and free the copy."""
        self._wanted = False
        self._plain = None

    @contextmanager
    def _uncounted(self, run: Run, then: str) -> Iterator[None]:
        """Keep time and memory of the proof out of the run's figures.

        The time is part of the start; after the ``with`` block the run is in phase ``then``.
        """
        device = run.world.device
        copy = 0
        if self._plain is not None and device.type == "cpu":
            copy = self._plain.nbytes  # it waits in main memory
        peak = max(self._peak_without_copy, peak_memory(device) - copy)
        run.tally.enter("starting")
        try:
            yield
        finally:
            if "seconds" in self.facts:  # the steps were repeated
                self.facts["bytes"] = max(0, peak_memory(device) - peak)
            reset_peak(device, peak)
            run.tally.enter(then)

    def _agree(self, run: Run, hooks: Hooks) -> None:
        """Let the main rank's reason count on all ranks, and say it once."""
        self._why_not = broadcast_from_main(run, hooks, self._why_not)
        if not self._why_not:
            return
        self._end()
        self.facts = {"steps": 0, "why": self._why_not}
        if run.world.is_main:
            level = logging.WARNING if run.config.prove == "on" else logging.INFO
            line = "proof: the first steps are not compared with one plain process: %s"
            log.log(level, line, self._why_not)

    def _too_large(self, run: Run) -> str:
        """Return why the replay would take too much memory; ``prove: on`` insists on it."""
        if run.config.prove == "on" or self._plain is None:
            return ""
        elements = 0
        for model in self._plain.models:
            elements += sum(parameter.numel() for parameter in model.parameters())
        needed = COPIES * elements * 4
        allowed = PART_OF_MEMORY * free_memory(run.world.device)
        if needed <= allowed:
            return ""
        return (
            f"it would take {needed / 2**20:,.0f} MiB, and {allowed / 2**20:,.0f} are the bound"
            " here; --prove on insists"
        )

    def _too_slow(self, run: Run) -> str:
        """Return why the replay would take too much time, or memory for activations.

        Both follow from the cost of the first step.
        """
        if not run.world.is_main or self._plain is None:
            return ""
        # One process computes what all data shards did, in as many times the time.
        seconds = (time.perf_counter() - self._began) * run.world.shards * self._steps
        if seconds > run.config.timeout / 2:
            return (
                f"it would take about {seconds:,.0f} s, and other ranks wait {run.config.timeout}"
                " s; raise timeout"
            )
        if run.config.prove == "on":
            return ""
        if seconds > MOST_SECONDS:
            return (
                f"it would take about {seconds:,.0f} s, and {MOST_SECONDS:.0f} are the bound;"
                " --prove on insists"
            )
        # Micro-batches are there to bound activations: the replay has those of the whole global
        # batch.
        parts = run.world.shards * run.accumulation
        if parts > 1:
            grown = max(0, peak_memory(run.world.device) - self._memory_before)
            needed = grown * parts
            if needed > 2 * PART_OF_MEMORY * free_memory(run.world.device):
                return f"its activations could take {needed / 2**20:,.0f} MiB; --prove on insists"
        return ""

    def _prove_evaluation(self, run: Run, hooks: Hooks, data: Datasets) -> None:
        """Compare the outputs of the first evaluated rows of the main rank."""
        dataset = data.evaluation
        if not len(dataset):
            return
        self._evaluated_rows = first_micro_batch(run, hooks, dataset).indices
        forward = self._bound.evaluation.of_run(run)
        [seen] = forward_all(run, hooks, dataset, forward, sanity=True)
        if run.capabilities.ranks_per_shard > 1:
            seen = gather_leaders(run, hooks, seen, self._evaluated_rows)
        check = partial(self._check_outputs, run, seen) if run.world.is_main else None
        on_all_ranks(run, hooks, "proof", check)
        if self._plain is not None:
            # The steps before the next comparison need the device's memory.
            self._plain.to(torch.device("cpu"))

    def _check_outputs(self, run: Run, seen: Collected) -> None:
        """Raise TaskError if the outputs ``seen`` in the run differ from those of the copy.

        A warning, if one plain process has no outputs to compare with.
        """
        assert self._plain is not None
        rows = self._evaluated_rows
        try:
            with untouched_generators(), torch.no_grad():
                expected, draws = self._plain_outputs(run, rows)
                again, _ = self._plain_outputs(run, rows)
        except DistcoreError:
            raise
        except Exception as error:
            # Any class: code of the task that runs in a way it was not written for.
            log.warning(
                "proof: evaluated rows are not compared: one plain process fails: %s",
                _line_of(error),
            )
            return
        precision: str = run.config.eval_precision
        if precision == "same":
            precision = run.config.precision
        bound = bounds_of(precision, self._plain.model).outputs
        worst, name = 0.0, ""
        for key, value in expected.items():
            difference = math.inf
            if key in seen.outputs:
                difference = _difference_of_outputs(seen.outputs[key], value)
            if not difference <= worst:  # also if it is NaN
                worst, name = difference, key
        if worst <= bound:
            return
        if self._changers:
            reason = self._changers[0]
        elif draws:
            reason = "the evaluation draws random numbers"
        elif not all(
            _difference_of_outputs(again[key], expected[key]) <= bound for key in expected
        ):
            reason = "the evaluation does not repeat itself"
        else:
            raise TaskError(self._message(run, "outputs", worst, bound, name))
        log.warning("proof: evaluated rows are not compared: %s", reason)

    def _plain_outputs(self, run: Run, rows: np.ndarray) -> tuple[dict[str, Tensor | Ragged], bool]:
        """Return the floating-point outputs of evaluation rows, by the copy in one process.

        And True if it drew random numbers.
        """
        assert self._plain is not None
        plain = self._plain
        outputs, draws = plain_outputs(plain, run, rows)
        self._evaluation_writes |= set(plain.changed())
        plain.reset()
        floats = {
            name: value for name, value in outputs.items() if _values(value).is_floating_point()
        }
        return floats, draws

    def _compare(self, run: Run, hooks: Hooks, progress: Progress) -> None:
        """Repeat the steps on the main rank and compare; TaskError on all ranks if they differ."""
        folder = Path(str(run.config.out)) / "proof"
        try:
            weights = _weights(run, hooks, progress, folder)
        except CheckpointError as error:
            self._why_not = f"the weights cannot be read: {error}"
            self._agree(run, hooks)
            return
        conclude = partial(self._conclude, run, weights) if run.world.is_main else None
        try:
            on_all_ranks(run, hooks, "proof", conclude)
        finally:
            if run.world.is_main:
                shutil.rmtree(folder, ignore_errors=True)

    def _conclude(self, run: Run, weights: Path) -> None:
        """Compare, and find the reason of a difference.

        Logs a warning if one plain process has no result to compare with, else raises TaskError.
        """
        assert self._plain is not None
        plain = self._plain
        began = time.perf_counter()
        bounds = bounds_of(run.config.precision, plain.model)
        try:
            state = checkpoint.read_tensors(weights, ("model",))
            expected = replay(plain, run, self._steps)
            distance = difference(self._losses, self._norms, state, expected, plain)
            if distance.beyond(bounds):
                distance = self._cut_alike(run, state, bounds) or distance
            figure = distance.beyond(bounds)
            reason = self._reason(run, expected, bounds, distance) if figure else ""
        except DistcoreError:
            raise
        except Exception as error:
            # Any class: code of the task that runs in a way it was not written for.
            self._give_up(f"the steps cannot be repeated in one process: {_line_of(error)}")
            return
        seconds = time.perf_counter() - began
        figures = asdict(distance)
        del figures["names"]
        rounded_seconds = round(seconds, 2)
        self.facts = {"steps": self._steps, "why": reason, "seconds": rounded_seconds, **figures}
        if not figure:
            steps = f"{self._steps} step{'s' * (self._steps > 1)}"
            log.info(
                "proof: first %s proved equal to one plain process within %.0e",
                steps,
                distance.largest,
            )
        elif reason:
            self.facts["steps"] = 0
            log.warning("proof: the first steps are not proved: %s", reason)
        else:
            error_of_figure = getattr(distance, figure)
            bound = getattr(bounds, figure)
            name = distance.names.get(figure, "")
            habits = str(expected.habits)
            raise TaskError(self._message(run, figure, error_of_figure, bound, name, habits))

    def _cut_alike(
        self, run: Run, state: Mapping[str, Tensor], bounds: Bounds
    ) -> Difference | None:
        """Return how far the run is from one plain process with its micro-batches.

        In half precision a row rounds otherwise next to longer rows. That the cut does nothing else
        shows in fp32. ``None`` if it does, or if the run differs from this process, too.
        """
        assert self._plain is not None
        plain = self._plain
        if run.config.precision == "fp32" or plain.task.losses.whole_batch:
            return None
        expected = replay(plain, run, self._steps, "micro-batches")
        distance = difference(self._losses, self._norms, state, expected, plain)
        if distance.beyond(bounds):
            return None
        whole = replay(plain, run, self._steps, "whole", "fp32")
        cut = replay(plain, run, self._steps, "micro-batches", "fp32")
        return None if between(cut, whole, plain).beyond(BOUNDS["fp32"]) else distance

    def _give_up(self, why: str) -> None:
        self.facts = {"steps": 0, "why": why}
        log.warning("proof: the first steps are not proved: %s", why)

    def _reason(self, run: Run, expected: Replayed, bounds: Bounds, distance: Difference) -> str:
        """Return why the job has no result to compare with; empty if it has one.

        It is found in plain PyTorch alone.
        """
        assert self._plain is not None
        plain = self._plain
        if self._changers:
            return f"{self._changers[0]}, and one plain process has no extensions"
        if not all(map(math.isfinite, expected.losses)):
            return "the loss of one plain process is not a finite number"
        again = replay(plain, run, self._steps)
        figure = between(again, expected, plain).beyond(bounds)
        if figure:
            return (
                f"one plain process does not repeat itself: its {figure} is another the second time"
            )
        is_buffer = distance.beyond(bounds) == "buffer"
        name = distance.names["buffer"]
        if is_buffer and name in self._evaluation_writes:
            return (
                f"an evaluation changes {_kind(plain, name)} {name!r}, so results follow from how"
                " often a run evaluates: change it in training alone (self.training)"
            )
        if rounds := self._precision_rounds(run, expected, bounds, distance):
            return rounds
        if expected.draws and (run.world.shards > 1 or run.accumulation > 1):
            return (
                f"{expected.draws} draws random numbers outside of dropout by row, so results"
                " follow from ranks and micro-batches; distcore.row_random in at(epoch) of the"
                " dataset draws by row"
            )
        mixes_rows = partial(self._mixes_rows, run, expected, bounds)
        only_rounds = partial(self._only_rounds, run, expected, bounds, distance)
        # A buffer may be such as a queue, whose order is more than rounding.
        if is_buffer:
            return mixes_rows() or only_rounds()
        return only_rounds() or mixes_rows()

    def _precision_rounds(
        self, run: Run, expected: Replayed, bounds: Bounds, distance: Difference
    ) -> str:
        """Return the sentence about a job in which rows meet, as in batch normalization, and whose
        precision alone moves each figure about as far from that of fp32 as the run moved it.

        Without this, a run with statistics over all ranks would be told that it depends on its cut:
        there is no plain process with its micro-batches and with these statistics.
        """
        assert self._plain is not None
        plain = self._plain
        precision = run.config.precision
        if precision == "fp32":
            return ""
        whole, halves = (
            replay(plain, run, self._steps, cut, "fp32") for cut in ("whole", "halves")
        )
        if not between(halves, whole, plain).beyond(BOUNDS["fp32"]):
            return ""
        rounded = between(expected, whole, plain)
        for what in ("buffer", "loss", "norm", "update"):
            apart, moved = getattr(distance, what), getattr(rounded, what)
            is_equal = apart <= getattr(bounds, what)
            if not is_equal and not apart <= ROUNDING * moved < math.inf:
                return ""
        what = distance.beyond(bounds)
        return (
            f"{precision} alone moves its {what} by {getattr(rounded, what):.0e} from that of fp32,"
            f" and the run moved it by {getattr(distance, what):.0e}"
        )

    def _only_rounds(
        self, run: Run, expected: Replayed, bounds: Bounds, distance: Difference
    ) -> str:
        """Return the sentence about a job that rounding alone moves about as far as the run."""
        assert self._plain is not None
        reordered = replay(self._plain, run, self._steps, "backwards")
        figure = distance.beyond(bounds)
        by_rounding = getattr(between(reordered, expected, self._plain), figure)
        by_run = getattr(distance, figure)
        if not by_run <= ROUNDING * by_rounding < math.inf:
            return ""
        return (
            f"rounding alone moves its {figure} by {by_rounding:.0e} where the rows of a batch come"
            f" in another order, and the run moved it by {by_run:.0e}"
        )

    def _mixes_rows(self, run: Run, expected: Replayed, bounds: Bounds) -> str:
        """Return the sentence about a job that depends on how one plain process cuts a batch."""
        assert self._plain is not None
        plain = self._plain
        is_cut = run.world.shards > 1 or run.accumulation > 1
        if plain.task.losses.whole_batch or not is_cut:
            return ""
        halved = between(replay(plain, run, self._steps, "halves"), expected, plain)
        figure = halved.beyond(bounds)
        if not figure:
            return ""
        moved = getattr(halved, figure)
        hooked = expected.habits.hooked
        if hooked and self._only_hooks_mix(run, bounds):
            raise TaskError(
                f"proof: the hook on the gradient of {hooked!r} is not linear:"
                " called once in each micro-batch on each rank, it has another result than for the"
                f" whole gradient (its {figure} moves by {moved:.0e}); change the"
                " whole gradient in an extension's step(), or have one rank and one micro-batch a"
                f" step; {ADVICE}"
            )
        if figure == "buffer":
            name = halved.names["buffer"]
            return (
                "one plain process depends on how it cuts a batch: forward updates"
                f" {_kind(plain, name)} {name!r}, once in each micro-batch"
            )
        return (
            f"one plain process depends on how it cuts a batch (in two, its {figure} moves by"
            f" {moved:.0e}): a row's loss depends on other rows of its micro-batch,"
            " as with batch normalization; a loss over the whole batch is batch_loss()"
        )

    def _only_hooks_mix(self, run: Run, bounds: Bounds) -> bool:
        """Return True if one plain process without hooks on gradients may cut a batch anyhow."""
        assert self._plain is not None
        plain = self._plain
        with without_gradient_hooks(plain.model):
            whole = replay(plain, run, self._steps)
            halves = replay(plain, run, self._steps, "halves")
        return not between(halves, whole, plain).beyond(bounds)

    def _message(
        self, run: Run, figure: str, error: float, bound: float, name: str, habits: str = ""
    ) -> str:
        """Return the line that ends a run which differs.

        ``habits``: what the job was seen to do that can be the cause.
        """
        subject = {
            "loss": "the loss",
            "norm": "the gradient's norm",
            "update": f"the change of the weights, most in {name!r},",
            "buffer": f"{_kind(self._plain, name)} {name!r}",
            "outputs": f"the output {name!r} of the first evaluated rows",
        }[figure]
        when = "before step 1" if figure == "outputs" else f"after step {self._steps}"
        ranks = f"{run.world.size} rank{'s' * (run.world.size > 1)}"
        cut = f"{run.accumulation} micro-batch{'es' * (run.accumulation > 1)} a step"
        under = f"under {run.config.strategy!r} on {ranks}, {cut}"
        cause = f"here {habits}" if habits else f"known to do that: {CAUSES[figure]}"
        return (
            f"proof: {when} {subject} differs from that of one plain process by {error:.1e} (bound"
            f" {bound:.0e}), {under}; {cause}; another strategy may train it, and {ADVICE}"
        )


def why_not(config: RunConfig, task: BoundTask, capabilities: Capabilities) -> str:
    """Return why a run cannot be compared with one plain process; empty if it can."""
    if task.has("train_step"):
        return "the task makes its own steps"
    if "gradient" in capabilities.exempt:
        return f"strategy {config.strategy!r} does not promise the whole gradient"
    if "schedule" in capabilities.owns:
        return f"strategy {config.strategy!r} has a schedule of its own"
    if config.precision not in BOUNDS:
        return f"--precision {config.precision} skips steps and rounds too much"
    if config.precision != "fp32" and "precision" in capabilities.owns:
        return f"strategy {config.strategy!r} keeps its weights in {config.precision}"
    if config.eval_precision not in ("same", *BOUNDS):
        return f"--eval-precision {config.eval_precision} rounds too much"
    return ""


def bounds_of(precision: str, model: nn.Module) -> Bounds:
    """Return the bounds of a run: those of half precision if weights of the model have it."""
    has_half_weights = any(
        parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()
    )
    return BOUNDS["bf16" if has_half_weights else precision]


def difference(
    losses: list[float],
    norms: list[float],
    state: Mapping[str, Tensor],
    expected: Replayed,
    plain: PlainCopy,
) -> Difference:
    """Return how far losses, norms and a state by checkpoint names are from a replay."""
    trained = {
        name for name, parameter in plain.model.named_parameters() if parameter.requires_grad
    }
    parameters = {name for name, _ in plain.model.named_parameters()}
    errors: dict[str, float] = {}
    changes: dict[str, float] = {}
    buffers: dict[str, float] = {}
    for name, value in expected.state.items():
        saved = state.get(f"model/{name}")
        if saved is None:  # no checkpoint has it: a frozen base, or a buffer that is not persistent
            continue
        before = plain.start.get(name, value)  # a forward pass may make a buffer
        if name in trained:
            errors[name] = _norm(_wide(saved) - _wide(value))
            changes[name] = _norm(_wide(value) - _wide(before))
        elif name not in parameters or not torch.equal(value, before):
            buffers[name] = _error_of_buffer(saved, value, before)
    error = math.hypot(*errors.values())
    change = math.hypot(*changes.values())
    worst_buffer = max(buffers, key=lambda name: _rank(buffers[name]), default="")
    worst_weight = max(errors, key=lambda name: _rank(errors[name]), default="")
    return Difference(
        loss=_largest(losses, expected.losses),
        norm=_largest(norms, expected.norms),
        update=error / change if change else error,
        buffer=buffers.get(worst_buffer, 0.0),
        names={"update": worst_weight, "buffer": worst_buffer},
    )


def between(one: Replayed, other: Replayed, plain: PlainCopy) -> Difference:
    """Return how far one replay is from another."""
    state = {f"model/{name}": value for name, value in one.state.items()}
    return difference(one.losses, one.norms, state, other, plain)


def _weights(run: Run, hooks: Hooks, progress: Progress, folder: Path) -> Path:
    """Write the weights as a checkpoint would have them; return the path. Every rank calls."""
    only_weights = replace(run, optimizer=None, ema=None)
    if run.world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    return checkpoint.save(only_weights, hooks, progress, folder, {})


def _largest(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference, without values that a strategy does not report."""
    errors = []
    for value, other in zip(values, expected, strict=True):
        is_reported = not math.isnan(value) or math.isnan(other)
        if is_reported:
            errors.append(_relative(value, other))
    return max(errors, key=_rank, default=0.0)


def _relative(value: float, expected: float) -> float:
    """Return the relative error of a number; 0 if both are equal, also if both are 0."""
    error = abs(value - expected)
    return error / max(abs(expected), 1e-12) if error else 0.0


def _error_of_buffer(saved: Tensor, value: Tensor, before: Tensor) -> float:
    """Return the error of a buffer over its change.

    It is infinite for other whole numbers: fp64 would round large ones.
    """
    if saved.shape != value.shape:
        return math.inf
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0 if torch.equal(saved.cpu(), value) else math.inf
    error = _norm(_wide(saved) - _wide(value))
    change = _norm(_wide(value) - _wide(before))
    return error / (change or _norm(_wide(value)) or 1.0)


def _difference_of_outputs(output: Tensor | Ragged, expected: Tensor | Ragged) -> float:
    """Return the largest difference of outputs over the largest output."""
    mine, other = _values(output), _values(expected)
    if mine.shape != other.shape:
        return math.inf
    if not mine.numel():
        return 0.0
    mine, other = _wide(mine), _wide(other)
    are_same = (mine == other) | (mine.isnan() & other.isnan())  # infinities and fillers, too
    differences = (mine - other).abs().masked_fill(are_same, 0.0)
    finite = other.abs()[other.isfinite()]
    scale = float(finite.max()) if finite.numel() else 1.0
    return float(differences.max()) / (scale or 1.0)


def _kind(plain: PlainCopy | None, name: str) -> str:
    """Return the words for a tensor that no optimizer steps."""
    frozen = plain is not None and name in dict(plain.model.named_parameters())
    return "the frozen weight" if frozen else "the buffer"


def _values(output: object) -> Tensor:
    """Return the numbers of an output; of a ragged one, those of all rows."""
    assert isinstance(output, Tensor | Ragged)  # the task's face has checked it
    return output.values if isinstance(output, Ragged) else output


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp64, or complex128, on the CPU."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().cpu().to(wide)


def _norm(tensor: Tensor) -> float:
    """Return the L2 norm; 0 for a tensor without elements."""
    return float(torch.linalg.vector_norm(tensor)) if tensor.numel() else 0.0


def _rank(value: float) -> tuple[bool, float]:
    """Order differences so that a NaN is the largest."""
    return math.isnan(value), value


def _line_of(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", limit=200)
