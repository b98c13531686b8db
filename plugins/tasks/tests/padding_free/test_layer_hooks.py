"""Each model type that is known to be right has the outputs and gradients of padded rows, under
each kind of head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from sys import maxsize
from typing import Any

import pytest
import torch
import transformers
from config_keys import changes, with_others_slow
from padding_free_models import (
    BOTH,
    CASES,
    COMMON,
    LENGTHS,
    SMALL,
    UNBUILT,
    UNBUILT_OF_TYPE,
    WINDOWED,
    answers,
    batch,
    model_of,
    programs_but_for_few,
    small_config,
)
from torch import Tensor

from distcore_tasks.padding_free import attention, layer_hooks, token_sequence
from distcore_tasks.padding_free.layer_hooks import RECURRING, enable_padding_free
from distcore_tasks.padding_free.supported_models import (
    DECODERS,
    ENCODERS,
    HEADS,
    RELATIVE,
    HeadName,
    skipped_fraction,
    why_not,
)
from distcore_tasks.padding_free.token_sequence import Bounds, Crossing, TokenSequence


@pytest.mark.parametrize(("head", "kind"), programs_but_for_few(CASES))
def test_outputs_and_gradients_are_those_of_padded_rows(
    head: HeadName, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(head, kind)
    logits, gradient = answers(head, model)
    undo = enable_padding_free(model, read=HEADS[head].reads)
    for repeats in (False, True):  # tokens up to a round number, as for bf16
        monkeypatch.setattr(layer_hooks, "_is_low_precision", lambda *_, repeats=repeats: repeats)
        answer, padding_free = answers(head, model)
        assert not torch.equal(gradient, padding_free)  # it was computed in another way
        assert (answer - logits).abs().max() < 2e-6 * logits.abs().max()
        assert (padding_free - gradient).norm() < 2e-6 * gradient.norm()
    undo()
    assert torch.equal(answers(head, model)[0], logits)


APART = {
    "pad_token_id": "a task sets it to that of its tokenizer",
    "router_jitter_noise": "the model draws a random number for each token",
}
"""Keys that answers may differ by, and why."""
FEW_KEYS: list[tuple[HeadName, str]] = [
    ("row classifier", "bert"),
    ("masked tokens", "bert"),
    ("row classifier", "distilbert"),
    ("decoder", "t5"),
    ("row classifier", "gpt2"),
    ("token classifier", "llama"),
    ("token classifier", "qwen2"),
    ("token classifier", "gemma2"),
]


@pytest.mark.parametrize(("head", "kind"), with_others_slow(CASES, FEW_KEYS))
def test_each_key_of_a_config_is_followed_or_refused(head: HeadName, kind: str) -> None:
    wrong, unbuilt = [], set()
    for key, value in changes(small_config(kind)):
        if key in APART:
            continue
        try:
            model = model_of(head, kind, **{key: value})
            logits, gradient = answers(head, model)
        except Exception:  # of the model itself, of whatever class
            unbuilt.add(key)
            continue
        if why_not(model.config.to_dict(), HEADS[head].types):
            continue
        enable_padding_free(model, read=HEADS[head].reads)
        answer, padding_free = answers(head, model)
        is_same = (answer - logits).abs().max() < 2e-6 * logits.abs().max()
        if not (is_same and (padding_free - gradient).norm() < 2e-6 * gradient.norm()):
            wrong.append((key, value))
    assert wrong == []
    assert unbuilt <= UNBUILT | UNBUILT_OF_TYPE.get(kind, set())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows attend in one call, as on an accelerator; on a CPU torch can do that for models
    that look both ways.
    """
    monkeypatch.setattr(layer_hooks, "has_jagged_attention", lambda device: True)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("head", "kind"),
    # the last in groups
    [case for case in CASES if case[1] in (*ENCODERS, *RELATIVE, "gemma2", "gpt_oss", "mistral")],
)
def test_rows_that_attend_at_once_are_what_they_are_padded(head: HeadName, kind: str) -> None:
    model = model_of(head, kind)
    logits, gradient = answers(head, model)
    enable_padding_free(model, read=HEADS[head].reads)
    answer, padding_free = answers(head, model)
    assert (answer - logits).abs().max() < 2e-6 * logits.abs().max()
    assert (padding_free - gradient).norm() < 2e-6 * gradient.norm()


