"""The first steps of a run again, in plain PyTorch: one process, no strategy, not the core's loop.

The proof of a run compares itself with this, and the kit's reference shares its parts. Of the core
it takes what defines the job: the plan of the rows, the task's loss, the optimizer, the schedule,
and the random numbers of a step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from distcore.config import Clip, RunConfig
from distcore.engine.frozen import frozen_source
from distcore.engine.inner_gradients import hear_inner_gradients
from distcore.engine.loader import to_device
from distcore.engine.precision import DTYPES, autocast_for
from distcore.engine.seeding import seed_step
from distcore.model.dropout import CountsDraws
from distcore.model.hooks_on_gradients import hooked_parameters
from distcore.model.model_source import base_source, model_source, set_up_module
from distcore.model.optim import optimizer_factory, scheduler_for
from distcore.model.row_dropout import RowMasks, other_generators, use_row_masks
from distcore.model.running_statistics import count_each_batch_once
from distcore.plugin.batching.columns import read
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.datasets import counts_of, padded_rows
from distcore.plugin.task.frozen import INITIAL
from distcore.plugin.task.losses import Loss, SumOfRows, split_terms
from distcore.plugin.task.per_epoch import in_epoch
from distcore.plugin.task.phases import parameters_by_phase
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import Batch, Dataset, Datasets, Task
from distcore.plugin.task.task_evaluation import Evaluate
from distcore.resolve.complete import computed_plainly

Cut = Literal["whole", "halves", "backwards", "micro-batches"]
"""How the rows of a step pass through the model: as one batch, in two, as one in the opposite
order, or as in the run.

