"""The forward pass of a model of transformers as one graph: token ids or pixels in, scores out."""

from __future__ import annotations

import inspect
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers.utils.generic import ModelOutput

from distcore import ConfigError, TrainedModel
from distcore.model import silence_transformers
from distcore_tasks.huggingface_export.card import write_card
from distcore_tasks.huggingface_export.read_back import drawn_inputs

if TYPE_CHECKING:
    from distcore import Proof

TYPES = "token_type_ids"
"""The input that tells the texts of a pair apart."""
IMAGES = "preprocessor_config.json"
"""The task's file that says the size of images."""
ROWS, TOKENS, SIDE = 2, 8, 64
"""Size of the example.

In the graph rows and tokens are free, and pixels where the model takes any size.
"""


class OfTokens(nn.Module):
    """A model that reads rows of tokens, and returns its first output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.config.use_cache = False

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the scores of ``input_ids`` (rows, tokens); ``attention_mask`` is 0 for padding.

        ``token_type_ids`` tells the texts of a pair apart. A graph that was traced without them
        does not take them.
        """
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        scores: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)[0]
        return scores


class OfPixels(nn.Module):
    """A model that reads images, and returns its first output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the scores of ``pixel_values`` (rows, channels, height, width).

        These are normalized as in training.
        """
        scores: Tensor = self.model(pixel_values=pixel_values)[0]
        return scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A model, and all that tracing it needs."""

    module: nn.Module
    """Takes the inputs by name; returns one tensor."""
    inputs: dict[str, Tensor]
    """An example of each input."""
    free: dict[str, dict[int, Any]]
    """Dimensions of each input that a caller chooses."""
    gives: str
    """What transformers calls the output."""

    @property
    def output(self) -> str:
        """Return ``scores``, or for a model without a head transformers' name of the output."""
        return "scores" if self.gives == "logits" else self.gives

    def drawn(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return random inputs of ``model``, of which this is the graph."""
        inputs = dict(drawn_inputs(model))
        if TYPES in self.inputs:
            inputs[TYPES] = inputs["input_ids"] % 2
        return inputs

    def trace(self) -> ExportedProgram:
        """Return the graph, without the stack traces of its code, which name folders."""
        with torch.no_grad(), quietly():
            program = torch.export.export(
                self.module, (), kwargs=self.inputs, dynamic_shapes=self.free, strict=False
            )
        for part in program.graph_module.modules():
            if isinstance(part, torch.fx.GraphModule):
                for node in part.graph.nodes:
                    node.meta.pop("stack_trace", None)
        return program


def graph_of(trained: TrainedModel, form: str) -> Graph:
    """Return the forward pass of a model, whose adapter is merged.

    Raises ConfigError if it is not one pass. ``form`` is the name of the export, for the message.
    """
    module: Any = trained.module.eval()
    reads: str | None = getattr(module, "main_input_name", None)
    config: Any = getattr(module, "config", None)
    is_one_pass = not getattr(config, "is_encoder_decoder", True)
    if reads not in ("input_ids", "pixel_values") or not is_one_pass:
        kind = type(module).__name__
        raise ConfigError(
            f"--format {form}: takes models of transformers that read tokens or images in one pass,"
            f" not a {kind}; leave out --format"
        )
    if reads == "pixel_values":
        height, width = _sides(trained)
        shape = (ROWS, config.num_channels, height, width)
        inputs = {reads: torch.zeros(shape, dtype=module.dtype)}
        # torch finds out which of these the model leaves free.
        free = {reads: dict.fromkeys((0, 2, 3), Dim.AUTO)}
        traced: nn.Module = OfPixels(module)
    else:
        tokens = torch.ones(ROWS, TOKENS, dtype=torch.int64)
        inputs = {name: tokens.clone() for name in _inputs_of_tokens(trained, form)}
        free = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs}
        traced = OfTokens(module)
    with torch.no_grad():
        answer: Any = module(**inputs)
    first_output = next(iter(answer.keys()))
    return Graph(module=traced, inputs=inputs, free=free, gives=first_output)


def _sides(trained: TrainedModel) -> tuple[int, int]:
    """Return height and width of the run's images: a graph may take no others."""
    images = trained.inputs.get("pixel_values")
    if images is not None:
        return images.shape[-2], images.shape[-1]
    config: Any = trained.module.config
    size = getattr(config, "image_size", None)
    if isinstance(size, int) and size:
        return size, size
    if size:
        height, width, *_ = size
        return height, width
    with TemporaryDirectory() as folder:
        trained.save_task_files(Path(folder))
        settings = Path(folder) / IMAGES
        if settings.is_file():
            size = json.loads(settings.read_text(encoding="utf-8")).get("size")
    return (size["height"], size["width"]) if size else (SIDE, SIDE)


def _inputs_of_tokens(trained: TrainedModel, form: str) -> list[str]:
    """Return the names of the model's inputs: tokens, their mask and, for pairs, token types.

    Without the data of the run a model gets all that its tokenizer makes for it. Raises
    ConfigError for other inputs.
    """
    module: Any = trained.module
    always = ["input_ids", "attention_mask"]
    if trained.inputs:
        others = sorted(trained.inputs.keys() - {*always, TYPES})
        if others:
            raise ConfigError(
                f"--format {form}: the run gives its model {others[0]}, which no tokenizer makes;"
                " leave out --format"
            )
        return [*always, TYPES] if TYPES in trained.inputs else always
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        trained.save_task_files(Path(folder))
        module.config.save_pretrained(folder)
        with silence_transformers():
            names = AutoTokenizer.from_pretrained(folder).model_input_names
    is_argument = TYPES in inspect.signature(module.forward).parameters
    has_types = is_argument and getattr(module.config, "type_vocab_size", 0) > 1
    return [*always, TYPES] if has_types and TYPES in names else always


class ReadBack(nn.Module):
    """A graph that is called as the model that it was made of."""

    def __init__(self, run: Callable[[Mapping[str, Tensor]], Tensor], graph: Graph) -> None:
        """``run`` computes the graph's output of its inputs by name."""
        super().__init__()
        self._run = run
        self._names = list(graph.inputs)
        self._gives = graph.gives

    def forward(self, **named: Any) -> ModelOutput:
        """Return the output under the name that transformers has for it."""
        # A caller may give more than the graph reads.
        scores = self._run({name: named[name] for name in self._names})
        make: Any = ModelOutput
        output: ModelOutput = make({self._gives: scores})
        return output


def finish(
    to: Path,
    trained: TrainedModel,
    prove: Callable[[], Proof],
    inputs: Sequence[str] = (),
) -> None:
    """Write the other files of an exported model: the config, the task's files and a card.

    ``to`` is its folder, ``prove`` reads the export back, ``inputs`` are those of a graph.
    """
    module: Any = trained.module
    module.config.save_pretrained(to)
    trained.save_task_files(to)
    write_card(to, trained, prove(), inputs)


@contextmanager
def quietly() -> Iterator[None]:
    """Hide output and warnings of libraries, such as that torchvision is missing."""
    from distcore.lab import at_level

    with (
        at_level(logging.ERROR, "torch.onnx"),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        yield
