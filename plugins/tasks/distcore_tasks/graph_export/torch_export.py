"""The exporter ``torch-export``: a graph that ``torch.export.load`` reads, without the
code of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from distcore import TrainedModel
from distcore_tasks.graph_export.graph import Graph, ReadBack, finish, graph_of
from distcore_tasks.huggingface_export.card import PROGRAM

merges = True
"""A graph has no place for an adapter."""


def export(trained: TrainedModel, to: Path, merged: bool) -> None:
    """Write the graph, the task's files, such as a tokenizer, and a card to the new folder ``to``.

    A LoRA adapter is always merged. Raises ConfigError for a model that is not one graph, and
    OSError.
    """
    graph = graph_of(trained, "torch-export")
    program = graph.trace()
    to.mkdir(exist_ok=True)
    torch.export.save(program, to / PROGRAM)
    dtype = next(graph.module.parameters()).dtype
    reads = partial(_load, to, graph)
    drawn = partial(graph.drawn, trained.module)
    prove = partial(trained.prove, "torch.export", reads, dtype, drawn)
    finish(to, trained, prove, list(graph.inputs))


def _load(to: Path, graph: Graph) -> nn.Module:
    """Return the graph as torch computes it, without the code of the model."""
    program = torch.export.load(to / PROGRAM).module()
    floats = next(graph.module.parameters()).dtype

    def run(named: Mapping[str, Tensor]) -> Tensor:
        inputs = {}
        for name, tensor in named.items():
            inputs[name] = tensor.to(floats) if tensor.is_floating_point() else tensor
        scores: Tensor = program(**inputs)
        return scores

    return ReadBack(run, graph)
