"""The forms of valid pairs, their model inputs, and the error line of an invalid one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcore.config import RunConfig
from distcore.errors import ConfigError, DataError
from distcore_tasks.seq2seq import embedded
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import load_tokenizer

PAIRS = [
    {"source": f"what comes after {row}?", "target": f"{row + 1} ü" + " and on" * (row % 3)}
    for row in range(9)
]


def task_of(folder: Path, rows: list[Any], **options: Any) -> Seq2Seq:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Seq2Seq(**({"data": str(folder / "pairs.jsonl")} | options))


def prepared(task: Seq2Seq) -> tuple[Any, Any]:
    data: Any = task.prepare(RunConfig())
    return data, load_tokenizer("it", data.tokenizer)


def test_a_row_is_a_source_with_its_prefix_and_a_target_and_both_end(tmp_path: Path) -> None:
    (tmp_path / "held-out.json").write_text(json.dumps(PAIRS[:2]))
    held_out = str(tmp_path / "held-out.json")
    data, tokenizer = prepared(task_of(tmp_path, PAIRS, prefix="answer: ", eval_data=held_out))
    batch = data.evaluation.batch(np.arange(2))
    assert (
        tokenizer.decode(batch["input_ids"][0]).replace("<pad>", "")
        == "answer: what comes after 0?</s>"
    )
    labels = batch["labels"][0]
    assert tokenizer.decode(labels[labels != IGNORED]) == "1 ü</s>"
    assert data.evaluation.items[0] == (labels != IGNORED).sum()
    assert (batch["attention_mask"].sum(1) + (batch["labels"] != IGNORED).sum(1)).tolist() == list(
        data.evaluation.lengths
    )
    assert bytes(batch["target_text"].tolist()).decode() == "".join(
        row["target"] for row in PAIRS[:2]
    )
    assert "target_text" not in data.train.batch(np.arange(2))


def test_longer_texts_are_cut_and_counted_and_end_all_the_same(tmp_path: Path) -> None:
    data, tokenizer = prepared(task_of(tmp_path, PAIRS, max_seq_len=5, max_target_len=3))
    batch = data.train.batch(np.arange(len(data.train)))
    assert (batch["input_ids"].shape[1], batch["labels"].shape[1]) == (5, 3)
    last = batch["attention_mask"].sum(1) - 1
    assert set(batch["input_ids"].gather(1, last[:, None]).flatten().tolist()) == {
        tokenizer.eos_token_id
    }
    assert data.facts["train"]["sources_cut"] == len(data.train)
    assert [line.split(" have ")[0] for line in data.warnings] == [
        "9 of 9 sources",
        "6 of 9 targets",
    ]


def test_the_report_has_the_baselines_of_the_rows(tmp_path: Path) -> None:
    rows = [{"source": f"row {row}", "target": "yes" if row % 4 else "no"} for row in range(40)]
    (tmp_path / "held-out.json").write_text(json.dumps(rows[:4]))
    data, _ = prepared(task_of(tmp_path, rows, eval_data=str(tmp_path / "held-out.json")))
    assert data.facts["evaluation"]["commonest_target"] == 0.75
    assert 1 < data.facts["evaluation"]["unigram_perplexity"] < 20  # each token counts once more


@pytest.mark.parametrize(
    ("name", "row"), [("stdlib-words", "is alive"), ("stdlib-names", "is_alive")]
)
@pytest.mark.programs
def test_the_embedded_rows_are_thousands_and_no_source_occurs_twice(name: str, row: str) -> None:
    pairs = embedded.EMBEDDED[name]()
    assert len(pairs.values) > 2000
    assert len({source for source, _ in pairs.values}) == len(pairs.values)
    assert row in [target for _, target in pairs.values]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (["only one"], r"row 3: expected \[source, target\] or .*found a list of 1 values"),
        ({"source": "a"}, r"row 3: no column 'target', which the rows before it have; fill it in"),
        ({"source": "a", "target": None}, r"row 3: target is missing \(null\), expected a string"),
        ({"source": " ", "target": "b"}, "row 3: source is empty: fill it in or remove the row"),
        ({"source": "a", "target": 7}, r"row 3: target is an integer \(7\), expected a string"),
    ],
)
def test_a_bad_pair_is_named_by_file_and_row(row: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data file .*pairs.jsonl, {problem}") as raised:
        task_of(tmp_path, [*PAIRS[:2], row, *PAIRS[2:]]).prepare(RunConfig())
    assert "\n" not in str(raised.value)


def test_a_source_of_which_the_prefix_leaves_nothing_is_named(tmp_path: Path) -> None:
    """Held-out rows are encoded first: few of them tell what is wrong with all."""
    (tmp_path / "held-out.json").write_text(json.dumps(PAIRS))
    task = task_of(
        tmp_path,
        PAIRS,
        prefix="a b c d e f g h: ",
        max_seq_len=8,
        eval_data=str(tmp_path / "held-out.json"),
    )
    with pytest.raises(
        DataError,
        match=r"held-out.json, row 1: the source is cut off entirely: .* raise --max-seq-len",
    ):
        task.prepare(RunConfig())


def test_generation_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python's own way to say that it cannot be imported
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    task_of(tmp_path, PAIRS).prepare(RunConfig())
    with pytest.raises(ConfigError, match=r"pip install sacrebleu"):
        task_of(tmp_path, PAIRS, max_new_tokens=1).prepare(RunConfig())