@pytest.mark.parametrize(
    ("kind", "longest"), [("llama", maxsize), ("mistral", 8), ("gemma2", 0), ("t5", 0)]
)
def test_rows_that_are_longer_than_a_window_attend_in_groups(kind: str, longest: int) -> None:
    model = model_of("token classifier", kind)
    enable_padding_free(model)
    assert layer_hooks._longest_at_once(kind, model.config) == longest


@pytest.mark.usefixtures("at_once")
def test_rows_that_attend_to_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("row classifier", "bert")
    logits, _ = answers("row classifier", model)
    two = Bounds(torch.tensor([0, 30, sum(LENGTHS)]), 30, sum(LENGTHS) - 30)
    monkeypatch.setattr(token_sequence, "_bounds", lambda first, sizes, like: two)
    enable_padding_free(model)
    assert (answers("row classifier", model)[0] - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("head", "kind"),
    [*(("token classifier", kind) for kind in ("bert", "llama", "t5")), ("row classifier", "bert")],
)
def test_blocks_that_are_computed_again_in_the_backward_pass(head: HeadName, kind: str) -> None:
    model = model_of(head, kind)
    _, gradient = answers(head, model)
    model.gradient_checkpointing_enable()
    enable_padding_free(model, read=HEADS[head].reads)
    assert (answers(head, model)[1] - gradient).norm() < 2e-6 * gradient.norm()


@pytest.mark.parametrize("kind", [*ENCODERS, *BOTH, "gemma2", "mistral"])
def test_half_precision_keeps_its_dtype(kind: str) -> None:
    model = model_of("row classifier", kind)
    enable_padding_free(model, read="first")
    tokens, mask = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(input_ids=tokens, attention_mask=mask).logits.shape == (len(LENGTHS), 3)


@pytest.mark.parametrize(
    "lowered", [torch.autocast("cpu", dtype=torch.bfloat16), torch.float16, None]
)
def test_tokens_have_a_round_number_in_low_precision(lowered: Any) -> None:
    model = model_of("row classifier", "bert").to(
        lowered if isinstance(lowered, torch.dtype) else torch.float32
    )
    enable_padding_free(model, read="first")
    tokens, mask, sizes = *batch(), list[int]()
    model.base_model.encoder.layer[0].register_forward_pre_hook(
        lambda layer, given: sizes.append(given[0].shape[1])
    )
    with lowered if isinstance(lowered, torch.autocast) else nullcontext():
        model(input_ids=tokens, attention_mask=mask)
    assert sum(LENGTHS) % RECURRING
    assert sizes == [sum(LENGTHS) + (-sum(LENGTHS) % RECURRING if lowered else 0)]


