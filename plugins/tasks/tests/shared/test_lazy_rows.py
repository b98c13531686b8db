"""How often a first run reads its files: once for their digest and index, and
once for their rows. Rows of a pipeline are read once more to train a vocabulary, and once more to
choose some of them; nothing of them is copied.
"""

from __future__ import annotations

import datetime
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distcore import RunConfig
from distcore_data.indexes import entries
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.shared import lazy_rows
from distcore_tasks.shared.lazy_rows import CopiedValues, LazyValues, read_values
from distcore_tasks.shared.options import Filter, Order
from distcore_tasks.text_classification.task import TextClassification

TASKS: dict[str, Callable[..., Any]] = {
    "causal-lm": lambda **options: CausalLM(form="documents", **options),
    "masked-lm": MaskedLM,
    "text-classification": lambda **options: TextClassification(model="bert-tiny", **options),
}
PASSES = {"causal-lm": (3, 4), "masked-lm": (3, 4), "text-classification": (4, 5)}
"""How often each reads a file, of which all rows are taken, or some."""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    lines = [
        json.dumps({"text": f"some text {n}", "label": n % 2, "lang": "en"}) for n in range(300)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def opened(monkeypatch: pytest.MonkeyPatch, file: Path) -> list[Path]:
    """The times that ``file`` is opened from now on."""
    seen, original = list[Path](), Path.open

    def counting(path: Path, *given: Any, **named: Any) -> Any:
        seen.extend([path] if path == file else [])
        return original(path, *given, **named)

    monkeypatch.setattr(Path, "open", counting)
    return seen


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an index known at once; else it is only some time after the file was written."""
    monkeypatch.setattr(entries, "SETTLED", 0)


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.usefixtures("settled")
def test_a_first_run_reads_a_file_as_often_as_it_has_a_reason_to(
    task: str, some: bool, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"filter": Filter("lang", "en"), "skip_bad_rows": 2} if some else {}
    seen = opened(monkeypatch, rows)
    TASKS[task](data=str(rows), **options).prepare(RunConfig())
    assert len(seen) == PASSES[task][some]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.usefixtures("settled")
def test_a_first_run_of_a_mixture_reads_its_sources_no_more_often(
    task: str, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.with_name("more.jsonl").write_text('{"text": "more text", "label": 1}\n' * 200)
    seen = opened(monkeypatch, rows)
    data = f"{rows},{rows.with_name('more.jsonl')}"
    TASKS[task](data=data, order=Order(mix={"rows": 1.0, "more": 1.0})).prepare(RunConfig())
    assert len(seen) == PASSES[task][False]


def test_iterations_of_one_copy_are_independent(rows: Path) -> None:
    values = read_values(rows, lambda: enumerate(range(1000))).values
    assert isinstance(values, CopiedValues)
    assert list(zip(values, values, strict=True)) == [(n, n) for n in range(1000)]
    assert len(values) == 1000
    assert not [file for file in (rows.parent / "cache").iterdir() if file.is_file()], (
        "the copy has no name"
    )


def test_a_full_disk_makes_each_iteration_read_the_source(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lazy_rows, "TemporaryFile", full)
    values = read_values(rows, lambda: enumerate(range(1000))).values
    assert isinstance(values, LazyValues)
    assert (len(values), [*values], [*values]) == (1000, [*range(1000)], [*range(1000)])


@pytest.mark.parametrize(
    "value", [b"bytes", datetime.date(2026, 1, 1), {1: "key"}, [("a", 1)], float("nan")]
)
def test_values_that_a_copy_would_change_are_read_from_the_source(value: Any, rows: Path) -> None:
    values = read_values(rows, lambda: enumerate([("text", 1), value])).values
    assert isinstance(values, LazyValues)
    assert [*values][1] is value


def test_a_copy_has_the_values_themselves(rows: Path) -> None:
    wanted = [
        ("a", 1, None),
        ["b", 1.5, True],
        "\ud800 \u2028",
        [{"role": "user", "content": "é"}],
        ("c", ["d"]),
    ]
    values = read_values(rows, lambda: enumerate(wanted)).values
    assert isinstance(values, CopiedValues)
    assert [*values] == wanted
