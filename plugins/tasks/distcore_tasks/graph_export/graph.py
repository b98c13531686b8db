"""The forward pass of a model of transformers as one graph: token ids or pixels in, scores out."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from distcore import ConfigError, TrainedModel
from distcore_tasks.huggingface_export.card import write_card

ROWS, TOKENS, SIDE = 2, 8, 64
"""Size of the example. In the graph rows and tokens are free, and pixels where the model takes any size."""


class OfTokens(nn.Module):
    """A model that reads rows of tokens, and returns its first output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.config.use_cache = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the scores of ``input_ids`` (rows, tokens); ``attention_mask`` is 0 for padding."""
        scores: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return scores


class OfPixels(nn.Module):
    """A model that reads images, and returns its first output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the scores of ``pixel_values`` (rows, channels, height, width), normalized as in training."""
        scores: Tensor = self.model(pixel_values=pixel_values)[0]
        return scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """What a tracer is given."""

    module: nn.Module
    """Takes the inputs by name; returns one tensor."""
    inputs: dict[str, Tensor]
    """An example of each input."""
    free: dict[str, dict[int, Any]]
    """Dimensions of each input that a caller chooses."""

    def trace(self) -> ExportedProgram:
        """Return the graph, without the places of the code that it comes from, which name folders."""
        with torch.no_grad(), quietly():
            program = torch.export.export(self.module, (), kwargs=self.inputs, dynamic_shapes=self.free, strict=False)
        for part in program.graph_module.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)
        return program


def graph_of(trained: TrainedModel, form: str) -> Graph:
    """Return the forward pass of a model, with its LoRA adapter merged; raises ConfigError if it is not one pass.

    ``form`` is the name of the export, for the message.
    """
    module: Any = trained.module.eval()
    reads: str | None = getattr(module, "main_input_name", None)
    config: Any = getattr(module, "config", None)
    if reads not in ("input_ids", "pixel_values") or getattr(config, "is_encoder_decoder", True):
        kind = type(module).__name__
        raise ConfigError(
            f"--format {form}: takes models of transformers that read tokens or images in one pass, not a {kind}; "
            "leave out --format"
        )
    if hasattr(module, "peft_config"):
        from distcore_lora import take_out

        module = take_out(module, merge=True)
    if reads == "pixel_values":
        side = getattr(config, "image_size", SIDE)
        height, width = (side, side) if isinstance(side, int) else side
        images = torch.zeros(ROWS, config.num_channels, height, width, dtype=module.dtype)
        return Graph(module=OfPixels(module), inputs={reads: images}, free={reads: dict.fromkeys((0, 2, 3), Dim.AUTO)})
    tokens = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    free = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in (reads, "attention_mask")}
    return Graph(module=OfTokens(module), inputs={reads: tokens, "attention_mask": tokens.clone()}, free=free)


def finish(to: Path, trained: TrainedModel) -> None:
    """Write what belongs beside a graph in the folder ``to``: the config, the task's files and a card."""
    module: Any = trained.module
    module.config.save_pretrained(to)
    trained.save_task_files(to)
    write_card(to, trained)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep what libraries print and log, such as that torchvision is missing, from the user's screen."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