def test_a_model_goes_on_from_a_cache_as_ever() -> None:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **COMMON, **SMALL)
    ).eval()
    tokens, mask = batch()
    given = {
        "inputs": tokens.flip(1),
        "attention_mask": mask.flip(1),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    expected = model.generate(**given)
    enable_padding_free(model, read="tokens")
    assert torch.equal(model.generate(**given, use_cache=True)[:, -4:], expected[:, -4:])


def test_t5_writes_the_same_without_padding() -> None:
    model = model_of("decoder", "t5").eval()
    tokens, mask = batch()
    given = {"inputs": tokens, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(**given)
    enable_padding_free(model)
    assert torch.equal(model.generate(**given), expected)


def test_a_decoder_s_layers_compute_no_padding() -> None:
    model, sizes = model_of("decoder", "t5"), []
    for stack in (model.encoder, model.decoder):
        stack.block[0].register_forward_hook(
            lambda block, given, outputs: sizes.append(outputs[0].shape[1])
        )
    enable_padding_free(model)
    answers("decoder", model)
    assert sizes == [sum(LENGTHS), sum(LENGTHS[::-1][1:])]


def test_a_decoder_that_reads_other_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = model_of("decoder", "t5"), token_sequence.crossing_of
    logits, _ = answers("decoder", model)

    def shifted(*sequences: TokenSequence) -> Crossing:
        made = right(*sequences)
        return replace(made, places=made.places.roll(1), back=made.back.roll(1))

    monkeypatch.setattr(layer_hooks, "crossing_of", shifted)
    enable_padding_free(model)
    assert (answers("decoder", model)[0] - logits).abs().max() > 1e-2 * logits.abs().max()


@pytest.mark.parametrize("read", [None, torch.tensor([[1, 1], [0, 0]])])
def test_a_decoder_pads_if_a_row_has_nothing_to_read(read: Tensor | None) -> None:
    model = model_of("decoder", "t5")
    given = {
        "input_ids": torch.ones(2, 2, dtype=torch.long),
        "labels": torch.tensor([[5, 6], [7, -100]]),
    }
    expected = model(**given, attention_mask=read).logits
    enable_padding_free(model)
    assert (model(**given, attention_mask=read).logits - expected)[
        0
    ].abs().max() < 2e-6 * expected.abs().max()


def test_an_attention_that_nobody_measured_is_named() -> None:
    assert why_not({"model_type": "xlnet"}, ENCODERS) == f"xlnet is none of {', '.join(ENCODERS)}"
    assert why_not({"model_type": "t5"}, RELATIVE) is None


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (
            "qwen2_moe",
            {"use_sliding_window": True},
            "has layers whose tokens see a window of their row",
        ),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention"] * 2},
            "has layers whose tokens see a window of their row",
        ),
        ("llama", {"layer_types": ["full_attention", "conv"]}, "has layers of type conv"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends to later tokens, too"),
        ("qwen3", {"is_causal": False}, "attends to later tokens, too"),
    ],
)
def test_an_attention_that_is_not_told_is_refused(
    kind: str, change: dict[str, Any], reason: str
) -> None:
    shape = small_config(kind).to_dict()
    assert why_not(shape, DECODERS) is None
    assert why_not(shape | change, DECODERS) == f"this {kind} {reason}"


@pytest.mark.parametrize("kind", programs_but_for_few(WINDOWED))
def test_a_window_that_is_ignored_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = model_of("token classifier", kind), attention._window
    logits, _ = answers("token classifier", model)
    monkeypatch.setattr(
        attention, "_window", lambda tokens, window, device: right(tokens, None, device)
    )
    enable_padding_free(model)
    assert (answers("token classifier", model)[0] - logits).abs().max() > 1e-2 * logits.abs().max()


@pytest.mark.parametrize("change", [lambda rows: rows.mul(0), lambda rows: rows.roll(1, 1)])
def test_rows_that_are_put_back_wrongly_are_seen(
    change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, right = model_of("token classifier", "roberta"), TokenSequence.padded
    logits, _ = answers("token classifier", model)
    monkeypatch.setattr(TokenSequence, "padded", lambda self, hidden: change(right(self, hidden)))
    enable_padding_free(model)
    assert (answers("token classifier", model)[0] - logits).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_last_layer_gives_the_first_token_of_each_row_alone(kind: str) -> None:
    model, sizes = model_of("row classifier", kind), []
    layers = [part for name, part in model.named_modules() if name.split(".")[-2:-1] == ["layer"]]
    for layer in layers:
        layer.register_forward_hook(lambda layer, given, output: sizes.append(output.shape[1]))
    enable_padding_free(model, read="first")
    answers("row classifier", model)
    assert sizes == [sum(LENGTHS), len(LENGTHS)]
    assert skipped_fraction(model.config.to_dict()) == pytest.approx(5 / 6 / 2)


def test_a_decoder_s_layers_give_all_tokens() -> None:
    assert skipped_fraction({"model_type": "gpt2", "n_layer": 2}) == 0
    assert skipped_fraction({"model_type": "bert", "num_hidden_layers": 2, "is_decoder": True}) == 0


def test_first_tokens_of_other_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = model_of("row classifier", "bert"), TokenSequence.by_row
    logits, _ = answers("row classifier", model)
    monkeypatch.setattr(
        TokenSequence, "by_row", lambda self, firsts: right(self, firsts).roll(1, 0)
    )
    enable_padding_free(model, read="first")
    assert (answers("row classifier", model)[0] - logits).abs().max() > 1e-2
