"""Which tokens a row hides: the same for seed, epoch and row, whoever reads it; and
what a row may be.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_cases import row_of
from stream_cases import check_alike
from tokenizers.processors import TemplateProcessing

from distcore.config import RunConfig
from distcore.errors import ConfigError, DataError
from distcore.plugin.task.datasets import varies
from distcore_tasks.masked_lm.embedded import EMBEDDED
from distcore_tasks.masked_lm.masking import Masking
from distcore_tasks.masked_lm.options import Tokenizer
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import load_tokenizer
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

TEXTS = [
    f"the {word} of day {row} was {'very ' * (row % 9)}long"
    for row in range(20)
    for word in ("river", "night")
]


def task_of(folder: Path, texts: list[Any] = TEXTS, **options: Any) -> MaskedLM:
    file, held_out = folder / "texts.jsonl", folder / "held-out.json"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    held_out.write_text(json.dumps([{"text": text} for text in TEXTS[:9]]))
    given: dict[str, Any] = {"data": str(file), "eval_data": str(held_out), "max_seq_len": 16}
    return MaskedLM(**(given | options))


def prepared(task: MaskedLM, seed: int = 0) -> tuple[Any, Any]:
    data: Any = task.prepare(RunConfig(seed=seed))
    return data, load_tokenizer("it", data.tokenizer)


def hidden(rows: Any, order: list[int]) -> dict[int, list[tuple[int, int, int]]]:
    """Of each row: where tokens have to be found, what the model reads there, and what they are."""
    batch = rows.batch(np.asarray(order))
    places = [(labels != IGNORED).nonzero().flatten().tolist() for labels in batch["labels"]]
    return {
        row: [
            (at, int(batch["input_ids"][place, at]), int(batch["labels"][place, at]))
            for at in places[place]
        ]
        for place, row in enumerate(order)
    }


@pytest.mark.parametrize("probability", [0.01, 0.15, 0.9])
def test_a_row_counts_as_many_tokens_in_each_epoch_as_it_says(
    probability: float, tmp_path: Path
) -> None:
    data, tokenizer = prepared(task_of(tmp_path, mask_probability=probability))
    rows = list(range(len(data.train)))
    special = set(tokenizer.all_special_ids)
    whole = [row_of(data.train, "tokens", row).tolist() for row in rows]
    ordinary = [sum(token not in special for token in tokens) for tokens in whole]
    assert data.train.items.tolist() == [max(1, round(probability * count)) for count in ordinary]
    assert data.facts["train"]["targets"] == data.train.items.sum()
    for epoch in range(3):
        varied = data.train.at(epoch)
        assert varied.items is data.train.items
        assert [
            len(tokens) for tokens in hidden(varied, rows).values()
        ] == data.train.items.tolist()


def test_masks_change_with_the_epoch_and_the_seed_and_with_nothing_else(tmp_path: Path) -> None:
    data, _ = prepared(task_of(tmp_path))
    order = [7, 3, 30, 11]
    first = hidden(data.train.at(4), order)
    data.train.at(0).batch(np.asarray([1, 2]))
    again, _ = prepared(task_of(tmp_path))
    assert hidden(again.train.at(4), [11, 1, 3, 7, 30]) == first | {
        1: hidden(data.train.at(4), [1])[1]
    }
    assert hidden(data.train.at(5), order) != first
    other, _ = prepared(task_of(tmp_path, eval_data=str(tmp_path / "held-out.json")), seed=1)
    assert hidden(other.train.at(4), order) != first


def test_evaluation_has_one_mask(tmp_path: Path) -> None:
    data, _ = prepared(task_of(tmp_path, test_data=str(tmp_path / "texts.jsonl")))
    assert varies(data.train)
    again, _ = prepared(task_of(tmp_path, test_data=str(tmp_path / "texts.jsonl")))
    for name in ("evaluation", "test"):
        assert not varies(getattr(data, name))
        assert hidden(getattr(data, name), [0, 5, 8]) == hidden(getattr(again, name), [0, 5, 8])


def test_special_tokens_are_never_hidden_and_all_else_stays_as_it_was(tmp_path: Path) -> None:
    data, tokenizer = prepared(task_of(tmp_path, mask_probability=0.5, tokenizer=Tokenizer(64)))
    special = set(tokenizer.all_special_ids)
    for epoch in range(10):
        batch = data.train.at(epoch).batch(np.arange(len(data.train)))
        is_hidden = batch["labels"] != IGNORED
        whole = torch.where(is_hidden, batch["labels"], batch["input_ids"])
        for row, tokens in enumerate(whole.numpy()):
            expected = row_of(data.train, "tokens", row)
            assert np.array_equal(tokens[: len(expected)], expected)
            assert (tokens[len(expected) :] == tokenizer.pad_token_id).all()
        assert not special.intersection(batch["labels"][is_hidden].tolist())
        read = set(batch["input_ids"][is_hidden].tolist())
        assert special.intersection(read) == {tokenizer.mask_token_id}


def test_four_fifths_of_the_targets_are_hidden_and_a_tenth_is_another_token() -> None:
    masking = Masking(mask=0, is_ordinary=np.arange(1001) > 0, seed=3)
    tokens = np.full(100, 5, np.int32)
    masked = [masking.masked(tokens, 50, 0, row) for row in range(200)]
    read = np.concatenate([row[places] for row, places in masked])
    assert len(np.unique(masked[0][1])) == 50
    assert (read == 0).mean() == pytest.approx(0.8, abs=0.02)
    assert (read == 5).mean() == pytest.approx(0.1, abs=0.02)
    assert len(set(read.tolist())) > 500  # any token of the vocabulary
    # any place
    assert np.bincount(np.concatenate([places for _, places in masked]), minlength=100).min() > 60


def test_a_longer_text_becomes_several_rows_or_is_cut(tmp_path: Path) -> None:
    text = " ".join(f"word {number}" for number in range(40))
    data, tokenizer = prepared(task_of(tmp_path, ["short", text], max_seq_len=12))
    rows = [row_of(data.train, "tokens", row).tolist() for row in range(len(data.train))]
    assert {(row[0], row[-1]) for row in rows} == {(tokenizer.cls_token_id, tokenizer.sep_token_id)}
    assert max(map(len, rows)) == 12
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [token for row in rows[1:] for token in row[1:-1]] == whole
    cut, _ = prepared(task_of(tmp_path, ["short", text], max_seq_len=12, split_texts=False))
    assert row_of(cut.train, "tokens", 1).tolist() == [
        tokenizer.cls_token_id,
        *whole[:10],
        tokenizer.sep_token_id,
    ]
    # one is held out
    assert cut.warnings[0].startswith("2 of 11 texts have more than 12 tokens and are cut")


def test_a_token_that_the_tokenizer_does_not_know_is_no_target(tmp_path: Path) -> None:
    unknown = "☃ ☃"
    words = as_transformers(train_wordpiece(TEXTS, 100))
    saved = model_folder(tmp_path, words)
    task = task_of(tmp_path, [*TEXTS, unknown], model=saved, max_seq_len=64)
    data, _ = prepared(task)
    assert data.train.items[-1] == 0
    assert data.warnings == (
        "1 of 50 rows have special or unknown tokens only: they are not masked and do not count",
    )
    model = task.build_model(RunConfig(), data)
    assert task.loss(model, data.train.batch(np.asarray([40]))).item() == 0
    with pytest.raises(DataError, match=r"texts.jsonl, for train: no token can be masked"):
        prepared(task_of(tmp_path, [unknown], model=saved))


def test_a_text_without_tokens_is_a_row_that_does_not_count_in_a_stream_too(tmp_path: Path) -> None:
    task = task_of(tmp_path, [*TEXTS, "\x01", "the river"], split_texts=False)
    stored, tokenizer = prepared(task)
    streamed, _ = prepared(replace(task, stream=True))
    assert row_of(stored.train, "tokens", 40).tolist() == [
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
    ]
    assert stored.train.items[40] == 0
    check_alike(streamed.train, stored.train, np.arange(42))


def model_folder(folder: Path, tokenizer: Any) -> str:
    from transformers import BertConfig, BertForMaskedLM

    sizes: Any = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=16)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def test_special_tokens_that_leave_no_room_are_refused(tmp_path: Path) -> None:
    words = as_transformers(train_wordpiece(TEXTS, 100))
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] [CLS] $A [SEP] [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    task = task_of(tmp_path, model=model_folder(tmp_path, words), max_seq_len=4)
    with pytest.raises(
        ConfigError, match=r"max_seq_len = 4: the tokenizer puts 4 special tokens around each row"
    ):
        task.prepare(RunConfig())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, r"row 3: text is missing \(null\), expected a string"),
        (" ", "row 3: text is empty: fill it in or remove the row"),
        (7, r"row 3: text is an integer \(7\), expected a string"),
    ],
)
def test_a_bad_text_is_named_by_file_and_row(text: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data file .*texts.jsonl, {problem}"):
        task_of(tmp_path, [*TEXTS[:2], text, *TEXTS]).prepare(RunConfig())


@pytest.mark.parametrize(("name", "least"), [("stdlib-lines", 10_000), ("stdlib-source", 100)])
@pytest.mark.programs
def test_the_embedded_texts_are_many_and_each_occurs_once(name: str, least: int) -> None:
    texts = EMBEDDED[name]().values
    assert len(set(texts)) == len(texts) > least
