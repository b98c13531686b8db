"""Predictions say where a row is from: its file, its row there and its id, however it is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stream_cases import ROWS, write

from distcore import RunConfig
from distcore_tasks.shared.options import Filter
from distcore_tasks.token_classification.options import Columns
from distcore_tasks.token_classification.task import TokenClassification

CONFIG = RunConfig()
BAD, REFUSED = 7, 20


def rows_with_ids() -> list[dict[str, Any]]:
    """Rows of which one has no word left when it is encoded."""
    rows = [ROWS["tags"](n) | {"kind": n % 4, "key": f"Ü{n}" if n % 3 else n} for n in range(60)]
    rows[REFUSED] |= {"tokens": ["\u200b"], "tags": ["T3"], "kind": 1}
    return rows


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_a_row_keeps_its_number_and_its_id_behind_rows_that_are_passed_over(
    form: str, stream: bool, tmp_path: Path
) -> None:
    rows, file = rows_with_ids(), tmp_path / f"rows.{form}"
    rows[BAD]["tags"] = None
    if form == "json":
        file.write_text(json.dumps(rows))
    else:
        write(file, rows)
    data: Any = TokenClassification(
        data=str(file),
        eval_data=str(file),
        columns=Columns(id="key"),
        filter=Filter("kind", "[13]"),
        skip_bad_rows=2,
        stream=stream,
    ).prepare(CONFIG)
    kept = [n for n, row in enumerate(rows) if row["kind"] in (1, 3) and n not in (BAD, REFUSED)]
    name = f"{file} where kind matches '[13]'"
    expected = [{"file": name, "row": n + 1, "id": rows[n]["key"]} for n in kept]
    assert [*data.evaluation.origins()] == expected
    assert [*data.train.origins()] == expected
    assert len(data.bad_rows) == 2


def test_rows_without_ids_have_file_and_row_alone(tmp_path: Path) -> None:
    file = str(write(tmp_path / "rows.jsonl", rows_with_ids()[:REFUSED]))
    data: Any = TokenClassification(data=file, eval_data=file).prepare(CONFIG)
    assert [*data.evaluation.origins()] == [{"file": file, "row": n + 1} for n in range(REFUSED)]
