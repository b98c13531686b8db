"""Families of language models that llama.cpp computes as transformers does.

Sources: the file format is docs/gguf.md of ggml; names of tensors are those of the library gguf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distcore import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFWriter

ROPE_TYPES = ("default", "linear", "llama3")
"""Forms of rotary positions that are one factor per frequency, which a file can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How llama.cpp holds the models of one ``model_type``."""

    architecture: str
    """Its name there."""
    activation: str
    """The only activation that it has for them, as transformers names it."""
    describe: Callable[[GGUFWriter, Any], None]
    """Write the sizes of a config."""
    as_read: Callable[[str, Tensor, Any], Tensor]
    """Return the weight of a name, given the config, in the layout of llama.cpp."""
    plain: Mapping[str, Any]
    """Settings that llama.cpp does not know, and the only value at which it computes the same."""


def family_of(module: Any) -> Family:
    """Return the family of a model; raises ConfigError if llama.cpp would compute another one."""
    config: Any = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    has_head = type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if kind not in FAMILIES or not has_head:
        raise ConfigError(
            f"--format gguf: takes language models of {', '.join(FAMILIES)}, not a"
            f" {type(module).__name__}; export without --format, and convert that folder with"
            " llama.cpp's convert_hf_to_gguf.py"
        )
    family = FAMILIES[kind]
    rope = getattr(config, "rope_parameters", None) or {}
    settings = {"hidden_act": getattr(config, "hidden_act", None) or config.activation_function}
    for key in family.plain:
        if hasattr(config, key):
            settings[key] = getattr(config, key)
    settings["rope_type"] = rope.get("rope_type", "default")
    settings["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1)
    settings["is_causal"] = getattr(config, "is_causal", True)
    allowed = {
        "hidden_act": (family.activation,),
        "rope_type": ROPE_TYPES,
        "partial_rotary_factor": (1,),
        "is_causal": (True,),
    }
    allowed |= {key: (value,) for key, value in family.plain.items()}
    for key, value in settings.items():
        if value not in allowed[key]:
            raise ConfigError(
                f"--format gguf: llama.cpp's {family.architecture} has no {key} = {value!r}"
            )
    return family


def rope_factors(module: Any) -> Tensor | None:
    """Return by what each frequency of the rotary positions is divided, (head size / 2,);
    ``None`` if by nothing.
    """
    config = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") == "default":
        return None
    frequencies: Tensor = module.model.rotary_emb.inv_freq.float()
    steps = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    unscaled = torch.pow(rope["rope_theta"], -steps)
    return (unscaled / frequencies).float()


def _describe_llama(writer: GGUFWriter, config: Any) -> None:
    """Write the settings of Llama and its relatives."""
    size = _head_size(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _describe_gpt2(writer: GGUFWriter, config: Any) -> None:
    """Write the settings of GPT-2."""
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)


def _head_size(config: Any) -> int:
    head_size = getattr(config, "head_dim", None)
    return int(head_size or config.hidden_size // config.num_attention_heads)


def _same(name: str, weight: Tensor, config: Any) -> Tensor:
    return weight


def _llama(name: str, weight: Tensor, config: Any) -> Tensor:
    """Interleave the two halves of each head: llama.cpp rotates neighbors, transformers halves."""
    heads_of_layer = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    layer = name.split(".")[-2]
    heads = heads_of_layer.get(layer)
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).flatten(0, 2)


def _gpt2(name: str, weight: Tensor, config: Any) -> Tensor:
    """Transpose the layers of GPT-2, which hold (inputs, outputs)."""
    layer = name.split(".")[-2]
    is_matrix = weight.ndim == 2
    return weight.T if is_matrix and layer in ("c_attn", "c_proj", "c_fc") else weight


_LLAMA = Family(
    architecture="llama",
    activation="silu",
    describe=_describe_llama,
    as_read=_llama,
    plain={"sliding_window": None},
)
FAMILIES = {
    "gpt2": Family(
        architecture="gpt2",
        activation="gelu_new",
        describe=_describe_gpt2,
        as_read=_gpt2,
        plain={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": replace(_LLAMA, architecture="qwen2", as_read=_same),
    "qwen3": replace(_LLAMA, architecture="qwen3", as_read=_same),
}
"""By transformers' ``model_type``."""
