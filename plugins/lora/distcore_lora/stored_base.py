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
"""Model types whose code reads no dtype of a weight; a test compares each with a base in fp32."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that are kept, by their names in the safetensors format."""
STORED: dict[type, type] = {nn.Linear: StoredLinear, nn.Embedding: StoredEmbedding}
PLAIN = {stored: plain for plain, stored in STORED.items()} | {QuantizedLinear: nn.Linear}


def store(config: RunConfig, module: nn.Module, folder: Path | None) -> None:
    """Keep the frozen linear layers and embeddings of ``module``, in place, as ``lora.base`` asks.

    ``module`` is adapted, whole or meta; ``folder`` has its base, if any. Raises ConfigError where
    'file' or 'nf4' cannot be.
    """
    base = config.lora.base
    if base == "fp32":
        return
    dtypes = _dtypes_in(folder) if folder else set()
    obstacle = _obstacle(config, module, folder, dtypes)
    if obstacle:
        if base != "auto":
            raise ConfigError(f"lora.base = {base!r}: {obstacle}; use --set lora.base=fp32")
        return
    [dtype] = dtypes
    if dtype in DTYPES:
        _narrow(module, DTYPES[dtype])
    if base == "nf4":
        _quantize(module)


def widen(module: nn.Module) -> None:
    """Turn the layers that ``store`` has kept into plain ones in fp32, in place."""
    part: Any
    for part in module.modules():
        if type(part) in PLAIN:
            part.__class__ = PLAIN[type(part)]
            part.weight.data = widened(part.weight.data, torch.float32)


def _obstacle(config: RunConfig, module: Any, folder: Path | None, dtypes: set[str]) -> str:
    """Return why the base cannot be kept as its files have it, as part of a sentence; '' if it can.

    ``dtypes`` are those of the weights in ``folder``.
    """
    if folder is None:
        return f"model {config.task_options.get('model')!r} has random weights, and no files"
    if len(dtypes) != 1:
        names = " and ".join(sorted(dtypes)) if dtypes else "in no safetensors files"
        return f"the weights in {folder} are {names}"
    model_type = module.config.model_type
    if model_type not in MODEL_TYPES:
        return f"the model type {model_type} is none of {', '.join(MODEL_TYPES)}"
    if config.compile != "off":
        return "compiled code was not compared with it"
    return ""


def _dtypes_in(folder: Path) -> set[str]:
    """Return the dtypes of the floats in the safetensors files of ``folder``, by their names."""
    from safetensors import safe_open

    dtypes: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- is no dict
                dtypes.add(file.get_slice(name).get_dtype())
    # The dtype of the weights is not that of buffers of integers.
    return {dtype for dtype in dtypes if "F" in dtype}


def users_by_parameter(module: nn.Module) -> Counter[int]:
    """Return how many modules have each parameter, by its id: a tied one has several."""
    users = Counter[int]()
    for part in module.modules():
        users.update(id(parameter) for parameter in part.parameters(recurse=False))
    return users


def _narrow(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen linear layers and embeddings in ``dtype``.

    Nothing is rounded: values come from files in ``dtype``. A tied weight is stored only if all of
    its users widen it.
    """
    parts: list[Any] = list(module.modules())
    users = users_by_parameter(module)
    frozen = [part for part in parts if type(part) in STORED and not part.weight.requires_grad]
    widening_users = Counter(id(part.weight) for part in frozen)
    other_parameters: list[tuple[nn.Module, str]] = []
    for part in parts:
        if type(part) not in STORED:
            names = [name for name, _ in part.named_parameters("", False)]
            other_parameters += [(part, name) for name in names]
    for part in frozen:
        if widening_users[id(part.weight)] == users[id(part.weight)]:
            part.__class__ = STORED[type(part)]
            # The last one is outside of the blocks, as embeddings are, so that a strategy gathers
            # both at once.
            part.beside = other_parameters[-1]
            part.weight.data = part.weight.data.to(dtype)


def _quantize(module: Any) -> None:
    """Turn the frozen linear layers into NF4.

    The output layer stays as it is, as in QLoRA, and so does a tied weight. Raises ConfigError for
    a layer whose rows are not whole blocks.
    """
    users = users_by_parameter(module)
    head: Any = module.get_output_embeddings()
    heads = (head, getattr(head, "base_layer", None))
    for path, part in module.named_modules():
        if type(part) not in (nn.Linear, StoredLinear) or part in heads:
            continue
        weight = part.weight
        if weight.requires_grad or users[id(weight)] > 1:
            continue
        if part.in_features % nf4.BLOCK:
            raise ConfigError(
                f"lora.base = 'nf4': {path} has rows of {part.in_features} weights, which are no"
                f" whole blocks of {nf4.BLOCK}; use --set lora.base=file"
            )
        part.__class__ = QuantizedLinear
        size = (part.out_features, nf4.bytes_of_row(part.in_features))
        if weight.is_meta:
            weight.data = weight.new_empty(size, dtype=torch.uint8)
        else:
            weight.data = nf4.quantize(weight.data)
