"""Pairs of texts: the model reads what the tokenizer of transformers makes of them, and bad
pairs are one line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_cases import labels_of, source_rows
from row_cases import all_of, row_of
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaTokenizerFast,
    XLNetConfig,
)

from distcore.config import RunConfig
from distcore.errors import ConfigError, DataError
from distcore_tasks.shared.vocabulary import train_byte_level
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece
from distcore_tasks.text_classification import embedded
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.task import TextClassification

PHRASES = Path(__file__).with_name("phrases.jsonl")
ROWS = [json.loads(line) for line in PHRASES.read_text().splitlines()]
TEXTS = [row[name] for row in ROWS for name in ("first", "second")]
LENGTH = 20
COLUMNS = Columns(text="first", text_pair="second", label="same")
TASK = TextClassification(
    data=str(PHRASES),
    columns=COLUMNS,
    model="bert-tiny",
    max_seq_len=LENGTH,
    dropout=0.0,
    eval_fraction=0.25,
)
SIZES: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


def bert(folder: Path) -> Any:
    as_transformers(train_wordpiece(TEXTS, 200)).save_pretrained(folder)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return BertTokenizer.from_pretrained(folder), BertConfig(**SIZES)


def roberta(folder: Path) -> Any:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    model = json.loads(train_byte_level(TEXTS, 500, special).to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    return RobertaTokenizerFast.from_pretrained(folder), RobertaConfig(
        **SIZES, type_vocab_size=1, pad_token_id=1
    )


def xlnet(folder: Path) -> Any:
    """A model that reads its answer from the last place, with a tokenizer that
    tells it of types.
    """
    wrapper: Any = PreTrainedTokenizerFast
    tokenizer = wrapper(
        tokenizer_object=train_wordpiece(TEXTS, 200),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[PAD]",
        padding_side="left",
    )
    return tokenizer, XLNetConfig(vocab_size=600, d_model=16, n_layer=1, n_head=2, d_inner=32)


@pytest.mark.parametrize("kind", [bert, roberta, xlnet])
def test_a_model_reads_what_its_own_tokenizer_makes_of_pairs(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (tmp_path / "files").mkdir()
    tokenizer, config = kind(tmp_path / "files")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    task = replace(TASK, model=str(folder))
    data: Any = task.prepare(RunConfig())
    rows = [ROWS[number] for number in source_rows(data.train)]
    texts = [row["first"] for row in rows], [row["second"] for row in rows]
    expected = AutoTokenizer.from_pretrained(folder)(
        *texts, truncation="longest_first", max_length=LENGTH, padding=True, return_tensors="pt"
    )
    batch = data.train.batch(np.arange(len(rows)))
    labels = batch.pop("labels")
    assert (
        set(batch)
        == set(expected)
        == {"input_ids", "attention_mask"} | (set() if kind is roberta else {"token_type_ids"})
    )
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    # some are padded, some are cut
    assert data.train.lengths.min() < data.train.lengths.max() == LENGTH
    if kind is not roberta:
        assert set(batch["token_type_ids"].flatten().tolist()) == {0, 1}
    with torch.no_grad():
        logits = task.build_model(RunConfig(), data).eval()(**expected).logits
        scores = task.outputs(
            task.build_model(RunConfig(), data).eval(), batch | {"labels": labels}
        )["scores"]
    assert torch.equal(logits.softmax(-1), scores)
    assert logits.std() > 0.1


def test_a_built_in_model_is_told_which_text_a_token_belongs_to_and_so_is_its_export(
    tmp_path: Path,
) -> None:
    data: Any = TASK.prepare(RunConfig())
    batch = data.train.batch(np.arange(4))
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    TASK.save(tmp_path, RunConfig(), data)
    rows = [ROWS[number] for number in source_rows(data.train)[:4]]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [row["first"] for row in rows], [row["second"] for row in rows]
    encoded = tokenizer(*texts, truncation=True, padding=True, return_tensors="pt")
    assert all(
        torch.equal(encoded[name], batch[name])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    )


def test_single_texts_have_no_types_and_the_content_that_they_always_had() -> None:
    import hashlib

    data: Any = replace(TASK, columns=replace(COLUMNS, text_pair=None)).prepare(RunConfig())
    assert set(data.train.batch(np.arange(4))) == {"input_ids", "attention_mask", "labels"}
    columns = (
        np.asarray(column, "<i8")
        for column in (all_of(data.train, "tokens"), data.train.lengths, labels_of(data.train))
    )
    assert (
        data.train.content
        == hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()
    )


def test_rows_that_differ_in_what_is_second_only_have_another_content(tmp_path: Path) -> None:
    """The same tokens on the other side of the border are other rows."""
    contents = set()
    for name, (first, second) in {"a": ("one two", "three"), "b": ("one", "two three")}.items():
        rows = [{"first": first, "second": second, "same": label} for label in (0, 1, 0, 1)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data: Any = replace(TASK, data=str(tmp_path / f"{name}.jsonl")).prepare(RunConfig())
        contents.add(data.train.content)
    assert len(contents) == 2


def test_the_vocabulary_is_learned_from_both_texts() -> None:
    data: Any = TASK.prepare(RunConfig())
    tokens = data.loaded_tokenizer.tokenize("asleep meal")
    assert tokens == ["asleep", "meal"]  # these words stand in second texts only
    assert not any(word in row["first"] for row in ROWS for word in tokens)


def test_pairs_that_are_cut_are_counted() -> None:
    data: Any = TASK.prepare(RunConfig())
    cut = int((data.train.lengths == LENGTH).sum() + (data.evaluation.lengths == LENGTH).sum())
    (line,) = (line for line in data.warnings if "are cut" in line)
    rows = data.loaded_tokenizer([row["first"] for row in ROWS], [row["second"] for row in ROWS])[
        "input_ids"
    ]
    longer = sum(len(row) > LENGTH for row in rows)
    assert line.startswith(f"{longer} of {len(ROWS)} rows have more than {LENGTH} tokens")
    assert 0 < longer <= cut < len(ROWS)


BAD = {
    "missing": (
        '{"first": "a b", "second": null, "same": 1}',
        r"row 2: text_pair is missing \(null\)",
    ),
    "blank": (
        '{"first": "a b", "second": " ", "same": 1}',
        "row 2: text_pair is empty: fill it in",
    ),
    "no column": (
        '{"first": "a b", "same": 1}',
        r"row 2: no column 'second', which the rows before it have",
    ),
    "a list": ('["a b", 1]', r"row 2: expected \[text, text_pair, label\]"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD.keys())
def test_a_pair_without_its_second_text_is_one_line(
    line: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('["a", "b", 0]\n' + line + "\n")
    with pytest.raises(DataError, match=rf"^data file .*bad\.jsonl, {message}") as caught:
        replace(TASK, data=str(tmp_path / "bad.jsonl")).prepare(RunConfig())
    assert "\n" not in str(caught.value)


def test_a_length_without_room_for_a_pair_is_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^max_seq_len = 4: a pair of texts takes at least 5 tokens$"
    ):
        replace(TASK, max_seq_len=4).prepare(RunConfig())
    data: Any = replace(TASK, max_seq_len=5).prepare(RunConfig())
    tokens = data.loaded_tokenizer.convert_ids_to_tokens(row_of(data.train, "tokens", 0))
    assert [tokens[place] for place in (0, 2, 4)] == ["[CLS]", "[SEP]", "[SEP]"]


def test_pairs_of_docstrings_come_from_one_docstring_each(tmp_path: Path) -> None:
    one, two, three = (
        f"Paragraph {number} says something that is long enough."
        for number in ("one", "two", "three")
    )
    (tmp_path / "queue.py").write_text(
        f'"""{one}\n\n{two}\n\n{three}\n"""\ndef f():\n    """{one}\n\n{three}"""\n'
    )
    (tmp_path / "glob.py").write_text(f'"""{three}"""')
    (row,) = embedded.collect_pairs(tmp_path)
    assert row in {(one, two, "in order"), (two, one, "swapped")}


@pytest.mark.programs
def test_stdlib_pairs_are_pairs_without_a_column_for_them() -> None:
    rows = embedded.stdlib_pairs().values
    assert len(rows) > 1000
    share = [row.label for row in rows].count("swapped") / len(rows)
    assert 0.45 < share < 0.55
    assert len({text for row in rows for text in row.texts}) == 2 * len(rows)
    task = replace(TASK, data="stdlib-pairs", columns=Columns())
    assert task.row_columns() == {"columns.text": "text", "columns.text_pair": "text_pair"}
    assert "token_type_ids" in task.prepare(RunConfig()).train.batch(np.arange(2))


@pytest.mark.slow
@pytest.mark.programs
def test_an_embedded_dataset_of_the_other_kind_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"^dataset stdlib-docs: has one text per row, but columns.text_pair asks for",
    ):
        replace(TASK, data="stdlib-docs").prepare(RunConfig())
    single = replace(TASK, columns=replace(COLUMNS, text_pair=None), eval_data="stdlib-pairs")
    with pytest.raises(
        DataError, match=r"^dataset stdlib-pairs: has pairs of texts; use it with rows of the"
    ):
        single.prepare(RunConfig())
    with pytest.raises(
        DataError, match=r"^dataset stdlib-docs: .*problem_type = 'regression' needs a file$"
    ):
        replace(TASK, data="stdlib-docs", columns=Columns(), problem_type="regression").prepare(
            RunConfig()
        )
