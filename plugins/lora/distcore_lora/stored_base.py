"""The frozen base of an adapter in the dtype of its files, widened inside each product alone.

A 16-bit float is exact in fp32, so results equal those of a base that was cast to fp32 whole, in half of its memory.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distcore import ConfigError, RunConfig

MODEL_TYPES = ("bert", "distilbert", "electra", "gemma", "llama", "mistral", "qwen2", "qwen3", "roberta", "xlm-roberta")
"""Model types whose code reads no dtype of a weight. A test compares each of them with a base in fp32."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that are kept, by their names in the safetensors format."""


def store(config: RunConfig, module: nn.Module, folder: Path | None) -> None:
    """Keep the frozen linear layers and embeddings of ``module``, in place, as ``lora.base`` asks.

    ``module`` is adapted, whole or meta; ``folder`` has its base, if any. Raises ConfigError where 'file' cannot be.
    """
    if config.lora.base == "fp32":
        return
    dtypes = _dtypes_in(folder) if folder else set()
    if why_not := _why_not(config, module, folder, dtypes):
        if config.lora.base == "file":
            raise ConfigError(f"lora.base = 'file': {why_not}; use --set lora.base=fp32")
        return
    [dtype] = dtypes
    if dtype in DTYPES:
        _narrow(module, DTYPES[dtype])


def widen(module: nn.Module) -> None:
    """Turn the layers that ``store`` has kept into plain ones in fp32, in place."""
    part: Any
    for part in module.modules():
        if type(part) in PLAIN:
            part.__class__ = PLAIN[type(part)]
            part.weight.data = part.weight.data.float()


def _why_not(config: RunConfig, module: Any, folder: Path | None, dtypes: set[str]) -> str:
    if folder is None:
        return f"model {config.task_options.get('model')!r} has random weights, and no files"
    if len(dtypes) != 1:
        return f"the weights in {folder} are {' and '.join(sorted(dtypes)) if dtypes else 'in no safetensors files'}"
    if (kind := module.config.model_type) not in MODEL_TYPES:
        return f"the model type {kind} is none of {', '.join(MODEL_TYPES)}"
    return "compiled code was not compared with it" if config.compile != "off" else ""


def _dtypes_in(folder: Path) -> set[str]:
    from safetensors import safe_open

    dtypes = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 -- is no dict
    return {name for name in dtypes if "F" in name}  # buffers of integers say nothing


def _narrow(module: nn.Module, dtype: torch.dtype) -> None:
    """Round nothing: values come from files in ``dtype``. A tied weight is kept if all of its users widen it."""
    parts: list[Any] = list(module.modules())
    users = Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))
    own = [part for part in parts if type(part) in STORED and not part.weight.requires_grad]
    known = Counter(id(part.weight) for part in own)
    # The last is outside of the blocks, as embeddings are, so that a strategy gathers both at once.
    others = [(p, name) for p in parts if type(p) not in STORED for name, _ in p.named_parameters("", False)]
    for part in own:
        if known[id(part.weight)] == users[id(part.weight)]:
            part.__class__ = STORED[type(part)]
            part.beside = others[-1]
            part.weight.data = part.weight.data.to(dtype)


class _Product(torch.autograd.Function):
    """The product with a frozen weight; backward widens it again, so that no wide copy is kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(inputs, weight.to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight.to(gradient.dtype), None, of_bias


class StoredLinear(nn.Linear):
    """A linear layer with a frozen 16-bit weight, which each product widens."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer with its weight in fp32."""
        return self.product(input, self.bias)

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output without the layer's own bias, as a strategy that sums parts of it over ranks needs it."""
        if torch.is_autocast_enabled(input.device.type):  # it casts the weight, whatever its dtype
            return F.linear(input, self.weight, bias)
        product: Tensor = _Product.apply(input, self.weight, bias)  # type: ignore[no-untyped-call]
        return product


class StoredEmbedding(nn.Embedding):
    """An embedding with 16-bit weights; looked-up rows get the dtype of the parameter ``beside``."""

    beside: tuple[nn.Module, str]
    """Its module and name: fp32, unless a strategy casts the whole model, or gathers it in another dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer with its weight in fp32."""
        module, name = self.beside
        return super().forward(input).to(getattr(module, name).dtype)


STORED: dict[type, type] = {nn.Linear: StoredLinear, nn.Embedding: StoredEmbedding}
PLAIN = {stored: plain for plain, stored in STORED.items()}
