"""The loss of a task, in each of its forms: a sum, rows, phases, or over the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore.errors import TaskError
from distcore.plugin.task.methods import TaskMethods
from distcore.plugin.task.outputs import checked_losses
from distcore.plugin.task.phases import Phase
from distcore.plugin.task.task import Batch, Losses

Loss = Callable[[nn.Module, Batch], Losses]
Log = Callable[..., None]
"""``log(name, value, weight)``, as ``Run.log``."""


def _unlogged(name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
    """Log nothing."""


class SumOfRows:
    """The loss of a task that has one for each row."""

    def __init__(self, row_loss: Callable[..., Losses], log: Log) -> None:
        self._row_loss = row_loss
        self._logging = _logging(row_loss, log)

    def __call__(self, model: nn.Module, batch: Batch, rows: int | None = None) -> Losses:
        """Return the sum of the losses, and of each additional term.

        With ``rows`` set, raises TaskError unless there are that many losses.
        """
        losses, others = split_terms(self._logging(model, batch))
        checked = partial(checked_losses, row_loss=self._row_loss, rows=rows)
        sums_of_others = {name: checked(term).sum() for name, term in others.items()}
        return checked(losses).sum(), sums_of_others


class TaskLosses:
    """The losses of a task; results are checked."""

    def __init__(self, methods: TaskMethods) -> None:
        self._methods = methods

    @property
    def whole_batch(self) -> bool:
        """True if the loss is over the global batch; a task may set ``whole_batch = False``."""
        has_methods = self._methods.has("embed", "batch_loss")
        return has_methods and bool(self._methods.declared("whole_batch", True))

    @cached_property
    def phases(self) -> Mapping[str, Phase]:
        """The phases of a step by name, possibly none. Raises TaskError for another type."""
        phases: Mapping[str, Phase] = self._methods.call("phases", {})
        are_phases = isinstance(phases, Mapping) and all(
            isinstance(phase, Phase) for phase in phases.values()
        )
        if not are_phases:
            raise TaskError(
                f"task: phases() returned {phases!r:.80}; expected a dict of distcore.Phase"
            )
        if self._methods.has("phases") and (not phases or self.whole_batch):
            why = "has both phases() and batch_loss()" if phases else "phases() returned none"
            raise TaskError(f"task {self._methods.name}: {why}; a step needs one kind of loss")
        return phases

    def of_phases(self, log: Log) -> dict[str, Loss]:
        """Return the loss of each phase; it logs by ``log`` if it has such an argument."""
        losses = {}
        for name, phase in self.phases.items():
            losses[name] = _logging(phase.loss, log)
        return losses

    def _sum_of_phases(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the sum of the phases' losses, and their additional terms."""
        total = torch.zeros(())
        terms: dict[str, Tensor] = {}
        for loss in self.of_phases(_unlogged).values():
            loss_of_phase, terms_of_phase = split_terms(loss(model, batch))
            total = total + loss_of_phase
            terms |= terms_of_phase
        return total, terms

    @cached_property
    def unlogged(self) -> Loss:
        """The task's loss, or the sum of its ``row_loss``, without logging; TaskError without one.

        A loss over the global batch is computed for one micro-batch alone; losses of phases are
        added.
        """
        return self.that_logs(_unlogged)

    def that_logs(self, log: Log) -> Loss:
        """Return the loss, which logs by ``log`` if it has an argument of this name."""
        if self.whole_batch:
            return self._loss_of_micro_batch
        if self._methods.has("phases"):
            return self._sum_of_phases
        if self._methods.has("loss"):
            loss: Loss = _logging(self._methods["loss"], log)
            return loss
        if not self._methods.has("row_loss"):
            raise TaskError(
                f"task {self._methods.name}: has neither loss() nor row_loss(); it needs one of"
                " them"
            )
        return SumOfRows(self._methods["row_loss"], log)

    def embed(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings of each row for the loss, fp32, ``(n, …)`` by name.

        Raises TaskError for others.
        """
        embeddings = self._methods["embed"](model, batch)
        if not isinstance(embeddings, Mapping) or not embeddings:
            raise TaskError(
                f"task: embed() returned {type(embeddings).__name__}; expected a dict of tensors"
                " (n, …)"
            )
        sizes = {
            len(value) if isinstance(value, Tensor) and value.dim() else 0
            for value in embeddings.values()
        }
        if len(sizes) > 1 or 0 in sizes:
            raise TaskError(
                f"task: embed() returned {sorted(embeddings)} of unlike rows; expected tensors"
                " (n, …)"
            )
        return {name: value.float() for name, value in embeddings.items()}

    def _loss_of_micro_batch(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss over the global batch as if it were this micro-batch."""
        embeddings = self.embed(model, batch)
        rows = len(next(iter(embeddings.values())))
        return self.batch_loss(embeddings, torch.arange(rows))

    def batch_loss(
        self, embeddings: dict[str, Tensor], rows: Tensor, log: Log = _unlogged
    ) -> Tensor:
        """Return the loss of all rows of a global batch, a scalar; TaskError for anything else."""
        loss = _logging(self._methods["batch_loss"], log)(embeddings, rows)
        if not isinstance(loss, Tensor) or loss.dim():
            raise TaskError(
                f"task: batch_loss() returned {type(loss).__name__}; expected a tensor without"
                " dimensions"
            )
        return loss

    def row_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each row, ``(n,)``; or the sum, ``(1,)``, if that is all there is."""
        if self._methods.has("outputs"):
            losses = self._methods["outputs"](model, batch).get("loss")
            if isinstance(losses, Tensor):
                return losses
        elif self._methods.has("row_loss"):
            return self.of_each_row(model, batch)
        total, _ = split_terms(self.unlogged(model, batch))
        return total[None]

    def of_each_row(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return ``row_loss`` of each row, ``(n,)``, without logging."""
        return row_losses_alone(self._methods["row_loss"], model, batch)


def split_terms(losses: Losses) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return a loss, and its additional terms by name."""
    return losses if isinstance(losses, tuple) else (losses, {})


def row_losses_alone(row_loss: Callable[..., Losses], model: nn.Module, batch: Batch) -> Tensor:
    """Return ``row_loss`` of each row, without additional terms and without logging."""
    losses, _ = split_terms(_logging(row_loss, _unlogged)(model, batch))
    return checked_losses(losses, row_loss)


def _logging(loss: Callable[..., Any], log: Log) -> Callable[..., Any]:
    """Return ``loss`` with its argument ``log`` set, if it has one."""
    return partial(loss, log=log) if "log" in inspect.signature(loss).parameters else loss
