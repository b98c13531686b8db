"""A model and its vocabulary in one file of the format GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distcore import ConfigError
from distcore_tasks.gguf_export.families import Family, rope_factors
from distcore_tasks.gguf_export.vocabulary import Vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter


def write_gguf(file: Path, module: Any, family: Family, vocabulary: Vocabulary) -> None:
    """Write ``file``: matrices in the dtype of ``module``, norms and biases in
    fp32, as llama.cpp asks.

    Raises ConfigError for a weight that llama.cpp does not know, before it writes, and OSError.
    """
    from gguf import GGUFWriter, LlamaFileType

    types = {
        torch.float32: LlamaFileType.ALL_F32,
        torch.float16: LlamaFileType.MOSTLY_F16,
        torch.bfloat16: LlamaFileType.MOSTLY_BF16,
    }
    tensors = _tensors_of(module, family)
    writer = GGUFWriter(file, family.architecture)
    try:
        writer.add_file_type(types[module.dtype])
        family.describe(writer, module.config)
        vocabulary.describe(writer)
        for name, tensor in tensors:
            _add(writer, name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _tensors_of(module: Any, family: Family) -> list[tuple[str, Tensor]]:
    """Return the weights of ``module``, named and laid out as in llama.cpp; ConfigError for
    one that it lacks.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config = module.config
    architecture = next(
        arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.architecture
    )
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = []
    # tied ones once: llama.cpp has the head of the embedding then
    for name, parameter in module.named_parameters():
        new = names.get_name(name, (".weight", ".bias"))
        if new is None:
            raise ConfigError(
                f"--format gguf: llama.cpp's {family.architecture} has no weight {name!r}"
            )
        tensors.append((new, family.as_read(name, parameter.detach(), config)))
    factors = rope_factors(module)
    return tensors if factors is None else [*tensors, ("rope_freqs.weight", factors)]


def _add(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    """Add a tensor in its own dtype; vectors are in fp32, as llama.cpp reads them."""
    from gguf import GGMLQuantizationType, quants

    if tensor.ndim == 1:
        writer.add_tensor(name, tensor.float().numpy())
    elif tensor.dtype == torch.bfloat16:  # numpy has none
        kind = GGMLQuantizationType.BF16
        encoded = quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(name, encoded, raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())
