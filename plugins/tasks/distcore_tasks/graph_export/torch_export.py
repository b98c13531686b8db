"""The exporter ``torch-export``: a graph that ``torch.export.load`` reads, without the code of the model."""

from __future__ import annotations

from pathlib import Path

import torch

from distcore import TrainedModel
from distcore_tasks.graph_export.graph import finish, graph_of
from distcore_tasks.huggingface_export.card import PROGRAM


def export(trained: TrainedModel, to: Path, merged: bool) -> None:
    """Write the graph, the task's files, such as a tokenizer, and a card to the new folder ``to``.

    A LoRA adapter is always merged. Raises ConfigError for a model that is not one graph, and OSError.
    """
    program = graph_of(trained, "torch-export").trace()
    to.mkdir(exist_ok=True)
    torch.export.save(program, to / PROGRAM)
    finish(to, trained)
