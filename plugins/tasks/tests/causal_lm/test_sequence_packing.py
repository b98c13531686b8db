"""A row has the same losses alone, padded and packed, for every model type that is said to pack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_keys import changes, with_others_slow
from padding_free_models import (
    BOTH,
    FEW,
    UNBUILT,
    UNBUILT_OF_TYPE,
    WINDOWED,
    causal_lm_of,
    programs_but_for_few,
    small_config,
)
from row_mask_cases import RUN, forward_of, with_dropout

from distcore.config import RunConfig
from distcore.errors import ModelError
from distcore.model.row_dropout import use_row_masks
from distcore_tasks.causal_lm.rows import CausalRows, sequence_table
from distcore_tasks.causal_lm.sequence_packing import MODEL_TYPES, UNPACKED
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.causal_lm.windows import COUNTED, FIRST
from distcore_tasks.padding_free.supported_models import why_unknown
from distcore_tasks.rows.dataset import RowDataset, row_dataset
from distcore_tasks.rows.pipeline import TokenizerInfo
from distcore_tasks.rows.table import CachedTable
from distcore_tasks.shared.jagged import IGNORED

VOCABULARY = 60
LENGTHS = [7, 1, 12, 3, 12, 5]
ATTENTIONS = [
    (kind, attention)
    for kind in MODEL_TYPES
    for attention in (
        ("eager",) if kind == "gemma2" else ("sdpa", "eager") if kind in BOTH else ("sdpa",)
    )
]


def model_of(kind: str, attention: str) -> Any:
    """A model of random, large weights whose windows, if any, are shorter than the rows."""
    return causal_lm_of(
        kind, attn_implementation=attention, **{"sliding_window": 4} if kind in WINDOWED else {}
    ).eval()


@pytest.fixture
def table() -> CachedTable:
    """Six rows of random tokens; the third is two documents."""
    random = np.random.default_rng(0).integers(3, VOCABULARY, sum(LENGTHS) + len(LENGTHS))
    # A row has one token more than it reads.
    ends = np.cumsum(np.asarray(LENGTHS) + 1)
    tokens = np.split(random.astype(np.int32), ends[:-1])
    flags = [np.full(len(row), COUNTED, np.uint8) for row in tokens]
    flags[2][5] = FIRST
    return sequence_table(tokens, flags)


def rows_of(table: CachedTable, packed: bool) -> RowDataset:
    return row_dataset(CausalRows(CausalLM(), is_packed=packed), table, TokenizerInfo(0))


def losses(model: Any, table: CachedTable, rows: list[int], packed: bool) -> list[float]:
    dataset = rows_of(table, packed)
    with torch.no_grad():
        outputs = CausalLM().outputs(model, dataset.batch(np.asarray(rows)))
    assert outputs["tokens"].tolist() == dataset.items[np.asarray(rows)].tolist()
    return [float(loss) for loss in outputs["loss"]]


@pytest.mark.parametrize(("kind", "attention"), programs_but_for_few(ATTENTIONS))
def test_a_row_has_one_loss_alone_padded_and_packed(
    kind: str, attention: str, table: CachedTable
) -> None:
    model = model_of(kind, attention)
    one_document = [0, 1, 3, 4, 5]
    alone = [losses(model, table, [row], packed=False)[0] for row in one_document]
    assert losses(model, table, one_document, packed=True) == pytest.approx(alone, rel=1e-5)
    assert losses(model, table, one_document, packed=False) == pytest.approx(alone, rel=1e-5)


APART = {"router_jitter_noise": "the model draws a random number for each token"}
"""Keys that losses may differ by, and why."""


@pytest.mark.parametrize("kind", with_others_slow(MODEL_TYPES, ("gpt2", "mistral")))
def test_each_key_of_a_config_is_followed_or_refused(kind: str, table: CachedTable) -> None:
    one_document = [0, 1, 3, 4, 5]
    alone, packed = rows_of(table, packed=False), rows_of(table, packed=True)
    wrong, unbuilt = [], set()
    attention = "eager" if kind == "gemma2" else "sdpa"
    with use_row_masks(RUN):
        for key, value in changes(small_config(kind)):
            if key in APART:
                continue
            try:
                model = causal_lm_of(kind, attn_implementation=attention, **{key: value})
                rows = [[row] for row in one_document]
                losses, gradient = losses_and_gradient(model, alone, rows)
            except Exception:  # of the model itself, of whatever class
                unbuilt.add(key)
                continue
            if why_unknown(model.config.to_dict(), MODEL_TYPES):
                continue
            together, of_packed = losses_and_gradient(model, packed, [one_document])
            is_same = (together - losses).abs().max() < 1e-5 * losses.abs().max()
            if is_same and (of_packed - gradient).norm() < 1e-5 * gradient.norm():
                continue
            # Scaled embeddings and many experts round by more. Then float64 tells, far below.
            model.set_experts_implementation("eager")
            model.double()
            losses, gradient = losses_and_gradient(model, alone, rows)
            together, of_packed = losses_and_gradient(model, packed, [one_document])
            is_same = (together - losses).abs().max() < 1e-6 * losses.abs().max()
            if not (is_same and (of_packed - gradient).norm() < 1e-9 * gradient.norm()):
                wrong.append((key, value))
    assert wrong == []
    assert unbuilt <= UNBUILT | UNBUILT_OF_TYPE.get(kind, set())


@pytest.mark.parametrize("kind", UNPACKED)
def test_rows_of_other_decoders_see_each_other_in_a_sequence(kind: str, table: CachedTable) -> None:
    model = model_of(kind, "eager")
    rows = [0, 1, 3, 4, 5]
    assert losses(model, table, rows, packed=True) != pytest.approx(
        losses(model, table, rows, packed=False), rel=0.01
    )


def losses_and_gradient(
    model: Any, dataset: Any, cuts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the rows, and the gradient of their sum, with dropout by
    row, over micro-batches ``cuts``.
    """
    model.zero_grad()
    made: dict[int, torch.Tensor] = {}
    for rows in cuts:
        with forward_of(100 + np.asarray(rows)):
            losses = CausalLM().outputs(model, dataset.batch(np.asarray(rows)))["loss"]
        losses.sum().backward()
        made |= dict(zip(rows, losses.detach(), strict=True))
    gradient = torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )
    return torch.stack([made[row] for row in sorted(made)]), gradient


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cuts", [[[0, 1, 3, 4, 5]], [[3, 4], [5, 0, 1]], [[3], [5, 0, 1], [4]]])
def test_dropout_masks_of_packed_rows_are_those_of_padded_ones(
    attention: str, cuts: list[list[int]], table: CachedTable
) -> None:
    rows = rows_of(table, packed=False)
    model = with_dropout(model_of("gpt2", attention).train(), 0.3)
    with use_row_masks(RUN) as masks:
        assert masks is not None
        wanted, gradient = losses_and_gradient(model, rows, [[0, 1, 3, 4, 5]])
        losses, packed = losses_and_gradient(model, rows_of(table, packed=True), cuts)
        assert masks.outside is None
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed, gradient, rtol=1e-4, atol=1e-5)


