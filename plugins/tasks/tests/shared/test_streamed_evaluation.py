"""Evaluation rows that are streamed are those that a run would store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_cases import is_streamed
from stream_cases import ROWS, SOME, TASKS, both, check_same, write

from distcore import RunConfig
from distcore_tasks.shared.streams import held_out
from distcore_tasks.text_classification.task import TextClassification

pytestmark = pytest.mark.programs


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have evaluation rows streamed, however few."""
    monkeypatch.setattr(held_out, "STORED_TOKENS", 0)


@pytest.mark.parametrize("held", [False, True], ids=["fraction", "eval_data"])
@pytest.mark.parametrize("some", ["cut", "filtered and bad"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.usefixtures("no_room")
def test_streamed_evaluation_rows_are_the_stored_ones(
    task: str, some: str, held: bool, tmp_path: Path
) -> None:
    rows = [ROWS[task](n) | {"kind": n % 4} for n in range(90)]
    options = SOME[some] | {
        "data": str(write(tmp_path / "rows.jsonl", rows, (7,) if "bad" in some else ()))
    }
    if held:
        sets = {
            name: [row for row in rows if row["kind"] == kind]
            for kind, name in ((1, "one"), (2, "other"))
        }
        options["eval_data"] = {
            name: str(write(tmp_path / f"{name}.jsonl", sets[name])) for name in sets
        }
        options["test_data"] = options["eval_data"]["other"]
    streamed, stored = both(task, **options)
    assert (
        list(streamed.evaluations) == list(stored.evaluations) == (["one", "other"] if held else [])
    )
    pairs = [*zip(streamed.evaluations.values(), stored.evaluations.values(), strict=True)]
    for one, other in [
        *pairs,
        (streamed.evaluation, stored.evaluation),
        (streamed.test, stored.test),
    ]:
        assert is_streamed(one)
        check_same(one, other, np.arange(len(other)))
        assert [*getattr(one, "origins", tuple)()] == [*getattr(other, "origins", tuple)()]
    assert streamed.bad_rows == stored.bad_rows
    assert [list(facts) for facts in (streamed.facts, stored.facts)] == [list(stored.facts)] * 2


@pytest.mark.usefixtures("no_room")
def test_rows_of_another_dataset_are_not_the_stored_ones(tmp_path: Path) -> None:
    data = str(write(tmp_path / "rows.jsonl", [ROWS["labels"](n) for n in range(90)]))
    streamed, stored = both("labels", data=data)
    rows = np.arange(len(stored.evaluation))
    for broken in (replace(streamed.evaluation, table=streamed.train.table), streamed.train):
        with pytest.raises(AssertionError):
            check_same(broken, stored.evaluation, rows)


def test_a_dataset_is_streamed_if_its_rows_or_their_tokens_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ROWS["labels"](n) for n in range(90)]
    files = {
        name: str(write(tmp_path / f"{name}.jsonl", rows[:count]))
        for name, count in {"few": 9, "many": 40}.items()
    }

    def streamed(limit: str, most: int) -> list[str]:
        with monkeypatch.context() as patched:
            patched.setenv("DISTCORE_CACHE", str(tmp_path / f"{limit} {most}"))
            patched.setattr(held_out, limit, most)
            task: Any = TextClassification(
                data=str(tmp_path / "many.jsonl"), eval_data=files, stream=True
            )
            sets = task.prepare(RunConfig()).evaluations
        return [name for name, some in sets.items() if is_streamed(some)]

    assert streamed("STORED_ROWS", 39) == streamed("STORED_TOKENS", 40 * 15) == ["many"]
    assert streamed("STORED_ROWS", 40) == []


@pytest.mark.parametrize("task", ["prompts", "messages"])
@pytest.mark.usefixtures("no_room")
def test_the_first_streamed_rows_have_prompts_for_generation(task: str, tmp_path: Path) -> None:
    data = str(write(tmp_path / "rows.jsonl", [ROWS[task](n) for n in range(90)]))
    streamed, stored = both(task, data=data, max_new_tokens=4, samples=3)
    check_same(streamed.evaluation, stored.evaluation, np.array([5, 1, 0, 4]))
    for row in range(3):
        assert (
            streamed.evaluation.completion(row).tolist()
            == stored.evaluation.completion(row).tolist()
        )
