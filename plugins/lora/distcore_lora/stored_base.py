"""The frozen base of an adapter in the dtype of its files, or its linear layers in NF4.

A 16-bit float is exact in fp32, so results equal those of a base that was cast to fp32 whole, in
half of its memory. Results of NF4 equal those of a base that was dequantized to fp32.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distcore import ConfigError, RunConfig
from distcore_lora import nf4
from distcore_lora.stored_layers import QuantizedLinear, StoredEmbedding, StoredLinear, widened

MODEL_TYPES = (
    "bert",
    "distilbert",
    "electra",
    "gemma",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "roberta",
    "xlm-roberta",
)
"""Model types whose code reads no dtype of a weight. A test compares each of them with
a base in fp32.
"""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that are kept, by their names in the safetensors format."""
STORED: dict[type, type] = {nn.Linear: StoredLinear, nn.Embedding: StoredEmbedding}
PLAIN = {stored: plain for plain, stored in STORED.items()} | {QuantizedLinear: nn.Linear}


def store(config: RunConfig, module: nn.Module, folder: Path | None) -> None:
    """Keep the frozen linear layers and embeddings of ``module``, in place, as ``lora.base`` asks.

    ``module`` is adapted, whole or meta; ``folder`` has its base, if any. Raises ConfigError where
    'file' or 'nf4' cannot be.
    """
    asked = config.lora.base
    if asked == "fp32":
        return
    dtypes = _dtypes_in(folder) if folder else set()
    if why_not := _why_not(config, module, folder, dtypes):
        if asked != "auto":
            raise ConfigError(f"lora.base = {asked!r}: {why_not}; use --set lora.base=fp32")
        return
    [dtype] = dtypes
    if dtype in DTYPES:
        _narrow(module, DTYPES[dtype])
    if asked == "nf4":
        _quantize(module)


def widen(module: nn.Module) -> None:
    """Turn the layers that ``store`` has kept into plain ones in fp32, in place."""
    part: Any
    for part in module.modules():
        if type(part) in PLAIN:
            part.__class__ = PLAIN[type(part)]
            part.weight.data = widened(part.weight.data, torch.float32)


def _why_not(config: RunConfig, module: Any, folder: Path | None, dtypes: set[str]) -> str:
    if folder is None:
        return f"model {config.task_options.get('model')!r} has random weights, and no files"
    if len(dtypes) != 1:
        return (
            f"the weights in {folder} are"
            f" {' and '.join(sorted(dtypes)) if dtypes else 'in no safetensors files'}"
        )
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
    """Round nothing: values come from files in ``dtype``. A tied weight is kept if all of
    its users widen it.
    """
    parts: list[Any] = list(module.modules())
    users = Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))
    own = [part for part in parts if type(part) in STORED and not part.weight.requires_grad]
    known = Counter(id(part.weight) for part in own)
    # The last is outside of the blocks, as embeddings are, so that a strategy gathers both at once.
    others = [
        (p, name)
        for p in parts
        if type(p) not in STORED
        for name, _ in p.named_parameters("", False)
    ]
    for part in own:
        if known[id(part.weight)] == users[id(part.weight)]:
            part.__class__ = STORED[type(part)]
            part.beside = others[-1]
            part.weight.data = part.weight.data.to(dtype)


def _quantize(module: Any) -> None:
    """Turn the frozen linear layers into NF4, but not the output layer, as in QLoRA,
    nor a tied weight.

    Raises ConfigError for a layer whose rows are not whole blocks.
    """
    parts: list[Any] = list(module.modules())
    users = Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))
    head: Any = module.get_output_embeddings()
    heads = (head, getattr(head, "base_layer", None))
    for path, part in module.named_modules():
        weight = (
            part.weight if type(part) in (nn.Linear, StoredLinear) and part not in heads else None
        )
        if weight is None or weight.requires_grad or users[id(weight)] > 1:
            continue
        if part.in_features % nf4.BLOCK:
            raise ConfigError(
                f"lora.base = 'nf4': {path} has rows of {part.in_features} weights, which are no"
                f" whole blocks of {nf4.BLOCK}; use --set lora.base=file"
            )
        part.__class__ = QuantizedLinear
        size = (part.out_features, nf4.bytes_of_row(part.in_features))
        weight.data = (
            weight.new_empty(size, dtype=torch.uint8)
            if weight.is_meta
            else nf4.quantize(weight.data)
        )
