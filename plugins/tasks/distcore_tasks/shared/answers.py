"""Answers of a frozen model to the training rows, computed once before the first step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from distcore import Column, Datasets, Progress, Run

log = logging.getLogger("distcore")


@dataclass(frozen=True, kw_only=True)
class ConsultOnce:
    """The option of a task to consult its frozen model once.

    Its ``consult`` adds tensors with one entry per row, unless the batch has them already.
    """

    consult_once: bool = False
    """Ask the frozen model about each training row once, alone, before the first step; each
    rank keeps all answers.
    """

    def with_answers(self, data: Datasets) -> Datasets:
        """Return ``data`` with training rows that keep answers, if the user asks for that."""
        return replace(data, train=AnsweredRows(data.train)) if self.consult_once else data

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress, data: Datasets) -> None:
        """Ask about each training row, if steps are left."""
        if isinstance(data.train, AnsweredRows) and progress.step < run.total_steps:
            data.train.ask(run)


class AnsweredRows:
    """Rows whose batches have the answers of frozen models, once these exist.

    Implements ``distcore.Dataset``.
    """

    def __init__(self, rows: Any) -> None:
        """``rows`` is a dataset whose batches are dicts."""
        self.rows = rows
        self.answers: dict[str, Tensor] = {}

    @property
    def lengths(self) -> Column:
        """Tokens of each row."""
        lengths: Column = self.rows.lengths
        return lengths

    @property
    def items(self) -> Column:
        """Weight of each row in the mean loss."""
        items: Column = self.rows.items
        return items

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        """Return the optional members of the rows."""
        if name == "rows":  # not there yet, while a loader process unpickles this
            raise AttributeError(name)
        return getattr(self.rows, name)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, with their answers."""
        batch: dict[str, Tensor] = self.rows.batch(indices)
        return batch | {name: values[indices] for name, values in self.answers.items()}

    def ask(self, run: Run) -> None:
        """Ask the frozen models about each row alone.

        Ranks share the rows, and then exchange their answers. An answer therefore does not depend
        on the number of ranks, on micro-batches, or on the step of a resume.
        """
        import torch

        assert run.consult is not None  # the task has frozen models
        world = run.world
        group = world.group
        # Without a group to exchange answers, each rank asks about all rows.
        shard, shards = (world.shard, world.shards) if group else (0, 1)
        rows = len(self)
        # Equally many rows on each rank: some ranks ask about the last row again.
        numbers = np.arange(shard, shard + rows, shards).clip(max=rows - 1)
        row_numbers = torch.from_numpy(numbers)[:, None].to(world.device)
        parts: dict[str, list[Tensor]] = {"row": list(row_numbers)}
        for number in numbers:
            row = self.rows.batch(number[None])
            row = {name: value.to(world.device) for name, value in row.items()}
            for name, answer in run.consult(row).items():
                if name not in row:
                    parts.setdefault(name, []).append(answer)
        answers = {name: torch.cat(tensors) for name, tensors in parts.items()}
        if group:
            answers = group.gather(answers)
        # Ascending by row, the first answer to each.
        answered_rows = answers.pop("row").cpu().numpy()
        _, order = np.unique(answered_rows, return_index=True)
        first = torch.from_numpy(order)
        self.answers = {name: values.cpu()[first] for name, values in answers.items()}
        if world.is_main:
            size = sum(values.nbytes for values in self.answers.values()) / 2**20
            log.info(
                "consult_once: answers to %d rows are in the memory of each rank, %.1f MiB",
                len(self),
                size,
            )
