"""Each model type that is known to be right has the outputs and gradients of padded rows, under each kind of head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from distcore.tasks.masked_lm.options import MaskedOptions
from distcore.tasks.packing.groups import Groups
from distcore.tasks.packing.kinds import DECODERS, ENCODERS, RELATIVE, left_out, why_not
from distcore.tasks.packing.models import of_tokens, unpad
from distcore.tasks.seq2seq.options import Seq2SeqOptions
from distcore.tasks.text_classification.options import TextOptions
from distcore.tasks.token_classification.options import TagOptions

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
HEADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "text": ("AutoModelForSequenceClassification", TextOptions.unpadded),
    "tokens": ("AutoModelForTokenClassification", TagOptions.unpadded),
    "masked": ("AutoModelForMaskedLM", MaskedOptions.unpadded),
    "pairs": ("AutoModelForSeq2SeqLM", Seq2SeqOptions.unpadded),
}
READS: dict[str, Any] = {"text": "first", "masked": "tokens"}
CASES = [(head, kind) for head, (_, kinds) in HEADS.items() for kind in kinds]


def model_of(head: str, kind: str) -> Any:
    """A model of random, large weights, without dropout but in training mode."""
    torch.manual_seed(0)
    shape = transformers.AutoConfig.for_model(kind, **COMMON, **OTHER.get(kind, SMALL))
    model = getattr(transformers, HEADS[head][0]).from_config(shape)
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


def answers(head: str, model: Any) -> tuple[Tensor, Tensor]:
    """Logits of all rows or tokens, and the gradient of a sum in which each has a weight of its own, as one vector."""
    tokens, mask = batch()
    labels = {"labels": torch.where(mask > 0, tokens, -100)} if head == "pairs" else {}
    logits = model(input_ids=tokens, attention_mask=mask, **labels).logits
    logits = logits if head == "text" else of_tokens(logits, mask)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (logits * weights).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logits.detach(), torch.cat(gradients)


@pytest.mark.parametrize(("head", "kind"), CASES)
def test_outputs_and_gradients_are_those_of_padded_rows(head: str, kind: str) -> None:
    model = model_of(head, kind)
    logits, gradient = answers(head, model)
    undo = unpad(model, read=READS.get(head, "any"))
    found, packed = answers(head, model)
    assert not torch.equal(gradient, packed)  # it was computed in another way
    assert (found - logits).abs().max() < 2e-6 * logits.abs().max()
    assert (packed - gradient).norm() < 2e-6 * gradient.norm()
    undo()
    assert torch.equal(answers(head, model)[0], logits)


@pytest.mark.parametrize(("head", "kind"), [*(("tokens", kind) for kind in ("bert", "llama", "t5")), ("text", "bert")])
def test_blocks_that_are_computed_again_in_the_backward_pass(head: str, kind: str) -> None:
    model = model_of(head, kind)
    _, gradient = answers(head, model)
    model.gradient_checkpointing_enable()
    unpad(model, read=READS.get(head, "any"))
    assert (answers(head, model)[1] - gradient).norm() < 2e-6 * gradient.norm()


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_half_precision_keeps_its_dtype(kind: str) -> None:
    model = model_of("text", kind)
    unpad(model, read="first")
    tokens, mask = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(input_ids=tokens, attention_mask=mask).logits.shape == (len(LENGTHS), 3)


def test_a_model_goes_on_from_a_cache_as_ever() -> None:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **COMMON, **SMALL)
    ).eval()
    tokens, mask = batch()
    given = {"inputs": tokens.flip(1), "attention_mask": mask.flip(1), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**given)
    unpad(model, read="tokens")
    assert torch.equal(model.generate(**given, use_cache=True)[:, -4:], expected[:, -4:])


def test_t5_writes_the_same_without_padding() -> None:
    model = model_of("pairs", "t5").eval()
    tokens, mask = batch()
    given = {"inputs": tokens, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(**given)
    unpad(model)
    assert torch.equal(model.generate(**given), expected)


def test_an_attention_that_nobody_measured_is_named() -> None:
    assert why_not("xlnet", ENCODERS) == f"xlnet is none of {', '.join(ENCODERS)}"
    assert why_not("t5", RELATIVE) is None


@pytest.mark.parametrize("change", [lambda rows: rows.mul(0), lambda rows: rows.roll(1, 1)])
def test_this_page_sees_rows_that_are_put_back_wrongly(
    change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, right = model_of("tokens", "roberta"), Groups.padded
    logits, _ = answers("tokens", model)
    monkeypatch.setattr(Groups, "padded", lambda self, hidden: change(right(self, hidden)))
    unpad(model)
    assert (answers("tokens", model)[0] - logits).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_last_layer_gives_the_first_token_of_each_row_alone(kind: str) -> None:
    model, sizes = model_of("text", kind), []
    layers = [part for name, part in model.named_modules() if name.split(".")[-2:-1] == ["layer"]]
    for layer in layers:
        layer.register_forward_hook(lambda layer, given, found: sizes.append(found.shape[1]))
    unpad(model, read="first")
    answers("text", model)
    assert sizes == [sum(LENGTHS), len(LENGTHS)]
    assert left_out(model.config.to_dict()) == pytest.approx(5 / 6 / 2)


def test_a_decoder_s_layers_give_all_tokens() -> None:
    assert left_out({"model_type": "gpt2", "n_layer": 2}) == 0
    assert left_out({"model_type": "bert", "num_hidden_layers": 2, "is_decoder": True}) == 0


def test_this_page_sees_first_tokens_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = model_of("text", "bert"), Groups.by_row
    logits, _ = answers("text", model)
    monkeypatch.setattr(Groups, "by_row", lambda self, firsts: right(self, firsts).roll(1, 0))
    unpad(model, read="first")
    assert (answers("text", model)[0] - logits).abs().max() > 1e-2
