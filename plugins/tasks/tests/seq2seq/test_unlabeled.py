"""Sources without targets: what the model reads of them, how much it writes, and the line that
a bad one gets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distcore.config import RunConfig
from distcore.errors import ConfigError, DataError
from distcore.plugin.task.task import FileRows
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.tokenized import GENERATED

PAIRS = [[f"what comes after {row}?" + " and then" * row, f"{row + 1}"] for row in range(9)]


def prepared(folder: Path, **options: Any) -> tuple[Seq2Seq, Any]:
    (folder / "pairs.json").write_text(json.dumps(PAIRS))
    file = str(folder / "pairs.json")
    task = Seq2Seq(
        data=file, eval_data=file, prefix="answer: ", max_seq_len=12, dropout=0.0, **options
    )
    return task, task.prepare(RunConfig())


def rows(*sources: object) -> FileRows:
    return FileRows(file="new.jsonl", start=5, records=[(source,) for source in sources])


def test_the_model_reads_a_source_as_in_training(tmp_path: Path) -> None:
    task, data = prepared(tmp_path)
    unlabeled = task.unlabeled(rows(*(source for source, _ in PAIRS)), data)
    places = np.asarray([3, 0, 8])
    batch, trained = unlabeled.batch(places), data.evaluation.batch(places)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert all(torch.equal(batch[name], trained[name]) for name in batch)


@pytest.mark.parametrize(("asked", "written"), [(0, GENERATED), (3, 3)])
def test_generation_has_the_limit_of_the_run_or_64_tokens(
    tmp_path: Path, asked: int, written: int
) -> None:
    task, data = prepared(tmp_path, max_new_tokens=asked)
    model: Any = task.build_model(RunConfig(), data).eval()
    batch = task.unlabeled(rows("one", "two"), data).batch(np.arange(2))
    assert task.outputs(model, batch) == {}
    model.generation_config.eos_token_id = None  # so that no answer ends earlier
    answers: Any = task.generate(model, batch, False)
    assert answers["generated"].lengths.tolist() == [written] * 2
    assert bool(task.generate(model, data.evaluation.batch(np.arange(2)), False)) is (asked > 0)


def test_a_source_that_cannot_be_read_is_named_by_file_and_row(tmp_path: Path) -> None:
    task, data = prepared(tmp_path)
    with pytest.raises(
        DataError,
        match=r"data file new.jsonl, row 6: source is an integer \(7\), expected a string",
    ):
        task.unlabeled(rows("good", 7), data)


def test_a_model_with_fewer_positions_than_new_tokens_says_how_many_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "bart"
    folder.mkdir()
    tree = {"model_type": "bart", "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    _, data = prepared(tmp_path)
    with pytest.raises(
        ConfigError, match=r"positions for 32 tokens; use --set task_options.max_new_tokens=32$"
    ):
        Seq2Seq(model=str(folder)).unlabeled(rows("good"), data)
