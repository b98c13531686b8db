"""Small models of each type that computes without padding, and what they answer: for tests on a CPU
and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from distcore_tasks.padding_free.supported_models import (
    DECODERS,
    ENCODERS,
    HEADS,
    RELATIVE,
    HeadName,
)
from distcore_tasks.shared.target_logits import logits_of_tokens

LENGTHS = [5, 1, 9, 9, 3, 30, 12, 9]  # in no order, some alike
COMMON: dict[str, Any] = {
    "vocab_size": 60,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 3,
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "embedding_size": 16,
    "max_position_embeddings": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WINDOWED = (
    "cohere2",
    "cwm",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
"""Decoders whose tokens may see a window of their row."""
WINDOW = {
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "no_rope_layers": [1, 0],
}
"""Less than the longest row. Of the two layers of a Qwen or SmolLM the first sees all."""
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_k": 2,
}
OTHER: dict[str, dict[str, Any]] = {
    "distilbert": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
}
LOADERS: dict[HeadName, str] = {
    "row classifier": "AutoModelForSequenceClassification",
    "token classifier": "AutoModelForTokenClassification",
    "masked tokens": "AutoModelForMaskedLM",
    "decoder": "AutoModelForSeq2SeqLM",
}
BOTH = ("gpt2", "llama", "qwen2", "qwen3")
"""Decoders with a case for either head. The layers' output, which is all that the heads of others
read, is the same.
"""
FEW = (*ENCODERS, *RELATIVE, *BOTH, "gemma2", "gpt_oss", "mistral", "mixtral")
"""Model types for tests that take long, and for ``make quick``: each other decoder computes
like one of them.
"""
UNBUILT = {"add_cross_attention", "layer_types", "per_layer_config", "rope_parameters"}
"""Keys of which transformers itself refuses some value, in some types of models."""
HEAD_SIZES = {"head_dim", "hidden_size", "num_attention_heads"}
UNBUILT_OF_TYPE = {
    "glm4_moe": {"topk_group"},
    "helium": HEAD_SIZES,
    "olmoe": HEAD_SIZES,
    "smollm3": {"num_hidden_layers"},
}
"""More of them, which go with other keys of the type."""
CASES = [
    (name, kind)
    for name, head in HEADS.items()
    for kind in head.types
    if name != "row classifier" or kind not in DECODERS or kind in BOTH
]


def programs_but_for_few(cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters, each a kind or a tuple that has one; of those that are
    not ``FEW`` as ``programs``.
    """
    kinds = [(case, {case} if isinstance(case, str) else set(case)) for case in cases]
    values = [(case, () if named & set(FEW) else pytest.mark.programs) for case, named in kinds]
    return [
        pytest.param(*([case] if isinstance(case, str) else case), marks=marks)
        for case, marks in values
    ]


def small_config(kind: str, **changes: Any) -> Any:
    """The config of a small model; a window in those that may have one, and experts in
    those that have some.
    """
    windows = WINDOW if kind in WINDOWED else {}
    sizes = OTHER.get(kind, SMALL | EXPERTS | windows)
    return transformers.AutoConfig.for_model(kind, **COMMON | sizes | changes)


def model_of(head: HeadName, kind: str, **changes: Any) -> Any:
    """A model of random, large weights, without dropout but in training mode; without a
    head if there is none.
    """
    torch.manual_seed(0)
    loader, shape = getattr(transformers, LOADERS[head]), small_config(kind, **changes)
    if type(shape) not in loader._model_mapping:
        loader = transformers.AutoModel
    return with_weights(loader.from_config(shape))


def causal_lm_of(kind: str, **changes: Any) -> Any:
    """A causal language model of random, large weights, without dropout but in training mode."""
    torch.manual_seed(0)
    loader: Any = transformers.AutoModelForCausalLM
    return with_weights(loader.from_config(small_config(kind, **changes)), std=0.3)


def with_weights(model: Any, std: float = 0.1) -> Any:
    """The model in training mode with random weights of this size, and without dropout."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=std)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in vars(module):
            if "drop" in name and isinstance(getattr(module, name), float):
                setattr(module, name, 0.0)
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    """Rows of random tokens, and their mask."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    tokens = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    return tokens * mask, mask.long()


def labels_of(tokens: Tensor, mask: Tensor) -> Tensor:
    """Targets of other lengths than the sources: those of the rows from behind,
    the first one empty.
    """
    targets = torch.where(mask > 0, tokens, -100).flip(0)
    targets[0] = -100
    return targets


def answers(head: HeadName, model: Any) -> tuple[Tensor, Tensor]:
    """Logits of rows or tokens, and the gradient of a sum in which each has a weight of its
    own, as one vector.

    Without a head they are the output of the layers.
    """
    tokens, mask = (part.to(model.device) for part in batch())
    labels = {"labels": labels_of(tokens, mask)} if head == "decoder" else {}
    logits = model(input_ids=tokens, attention_mask=mask, **labels)[
        0 if head != "decoder" else "logits"
    ]
    read = labels["labels"] != -100 if labels else mask
    logits = logits if head == "row classifier" else logits_of_tokens(logits, read)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(
        logits.device
    )
    model.zero_grad()
    (logits * weights).sum().backward()
    gradients = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]
    return logits.detach(), torch.cat(gradients)
