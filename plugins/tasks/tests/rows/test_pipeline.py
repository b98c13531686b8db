"""What a pipeline says of its rows holds for stored and for streamed ones, and is checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_cases import row_of
from stream_cases import ROWS, TASKS, write

import distcore_data
from distcore import DataError, RunConfig, TaskError
from distcore_tasks.masked_lm.rows import MaskedRows
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.preference.task import Preference
from distcore_tasks.rows import sources, writing
from distcore_tasks.rows.pipeline import Encoded
from distcore_tasks.rows.prepare import prepare_rows
from distcore_tasks.rows.table import CachedTable
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.options import Order
from distcore_tasks.shared.tokenized import TokenizedDatasets

CONFIG = RunConfig()


@pytest.fixture
def texts(tmp_path: Path) -> str:
    return str(write(tmp_path / "rows.jsonl", [ROWS["texts"](n) for n in range(60)]))


def prepared(pipeline: Any) -> TokenizedDatasets:
    return prepare_rows(pipeline, CONFIG, TokenizedDatasets)


@dataclass(frozen=True)
class Miscounted(MaskedRows):
    """Rows whose columns have unequal lengths."""

    def encode(self, *given: Any) -> Encoded:
        table = super().encode(*given).table
        return Encoded(CachedTable({**table.columns, "ordinary": np.zeros(1, np.int64)}))


@dataclass(frozen=True)
class Unnamed(MaskedRows):
    """Rows with a count that is none of the pipeline's."""

    def encode(self, *given: Any) -> Encoded:
        return replace(super().encode(*given), counts={"cut": 1})


@dataclass(frozen=True)
class Fewer(MaskedRows):
    """A row is missing, and no owner says whose."""

    def encode(self, *given: Any) -> Encoded:
        return Encoded(CachedTable({"tokens": flat_rows([[1]]), "ordinary": np.ones(1, np.int64)}))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Miscounted, "Miscounted.encode: column 'ordinary' has not one entry for each of 54 rows"),
        (Unnamed, "row 1: Unnamed.encode: counts = {'cut': 1}, expected numbers of texts_cut"),
        (Fewer, "Fewer.encode: column 'tokens' has not one entry for each of 54 rows"),
    ],
)
def test_a_wrong_result_of_encode_is_one_line(
    kind: type[MaskedRows], problem: str, texts: str
) -> None:
    # What is wrong with each value has its row; what is wrong with several together has none.
    has_row = problem.startswith("row")
    with pytest.raises(DataError if has_row else TaskError) as error:
        prepared(kind(MaskedLM(data=texts, split_texts=False), 0))
    assert str(error.value) == (f"data file {texts}, {problem}" if has_row else problem)


@pytest.mark.parametrize("task", ["texts", "pairs", "preferences", "rewards", "tags", "numbers"])
def test_rows_are_the_same_in_chunks_of_any_size(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(write(tmp_path / "rows.jsonl", [ROWS[task](n) for n in range(60)]))
    contents = []
    for size in (4096, 7):
        monkeypatch.setattr(writing, "CHUNK", size)
        monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / f"cache {size}"))
        sets = TASKS[task](data=data).prepare(CONFIG)
        contents.append((sets.train.content, sets.evaluation.content, sets.facts))
    assert contents[0] == contents[1]


def test_training_and_evaluation_rows_of_one_source_are_read_in_one_pass(
    texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, original = list[Any](), distcore_data.numbered_records

    def counting(*given: Any) -> Any:
        passes.append(given)
        return original(*given)

    monkeypatch.setattr(sources, "numbered_records", counting)
    data = MaskedLM(data=texts, test_data=texts).prepare(CONFIG)
    assert len(passes) == 2, "the vocabulary, and the rows of three datasets"
    rows = [json.loads(line)["text"] for line in Path(texts).read_text().splitlines()]
    tokenizer = data.loaded_tokenizer
    first = tokenizer.decode(row_of(data.test, "tokens", 0), skip_special_tokens=True)
    assert first == rows[0]
    assert len(data.train) + len(data.evaluation) == len(data.test)


def test_a_few_evaluation_rows_of_a_stream_are_read_by_number(
    texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "numbered_records", None)
    data = MaskedLM(data=texts, stream=True, split_texts=False).prepare(CONFIG)
    assert (len(data.train), len(data.evaluation)) == (54, 6)


def test_a_mixture_counts_no_rows_of_refused_values(tmp_path: Path) -> None:
    rows = [ROWS["preferences"](n) for n in range(40)]
    held = str(write(tmp_path / "held.jsonl", rows[:2]))
    for bad in (3, 39):
        rows[bad]["prompt"] = "red " * 99
    files = [write(tmp_path / f"{name}.jsonl", rows) for name in ("web", "code")]
    options: dict[str, Any] = {"data": ",".join(map(str, files)), "eval_data": held}
    order = Order(mix={"web": 0.5, "code": 0.5})
    task = Preference(**options, order=order, skip_bad_rows=4, max_seq_len=64)
    data: Any = task.prepare(CONFIG)
    assert [(source.start, source.stop) for source in data.train.row_order.sources] == [
        (0, 38),
        (38, 76),
    ]
    assert len(data.train) == data.facts["train"]["rows"] == 76
    assert len(data.bad_rows) == 4
    assert data.facts["train"]["rows_cut"] == 0, "a refused row is no cut one"
    with pytest.raises(DataError, match=r"row 40: .* more bad rows than the 3 of --skip-bad-rows"):
        replace(task, skip_bad_rows=3).prepare(CONFIG)


def test_a_set_whose_values_are_all_refused_is_named_with_the_first(tmp_path: Path) -> None:
    rows = [ROWS["preferences"](n) | {"prompt": "red " * 99} for n in range(3)]
    data = str(write(tmp_path / "rows.jsonl", rows))
    held = {"long": data, "other": data}
    good = str(write(tmp_path / "good.jsonl", [ROWS["preferences"](n) for n in range(20)]))
    task = Preference(data=good, eval_data=held, skip_bad_rows=9, max_seq_len=64)
    with pytest.raises(
        DataError,
        match=r"^evaluation set long: .*rows.jsonl, row 1: the answers are cut off entirely",
    ):
        task.prepare(CONFIG)


def test_a_tokenizer_is_saved_without_the_length_at_which_it_cut_last(tmp_path: Path) -> None:
    data = str(write(tmp_path / "rows.jsonl", [ROWS["pairs"](n) for n in range(20)]))
    for stream in (False, True):
        made: Any = Seq2Seq(data=data, stream=stream).prepare(CONFIG)
        saved = json.loads((made.tokenizer / "tokenizer.json").read_text())
        assert saved["truncation"] is None
