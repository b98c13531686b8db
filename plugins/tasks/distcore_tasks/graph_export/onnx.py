"""The exporter ``onnx``: a graph for onnxruntime and other programs that read ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from distcore import ConfigError, TrainedModel
from distcore.registry import is_installed
from distcore_tasks.graph_export.graph import Graph, ReadBack, finish, graph_of, quietly
from distcore_tasks.huggingface_export.card import ONNX

merges = True
"""A graph has no place for an adapter."""
LARGEST = 2**31 - 2**20
"""Bytes of weights that fit into one file of ONNX; of more, they lie beside it."""
exempt = {"has-the-weights": "a graph may hold a matrix transposed"}
"""Laws of exporters that do not hold, with reasons."""


def export(trained: TrainedModel, to: Path, merged: bool) -> None:
    """Write the graph, the task's files, such as a tokenizer, and a card to the new folder ``to``.

    A LoRA adapter is always merged. Raises ConfigError without the libraries that write ONNX, for
    weights in bf16, which onnxruntime does not compute with on a CPU, and for a model that is not
    one graph; and OSError.
    """
    missing = [name for name in ("onnx", "onnxscript") if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"--format onnx: {' and '.join(missing)} not installed; pip install {' '.join(missing)}"
        )
    graph = graph_of(trained, "onnx")
    dtype = next(graph.module.parameters()).dtype
    if dtype == torch.bfloat16:
        raise ConfigError(
            "--dtype bf16: onnxruntime computes with fp32 and fp16; name one of these with --format"
            " onnx"
        )
    size = sum(parameter.nbytes for parameter in graph.module.parameters())
    with torch.no_grad(), quietly():
        program = torch.onnx.export(
            graph.trace(), dynamo=True, output_names=[graph.output], verbose=False
        )
    assert program is not None
    for function in program.model.graphs():
        for node in function:
            # The lines of code that it comes from, which name folders of this machine.
            node.metadata_props.clear()
    to.mkdir(exist_ok=True)
    program.save(to / ONNX, external_data=size > LARGEST)
    reads = partial(_load, to, graph)
    drawn = partial(graph.drawn, trained.module)
    prove = partial(trained.prove, "onnxruntime", reads, dtype, drawn)
    finish(to, trained, prove, list(graph.inputs))


def _load(to: Path, graph: Graph) -> nn.Module:
    """Return the graph as onnxruntime computes it.

    Raises NotImplementedError without that library.
    """
    if not is_installed("onnxruntime"):
        raise NotImplementedError("onnxruntime is not installed")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(to / ONNX), providers=["CPUExecutionProvider"])
    floats = next(graph.module.parameters()).dtype

    def run(named: Mapping[str, Tensor]) -> Tensor:
        arrays = {}
        for name, tensor in named.items():
            # onnxruntime converts nothing: pixels of fp32 are refused by a graph in fp16.
            converted = tensor.to(floats) if tensor.is_floating_point() else tensor
            arrays[name] = converted.numpy()
        (answer,) = session.run(None, arrays)
        return torch.from_numpy(answer)

    return ReadBack(run, graph)
