"""Labels stay with their rows behind those that are passed over, stored and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import labels_of, source_rows
from stream_cases import words

from distcore import RunConfig
from distcore_tasks.shared import splits
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.task import TextClassification

CONFIG = RunConfig()
CLASSES = ["bad", "good", "odd"]
NO_TEXT, NO_LABEL, OTHER_TYPE = 3, 20, 41


def rows_with_labels() -> list[dict[str, Any]]:
    """Rows of three classes, of which three cannot be used."""
    rows: list[dict[str, Any]] = [
        {"text": words(n, 9), "label": CLASSES[n % 3], "key": f"k{n}"} for n in range(60)
    ]
    rows[NO_TEXT]["text"] = " "
    rows[NO_LABEL]["label"] = None
    rows[OTHER_TYPE]["label"] = 7
    return rows


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_labels_rows_and_ids_belong_together(form: str, stream: bool, tmp_path: Path) -> None:
    rows, file = rows_with_labels(), tmp_path / f"rows.{form}"
    if form == "json":
        file.write_text(json.dumps(rows))
    elif form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows[NO_LABEL]["label"], rows[OTHER_TYPE]["label"] = "", " "
        lines = [",".join(map(str, row.values())) for row in rows]
        file.write_text("\n".join(["text,label,key", *lines]))
    task = TextClassification(
        data=str(file),
        eval_data=str(file),
        model="bert-tiny",
        columns=Columns(id="key"),
        skip_bad_rows=3,
        stream=stream,
    )
    data: Any = task.prepare(CONFIG)
    kept = [n for n in range(60) if n not in (NO_TEXT, NO_LABEL, OTHER_TYPE)]
    assert data.labels == tuple(CLASSES)
    for dataset in (data.train, data.evaluation):
        origins = [{"file": str(file), "row": n + 1, "id": f"k{n}"} for n in kept]
        assert [*dataset.origins()] == origins
        batch = dataset.batch(np.arange(len(kept))[::-1].copy())
        assert batch["labels"].tolist() == [n % 3 for n in reversed(kept)]
    assert len(data.bad_rows) == 3


def test_the_split_of_stored_rows_is_drawn_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint knows its rows by this split; only that of a stream is computed."""
    file = tmp_path / "rows.jsonl"
    rows = [{"text": words(n, 9), "label": CLASSES[n % 3]} for n in range(90)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = []
    for drawn in (90, 89):
        monkeypatch.setattr(splits, "DRAWN", drawn)
        monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / f"cache {drawn}"))
        data: Any = TextClassification(data=str(file), model="bert-tiny").prepare(CONFIG)
        evaluated.append(source_rows(data.evaluation).tolist())
        assert labels_of(data.evaluation).tolist() == [n % 3 for n in evaluated[-1]]
    assert evaluated[0] == evaluated[1]
