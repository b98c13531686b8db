"""The job that every rival of benchmarks/rivals.py trains: model and rows of the kit, and what
it is asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.testing.problem import Problem, RandomRows

SEED, IGNORED = 0, -100
"""Seed of each run, and the label of no item, as PyTorch has it."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run: what is trained, and what is to be written."""

    out: str
    """Where the trained parameters go, and the losses of evaluated rows beside them."""
    world: int = 2
    batch: int = 3
    """Rows of a micro-batch."""
    accumulation: int = 2
    """Micro-batches per rank and step."""
    rows: int = 48
    steps: int = 8
    weighted: bool = False
    """True if a row counts as one to three items of the mean loss."""
    dropout: float = 0.0
    shuffle: bool = False
    stop: int = 0
    """Save after this step into ``folder``, and end; 0: train to the end."""
    resume: bool = False
    """True: continue what is in ``folder``."""
    folder: str = ""
    evaluate: bool = False
    """True: evaluate after training, and write each row's loss in the order in
    which they are reported.
    """

    @property
    def last(self) -> int:
        """The step after which this run ends."""
        return self.stop or self.steps

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch; the last one may have fewer rows."""
        return -(-self.rows // (self.batch * self.accumulation * self.world))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of the kit; a row has its label once per item, and then ``IGNORED``."""

    def __init__(self, rows: RandomRows) -> None:
        """Show ``rows`` one by one."""
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """Return ``tokens``, shape ``(length,)``, and ``labels``, shape ``(3,)``."""
        labels = torch.full((3,), IGNORED)
        labels[: int(self._rows.items[row])] = int(self._rows.labels[row])
        return {"tokens": torch.from_numpy(self._rows.tokens[row]), "labels": labels}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad ``tokens`` with 0."""
    tokens = nn.utils.rnn.pad_sequence([row["tokens"] for row in rows], batch_first=True)
    return {"tokens": tokens, "labels": torch.stack([row["labels"] for row in rows])}


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all items."""
    return F.cross_entropy(
        logits.unsqueeze(-1).expand(-1, -1, labels.shape[1]), labels, reduction="sum"
    )


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the items of this micro-batch, the loss of any tutorial."""
    return sum_of_losses(logits, labels) / count(labels)


def count(labels: Tensor) -> Tensor:
    """Return the number of items."""
    return (labels != IGNORED).sum()


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row, shape ``(n,)``."""
    return F.cross_entropy(logits, labels[:, 0], reduction="none")


class Job:
    """Model, optimizer and rows of an order, as they are before the first step."""

    def __init__(self, order: Order) -> None:
        """Build them."""
        torch.manual_seed(SEED)
        self.order = order
        problem = Problem(rows=order.rows, dropout=order.dropout, weighted=order.weighted)
        data = problem.prepare(cast("RunConfig", None))
        self.model = problem.build_model(cast("RunConfig", None), data)
        self.train, self.evaluation = (
            Rows(cast("RandomRows", part)) for part in (data.train, data.evaluation)
        )

    def optimizer(self) -> torch.optim.AdamW:
        """Return AdamW as in the kit: with this ``eps`` the scale of the gradient
        shows in the parameters.
        """
        return torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-2, weight_decay=0.0)

    def batches(
        self, dataset: Rows, shuffle: bool = False
    ) -> torch.utils.data.DataLoader[dict[str, Tensor]]:
        """Return the loader that a user writes for one process."""
        return torch.utils.data.DataLoader(
            dataset, self.order.batch, shuffle=shuffle, collate_fn=collate
        )

    def write(self, model: nn.Module, losses: Any = None) -> None:
        """Write what this rank has; rank 0 calls."""
        state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
        save_file(state, self.order.out)
        if losses is not None:
            Path(f"{self.order.out}.json").write_text(json.dumps([float(loss) for loss in losses]))


def serve(run: Callable[[Order], None]) -> None:
    """Run the orders of the file that the command line names."""
    for order in json.loads(Path(sys.argv[1]).read_text()):
        run(Order(**order))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
