"""Small models of each type that computes without padding, and what they answer: for tests on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from distcore_tasks.padding_free.supported_models import HEADS, HeadName
from distcore_tasks.shared.target_logits import logits_of_tokens

LENGTHS = [5, 1, 9, 9, 3, 30, 12, 9]  # in no order, some alike
COMMON: dict[str, Any] = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3}
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "embedding_size": 16,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
OTHER: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
LOADERS: dict[HeadName, str] = {
    "row classifier": "AutoModelForSequenceClassification",
    "token classifier": "AutoModelForTokenClassification",
    "masked tokens": "AutoModelForMaskedLM",
    "decoder": "AutoModelForSeq2SeqLM",
}
CASES = [(name, kind) for name, head in HEADS.items() for kind in head.types]


def model_of(head: HeadName, kind: str) -> Any:
    """A model of random, large weights, without dropout but in training mode."""
    torch.manual_seed(0)
    shape = transformers.AutoConfig.for_model(kind, **COMMON, **OTHER.get(kind, SMALL))
    model = getattr(transformers, LOADERS[head]).from_config(shape)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    """Rows of random tokens, and their mask."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    tokens = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    return tokens * mask, mask.long()


def answers(head: HeadName, model: Any) -> tuple[Tensor, Tensor]:
    """Logits of all rows or tokens, and the gradient of a sum in which each has a weight of its own, as one vector."""
    tokens, mask = (part.to(model.device) for part in batch())
    labels = {"labels": torch.where(mask > 0, tokens, -100)} if head == "decoder" else {}
    logits = model(input_ids=tokens, attention_mask=mask, **labels).logits
    logits = logits if head == "row classifier" else logits_of_tokens(logits, mask)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.device)
    model.zero_grad()
    (logits * weights).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logits.detach(), torch.cat(gradients)