Another order changes a result by rounding alone. What mixes rows has another result in two parts.
"""


@dataclass
class Habits:
    """What a replay saw a job do beyond reading weights in forward and one backward pass."""

    writes: str = ""
    """The first weight that forward writes."""
    slopes: bool = False
    """True if the loss takes gradients itself."""
    hooked: str = ""
    """The first parameter with a hook on its gradient."""

    def __str__(self) -> str:
        """Return them in words; empty if there are none."""
        habits = []
        if self.writes:
            habits.append(f"forward writes the weight {self.writes!r}")
        if self.slopes:
            habits.append("the loss takes gradients itself (torch.autograd.grad)")
        if self.hooked:
            habits.append(f"the gradient of {self.hooked!r} has a hook")
        return ", and ".join(habits)

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Note what the ``with`` block, a forward pass, does."""
        parameters = dict(model.named_parameters())
        before = {name: parameter._version for name, parameter in parameters.items()}
        with hear_inner_gradients(self._note_slope):
            yield
        for name, parameter in parameters.items():
            if parameter._version != before[name]:
                self.writes = self.writes or name

    def _note_slope(self, create_graph: bool) -> None:
        self.slopes = True


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Some optimizer steps in plain PyTorch."""

    losses: list[float]
    """Mean loss over the items of the global batch, one value per step."""
    norms: list[float]
    """L2 norm of the gradient before clipping, one value per step."""
    state: dict[str, Tensor]
    """Each parameter and buffer after the last step, on the CPU, by its name in the model."""
    draws: str
    """Where a forward pass drew numbers that follow from the rank; empty if it drew none."""
    habits: Habits = field(default_factory=Habits)
    """What the job does that copies of weights cannot follow."""


@contextmanager
def without_gradient_hooks(model: nn.Module) -> Iterator[None]:
    """Take the hooks on gradients away for the ``with`` block."""
    hooked: list[Any] = [
        parameter for parameter in model.parameters() if getattr(parameter, "_backward_hooks", None)
    ]
    hooks_of = [dict(parameter._backward_hooks) for parameter in hooked]
    for parameter in hooked:
        parameter._backward_hooks.clear()  # in place: autograd holds the same dict
    try:
        yield
    finally:
        for parameter, hooks in zip(hooked, hooks_of, strict=True):
            parameter._backward_hooks.update(hooks)


class PlainCopy:
    """A job's model a second time, as before its strategy touched it, and what its steps need."""

    def __init__(self, config: RunConfig, task: Task, data: Datasets) -> None:
        """Remember the job. ``data`` are the datasets as the task prepared them."""
        self.config = computed_plainly(config)
        # A task may keep its model in itself: the second build must not replace the run's.
        self.task = BoundTask(copy(BoundTask.wrap(task).task))
        self.data = data.mapped(padded_rows) or data
        self.model = nn.Module()
        """The model, on the CPU until it is used."""
        self.frozen: dict[str, nn.Module] = {}
        """The task's frozen models by name."""
        self.start: dict[str, Tensor] = {}
        """Each parameter and buffer before the first step, on the CPU."""

    def build(self, built: nn.Module) -> None:
        """Build the model again, with the values of ``built``, and no trace in any generator.

        A copy by ``deepcopy`` would lack the hooks of parameters. Where ``built`` is on the meta
        device, the seed alone gives both the same values.
        """
        with untouched_generators():
            self.model = model_source(self.config, self.task, self.data).build()
            set_up_module(self.config, self.task, self.model, training=False)
            count_each_batch_once(self.model)  # where the model itself recomputes activations
            self.frozen = self._build_frozen()
        made = dict(_tensors_of(built))
        with torch.no_grad():
            for name, tensor in _tensors_of(self.model):
                if name in made and not made[name].is_meta:
                    tensor.copy_(made[name])
        self.start = state_of(self.model)

    def _build_frozen(self) -> dict[str, nn.Module]:
        """Return the task's frozen models by name, whole and in evaluation mode."""
        frozen: dict[str, nn.Module] = {}
        for name, model in self.task.frozen(self.config, self.data).items():
            if model == INITIAL:  # without the adapter
                source = base_source(self.config, self.task, self.data)
            else:
                source = frozen_source(self.config, self.task, self.data, model)
            frozen[name] = source.build().requires_grad_(False).eval()
        return frozen

    def reset(self) -> None:
        """Give the model the values that it had before the first step."""
        with torch.no_grad():
            for name, tensor in _tensors_of(self.model):
                if name in self.start:  # else a forward pass has made it, such as a mask
                    tensor.copy_(self.start[name])

    def changed(self) -> Iterator[str]:
        """Yield the name of each parameter and buffer that is not as before the first step."""
        for name, tensor in _tensors_of(self.model):
            before = self.start.get(name)
            if before is not None and not torch.equal(tensor.detach().cpu(), before):
                yield name

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The model, and the task's frozen ones."""
        return (self.model, *self.frozen.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the copy."""
        of_models = (tensor.nbytes for model in self.models for _, tensor in _tensors_of(model))
        return sum(of_models) + sum(tensor.nbytes for tensor in self.start.values())

    def to(self, device: torch.device) -> None:
        """Move the models to a device."""
        for model in self.models:
            model.to(device)


def replay(
    plain: PlainCopy, run: Run, steps: int, cut: Cut = "whole", precision: str | None = None
) -> Replayed:
    """Train the copy, as before the first step, for ``steps`` optimizer steps on this device.

    ``precision`` replaces the run's. Leaves all generators as they were.
    """
    plain.reset()
    plain.to(run.world.device)
    plain.model.train()
    replayer = _Replayer(plain, run, cut, precision or run.config.precision)
    results = []
    with untouched_generators(), use_row_masks(run) as masks:
        if masks:
            masks.is_new = False  # the run's own first pass has logged what is not by row
        for number, epoch, rows in replayer.coming(steps):
            results.append(replayer.step(number, epoch, rows, masks))
    return Replayed(
        losses=[loss for loss, _ in results],
        norms=[norm for _, norm in results],
        state=state_of(plain.model),
        draws=replayer.draws,
        habits=replayer.habits,
    )


def plain_outputs(
    plain: PlainCopy, run: Run, rows: np.ndarray
) -> tuple[Mapping[str, Tensor | Ragged], bool]:
    """Return the outputs of evaluation rows by the copy on this device, and True if it
    drew numbers.
    """
    plain.to(run.world.device)
    plain.model.eval()
    alone = replace(
        run,
        model=plain.model,
        module=plain.model,
        capabilities=replace(run.capabilities, shards_parameters=False),
        compiled=None,
    )
    evaluate: Evaluate = plain.task.evaluation.of_run(alone)
    batch = to_device(plain.data.evaluation.batch(rows), run.world.device)
    autocast = autocast_for(run.config, run.capabilities, run.world, evaluates=True)
    before = other_generators()
    with autocast, CountsDraws() as drawn:  # type: ignore[no-untyped-call]
        if plain.frozen:
            batch = plain.task.consult(plain.frozen, batch)
        outputs, _ = evaluate(batch, len(rows))
    return outputs, drawn.count > 0 or before != other_generators()


def plain_step(plain: PlainCopy, run: Run, rows: np.ndarray, epoch: int) -> None:
    """Take one optimizer step for some rows with the copy on this device; raise what it raises."""
    plain.to(run.world.device)
    plain.model.train()
    replayer = _Replayer(plain, run, "whole", run.config.precision)
    with untouched_generators(), use_row_masks(run) as masks:
        if masks:
            masks.is_new = False  # the run's own first pass has told
        replayer.step(0, epoch, rows, masks)


class _Replayer:
    """The state of one replay: its optimizer, schedule and datasets."""

    def __init__(self, plain: PlainCopy, run: Run, cut: Cut, precision: str) -> None:
        self._plain = plain
        self._run = run
        self._cut = cut
        self._dtype = DTYPES.get(precision)
        config, losses, model = plain.config, plain.task.losses, plain.model
        self._optimizer = optimizer_factory(config, losses.phases)(model)
        self._schedule = scheduler_for(
            config, self._optimizer, run.total_steps, run.steps_per_epoch
        )
        self._trained = {
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._by_phase = parameters_by_phase(losses.phases, self._trained)
        self._rows_of = training_plan(config, plain.data.train)
        self._losses = {"": losses.that_logs(_not_logged)}
        if self._by_phase:
            self._losses = losses.of_phases(_not_logged)
        self.draws = ""
        self.habits = Habits(hooked=min(hooked_parameters(model), default=""))

    def coming(self, steps: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield number, epoch and rows of each step."""
        for number, (epoch, rows) in enumerate(islice(global_batches(self._rows_of), steps)):
            if self._plain.task.losses.whole_batch:
                rows = np.sort(rows)
            if self._cut == "backwards":
                rows = rows[::-1].copy()
            yield number, epoch, rows

    def step(
        self, number: int, epoch: int, rows: np.ndarray, masks: RowMasks | None
    ) -> tuple[float, float]:
        """Make one optimizer step; return its mean loss and the norm of its gradient."""
        total = 0.0
        squared_norm = 0.0
        groups = self._optimizer.param_groups
        dataset = in_epoch(self._plain.data.train, epoch)
        for phase, loss in self._losses.items():
            self._train_only(self._by_phase[phase] if phase else self._trained)
            self._optimizer.zero_grad()
            seed_step(self._run, number, masks)  # the main rank has the first data shard
            for part in self._parts(number, epoch, rows):
                total += self._backward(dataset, part, rows, loss, masks)
            self._train_only(self._trained)
            trained = [parameter for group in groups for parameter in group["params"]]
            squared_norm += clip_gradients(trained, self._plain.config.clip) ** 2
            self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        return total, squared_norm**0.5

    def _parts(self, number: int, epoch: int, rows: np.ndarray) -> list[np.ndarray]:
        """Return the rows of each pass of a step."""
        if self._cut == "micro-batches":
            step = number % self._rows_of.steps
            shards = self._run.world.shards
            parts = []
            for shard in range(shards):
                micros = self._rows_of.split(epoch, step, shard, shards)
                parts += [micro.indices for micro in micros if not micro.is_padding]
            return parts
        count = 2 if self._cut == "halves" else 1
        return np.array_split(rows, min(count, len(rows)))

    def _backward(
        self,
        dataset: Dataset,
        part: np.ndarray,
        rows: np.ndarray,
        loss: Loss,
        masks: RowMasks | None,
    ) -> float:
        """Add the gradient of some rows' share of the mean loss over ``rows``; return the share."""
        device = self._run.world.device
        batch = to_device(dataset.batch(part), device)
        if self._plain.frozen:
            with torch.no_grad(), self._autocast():
                batch = self._plain.task.consult(self._plain.frozen, batch)
        drawn_before = masks.drawn if masks else 0
        others_before = other_generators()
        masks_of_rows = masks.begin_rows(part, device, batch) if masks else nullcontext()
        watched = self.habits.watch(self._plain.model)
        counted = CountsDraws()  # type: ignore[no-untyped-call]
        with watched, masks_of_rows, self._autocast(), counted as drawn:
            share = self._share(dataset, part, rows, batch, loss)
        by_masks = masks.drawn - drawn_before if masks else 0
        if drawn.count > by_masks or others_before != other_generators():
            self.draws = self.draws or drawn.place or "the code of the task"
        share.backward()  # type: ignore[no-untyped-call]
        return float(share.detach())

    def _share(
        self, dataset: Dataset, part: np.ndarray, rows: np.ndarray, batch: Batch, loss: Loss
    ) -> Tensor:
        """Return some rows' share of the mean loss over ``rows``, with its additional terms."""
        task, model = self._plain.task, self._plain.model
        if task.losses.whole_batch:
            embeddings = task.losses.embed(model, batch)
            with torch.autocast(self._run.world.device.type, enabled=False):  # as a run computes it
                return task.losses.batch_loss(embeddings, torch.as_tensor(part))
        if isinstance(loss, SumOfRows):
            losses = loss(model, batch, len(part))
        else:
            losses = loss(model, batch)
        total, further = split_terms(losses)
        share = _mean(total, dataset.items, rows)
        for name, term in further.items():
            share = share + _mean(term, counts_of(dataset)[name], rows)
        return share

    def _autocast(self) -> AbstractContextManager[object]:
        # A block of its own for each pass: autocast keeps its copies of the weights until the
        # outermost one ends.
        device_type = self._run.world.device.type
        return torch.autocast(device_type, dtype=self._dtype, enabled=self._dtype is not None)

    def _train_only(self, names: set[str] | frozenset[str]) -> None:
        """Let only these parameters require gradients."""
        for name, parameter in self._plain.model.named_parameters():
            parameter.requires_grad_(name in names)


def global_batches(plan: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yield epoch and row numbers, int64 ``(rows,)``, of each optimizer step, without end."""
    for epoch in count():
        for step in range(plan.steps):
            yield epoch, plan.rows(epoch, step)


def clip_gradients(parameters: list[nn.Parameter], clip: Clip) -> float:
    """Clip as the config says, the whole norm first; return the norm before, computed in fp64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [float(_wide(gradient).norm()) for gradient in gradients]
    norm = math.hypot(*norms)
    if clip.norm is not None:
        factor = min(1.0, clip.norm / (norm + 1e-6))  # as torch has it
        for gradient in gradients:
            gradient.mul_(factor)
    if clip.value is not None:
        for gradient in gradients:
            gradient.clamp_(-clip.value, clip.value)
    return norm


def _wide(gradient: Tensor) -> Tensor:
    """Return a gradient in fp64, or complex128."""
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return gradient.detach().to(wide)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each parameter and buffer, on the CPU, by name."""
    state = {}
    for name, tensor in _tensors_of(model):
        state[name] = tensor.detach().to("cpu", copy=True)
    return state


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Leave torch's, Python's and numpy's generators as they were, whatever the block draws."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _mean(total: Tensor, column: Any, rows: np.ndarray) -> Tensor:
    """Return a sum divided by the items of all ``rows``; a step without items has no gradient."""
    items = int(read(column, rows).sum())
    return total / items if items else total * 0.0


def _not_logged(*_: object, **__: object) -> None:
    """Take a value that a task logs: the run itself has logged it."""
