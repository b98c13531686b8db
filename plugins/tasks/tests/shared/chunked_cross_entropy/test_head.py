"""Heads that answer by losses: those of their logits, for each model type, tied or not,
adapted, split and copied.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from config_keys import changes, with_others_slow
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distcore_tasks.shared.chunked_cross_entropy.head import chunk_head, has_chunked_head
from distcore_tasks.shared.chunked_cross_entropy.options import MODEL_TYPES

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
    "embedding_size": 32,
}
T5 = {"vocab_size": 160, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
OTHER: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 160, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "distilbert": {"vocab_size": 160, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "mixtral": SMALL | {"num_local_experts": 2},
    "t5": T5, "mt5": T5,
}  # fmt: skip
UNBUILT = {
    "add_cross_attention",
    "layer_types",
    "num_experts_per_tok",
    "per_layer_config",
    "rope_parameters",
}
"""Keys of which transformers itself refuses some value, in some types of models."""
ENCODERS = ("bert", "distilbert", "electra", "roberta", "xlm-roberta", "camembert")


def model_of(kind: str, **changes: Any) -> Any:
    """A model of random, large weights in evaluation mode, which has no dropout."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **OTHER.get(kind, SMALL) | changes)
    loader = (
        "MaskedLM" if kind in ENCODERS else "Seq2SeqLM" if kind in ("t5", "mt5") else "CausalLM"
    )
    model = getattr(transformers, f"AutoModelFor{loader}").from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def given() -> dict[str, Tensor]:
    """Six rows of up to 20 tokens, and a label for each of some positions."""
    torch.manual_seed(1)
    tokens, labels = torch.randint(3, 160, (6, 20)), torch.randint(3, 160, (6, 20))
    mask = (torch.arange(20) < torch.tensor([20, 3, 7, 20, 1, 11])[:, None]).long()
    labels[:, ::3] = -100
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, -100),
    }


def by_logits(model: Any, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss from whole logits, its gradient as one vector, and the
    loss of each position.
    """
    parts = given()
    asked = (
        parts
        if model.config.is_encoder_decoder
        else {k: v for k, v in parts.items() if k != "labels"}
    )
    logits = model(**asked).logits.flatten(0, 1)
    losses = cross_entropy(
        logits, parts["labels"].flatten(), reduction="none", label_smoothing=smoothing
    )
    return losses.sum().detach(), gradient_of(model, losses.sum()), losses.detach()


def in_chunks(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the head itself."""
    total = model(**given(), cross_entropy="sum").logits.sum()
    gradient = gradient_of(model, total)
    with torch.no_grad():
        return total.detach(), gradient, model(**given(), cross_entropy="rows").logits[0, :, 0]


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check(model: Any, smoothing: float = 0.0) -> None:
    logits = model(
        **{k: v for k, v in given().items() if k != "labels" or model.config.is_encoder_decoder}
    ).logits
    total, gradient, losses = by_logits(model, smoothing)
    chunk_head(model, smoothing)
    own_total, own_gradient, own_losses = in_chunks(model)
    assert abs(own_total - total) < 2e-6 * total
    assert (own_gradient - gradient).norm() < 2e-6 * gradient.norm()
    assert torch.allclose(own_losses, losses, rtol=1e-5, atol=1e-6)
    again = model(
        **{k: v for k, v in given().items() if k != "labels" or model.config.is_encoder_decoder}
    ).logits
    assert torch.equal(logits, again)  # a call without ``cross_entropy`` is as before


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_each_model_type_has_the_losses_of_its_logits(kind: str) -> None:
    check(model_of(kind))


@pytest.mark.parametrize("kind", with_others_slow(MODEL_TYPES, ("gpt2", "llama", "bert", "t5")))
def test_each_key_of_a_config_is_followed(kind: str) -> None:
    unbuilt = set()
    for key, value in changes(model_of(kind).config):
        try:
            model = model_of(kind, **{key: value})
            by_logits(model)
        except Exception:  # of the model itself, of whatever class
            unbuilt.add(key)
            continue
        try:
            check(model)
        except AssertionError as error:
            raise AssertionError(f"{key} = {value!r}") from error
    assert unbuilt <= UNBUILT


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_labels_are_smoothed(kind: str) -> None:
    check(model_of(kind), smoothing=0.2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_may_share_the_weight_of_the_embedding(tied: bool) -> None:
    model = model_of("llama", tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    check(model)


def test_a_type_that_changes_its_logits_is_not_among_them() -> None:
    model = model_of("gemma2", final_logit_softcapping=2.0, sliding_window=8)
    expected, *_ = by_logits(model)
    chunk_head(model)
    assert "gemma2" not in MODEL_TYPES
    assert abs(in_chunks(model)[0] - expected) > 0.1 * expected


def test_an_adapter_on_the_head_has_its_logits_whole() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model, adapter = (
        model_of("llama"),
        LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False),
    )
    chunk_head(model)
    inject_adapter_in_model(adapter, model)
    expected, gradient, _ = by_logits(model)
    total, own, _ = in_chunks(model)
    assert abs(total - expected) < 2e-6 * expected
    assert (own - gradient).norm() < 2e-6 * gradient.norm()


def test_a_split_head_has_its_logits_whole() -> None:
    model = model_of("llama")
    expected, *_ = by_logits(model)
    chunk_head(model)
    head, other = model.lm_head, model.lm_head.weight[80:].detach()
    head.weight = nn.Parameter(head.weight[:80].detach())
    head.register_forward_hook(lambda _, inputs, part: torch.cat((part, inputs[0] @ other.T), -1))
    assert abs(model(**given(), cross_entropy="sum").logits.sum() - expected) < 2e-6 * expected


def test_a_copy_has_a_head_of_its_own() -> None:
    model = model_of("llama")
    chunk_head(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    assert other.chunked_head.head is other.lm_head
    assert abs(in_chunks(other)[0] - by_logits(other)[0]) < 1e-3
    assert abs(in_chunks(other)[0] - in_chunks(model)[0]) > 0.1


def test_a_chunked_head_is_seen_inside_of_a_wrapper() -> None:
    model = model_of("gpt2")
    assert not has_chunked_head(nn.ModuleList([model]))
    chunk_head(model)
    assert has_chunked_head(nn.ModuleList([model]))
    assert not has_chunked_head(nn.Linear(2, 2))
