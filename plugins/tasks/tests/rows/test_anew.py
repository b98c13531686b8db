"""Rows that are made anew are those that are kept; ``distcore check`` says where they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stream_cases import ROWS, TASKS, leaves, write

from distcore import RunConfig
from distcore.testing.task_suite import TASKS as LAWS
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.masked_lm.rows import MaskedRows
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.rows.table import CachedTable
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.options import Filter
from distcore_tasks.shared.streams import held_out

CONFIG = RunConfig()
SOME: dict[str, dict[str, Any]] = {
    "streamed": {"stream": True, "skip_bad_rows": 1},
    "filtered": {"filter": Filter("kind", "^(1|2)$"), "eval_fraction": 0.3},
    "bad": {"skip_bad_rows": 5},
}


def check_anew(dataset: Any) -> None:
    rows = np.random.default_rng(0).permutation(len(dataset))[:20]
    one, other = leaves(dataset.batch(rows)), leaves(dataset.made_anew(rows))
    assert one.keys() == other.keys()
    assert all(one[name].tolist() == other[name].tolist() for name in one)


@pytest.mark.parametrize(
    ("task", "some"),
    [
        *(("mismatched", some) for some in SOME),
        *(("texts", "filtered"), ("pairs", "streamed")),
        *(("tags", "bad"), ("messages", "bad")),
        *(("pairs with labels", "filtered"), ("numbers", "streamed")),
    ],
)
def test_rows_made_anew_are_those_that_are_kept(task: str, some: str, tmp_path: Path) -> None:
    rows = [ROWS[task](n) | {"kind": n % 4} for n in range(60)]
    is_refused = task == "mismatched" and "skip_bad_rows" in SOME[some]
    if is_refused:
        rows[9]["prompt"] = "red " * 200
    bad = (7, 20) if some == "bad" else ()
    options = SOME[some] | {"data": str(write(tmp_path / "rows.jsonl", rows, bad))}
    sets = TASKS[task](**options).prepare(CONFIG)
    assert len(sets.bad_rows) == len(bad) + is_refused
    check_anew(sets.train)
    check_anew(sets.evaluation)


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_of_documents_are_made_anew(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "STORED_TOKENS", 0)
    source = write(tmp_path / "rows.jsonl", [ROWS["texts"](n) for n in range(60)])
    task = CausalLM(data=str(source), max_seq_len=12, stream=stream, eval_fraction=0.4)
    sets = task.prepare(CONFIG)
    assert len(sets.evaluation) > 24, "blocks, and no documents"
    check_anew(sets.train)
    check_anew(sets.evaluation)


@pytest.mark.parametrize("data", ["rows.json", "stdlib-source"])
def test_rows_in_memory_and_those_of_split_texts_are_made_anew(data: str, tmp_path: Path) -> None:
    rows = [ROWS["texts"](n) for n in range(60)]
    (tmp_path / "rows.json").write_text(str(rows).replace("'", '"'))
    source = data if data.startswith("stdlib") else str(tmp_path / data)
    held = str(tmp_path / "rows.json")
    task = MaskedLM(data=source, max_seq_len=12, eval_data=held)
    check_anew(task.prepare(CONFIG).evaluation)
    if data == "rows.json":
        check_anew(replace(task, eval_data=None).prepare(CONFIG).train)


def test_a_cached_row_that_its_task_would_make_otherwise_is_found_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(write(tmp_path / "rows.jsonl", [ROWS["texts"](n) for n in range(60)]))
    settings = {"task_options.data": data, "task_options.tokenizer.vocab_size": 200}
    case = ["same-rows-again"]
    [finding] = LAWS.measure("masked-lm", settings, case)
    assert finding.held
    encode = MaskedRows.encode

    def padded(self: MaskedRows, tokenizer: Any, info: Any, values: Any, refuse: Any) -> Any:
        """Rows that are as long as the longest of those that come with them."""
        encoded = encode(self, tokenizer, info, values, refuse)
        rows, _ = encoded.table.all().padded("tokens", info.pad)
        columns = {**encoded.table.columns, "tokens": flat_rows(list(rows))}
        return replace(encoded, table=CachedTable(columns))

    monkeypatch.setattr(MaskedRows, "encode", padded)
    [finding] = LAWS.measure("masked-lm", settings, case)
    assert finding.held is False
    assert "train (rows made anew, with others beside them)" in str(finding)