def test_rows_share_a_sequence_where_there_is_room(table: CachedTable) -> None:
    dataset = rows_of(table, packed=True)
    batch = dataset.batch(np.asarray([0, 1, 2, 3, 4, 5]))
    lines = zip(batch["row"], batch["labels"], strict=True)
    rows = [sorted({int(row) for row in line[labels != IGNORED]}) for line, labels in lines]
    assert rows == [[2], [4], [0, 5], [1, 3]]
    assert batch["input_ids"].shape == (4, 12)


@pytest.mark.parametrize(("kind", "attention"), [case for case in ATTENTIONS if case[0] in FEW])
def test_a_document_sees_nothing_of_the_one_before_it(
    kind: str, attention: str, table: CachedTable
) -> None:
    model = model_of(kind, attention)
    dataset = rows_of(table, packed=True)
    batch = dataset.batch(np.asarray([2, 0]))
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    first, second = (
        model(input_ids=batch["input_ids"][:1, part], use_cache=False).logits
        for part in (slice(0, 5), slice(5, 12))
    )
    names = ("input_ids", "position_ids")
    together = model(**{name: batch[name] for name in names}, use_cache=False).logits[:1]
    assert torch.allclose(together, torch.cat([first, second], 1), atol=1e-5)


def test_the_first_token_of_a_document_is_no_target(table: CachedTable) -> None:
    dataset = rows_of(table, packed=True)
    labels = dataset.batch(np.asarray([2]))["labels"][0]
    assert (labels == IGNORED).nonzero().flatten().tolist() == [4]
    assert np.asarray(dataset.items).tolist() == [7, 1, 11, 3, 12, 5]


def saved(kind: str, folder: Path) -> str:
    model_of(kind, "sdpa").save_pretrained(folder)
    train_tokenizer(["a b c"], 300).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("options", "packing", "named"),
    [
        ({}, "on", "padding_free = 'on'"),
        ({"split_documents": True}, "auto", "task_options.split_documents = true"),
    ],
)
def test_a_model_type_that_nobody_measured_is_not_packed(
    options: dict[str, Any],
    packing: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distcore_tasks.causal_lm.sequence_packing.MODEL_TYPES", ("gpt2",))
    model = saved("llama", tmp_path / "model")
    with pytest.raises(ModelError, match=rf"^{named}: .* not known to be exact: llama is none of"):
        CausalLM(model=model, **options).prepare(RunConfig(padding_free=packing))
