"""A user's file with a small task, as text; each test says what its loss does."""

from __future__ import annotations

from textwrap import indent

TASK = """
import sys, time
import torch
from torch.utils.data import TensorDataset
from distcore import RunConfig, Simple, train


class Own(Simple):
    def data(self):
        rows = TensorDataset(torch.ones(40, 1), torch.ones(40, 1))
        return rows, rows

    def model(self):
        return torch.nn.Linear(1, 1)

    def row_loss(self, model, batch):
{body}
"""


def task_file(row_loss: str) -> str:
    """Return the text of a file with the task ``Own``; ``row_loss`` has the lines of its loss."""
    return TASK.format(body=indent(row_loss.strip("\n"), " " * 8))
