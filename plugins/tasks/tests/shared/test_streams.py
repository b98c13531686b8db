"""Streamed rows are those that a run would store: the same ones, in the same order,
with the same losses.
"""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import read_labeled
from stream_cases import ROWS, SOME, TASKS, WORDS, both, check_alike, words, write

from distcore import ConfigError, DataError, RunConfig, launch, train
from distcore_data import IndexedRows, MixedRows
from distcore_data.formats.row_limit import LIMIT
from distcore_data.orders.mixtures import shares_of
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.shared import splits
from distcore_tasks.shared.options import Filter, Order
from distcore_tasks.shared.stored_arrays import StoredArray
from distcore_tasks.shared.streams import held_out, values
from distcore_tasks.text_classification.task import TextClassification

pytestmark = pytest.mark.programs


def prompts(seed: int = 0, **options: Any) -> Any:
    """The datasets of prompts that are streamed."""
    return CausalLM(stream=True, **options).prepare(RunConfig(seed=seed))


def test_a_class_of_streamed_texts_takes_one_byte_of_a_file(tmp_path: Path) -> None:
    data = str(write(tmp_path / "rows.jsonl", [ROWS["labels"](n) for n in range(90)]))
    train: Any = TextClassification(data=data, stream=True).prepare(RunConfig()).train
    [labels] = train.table.beside.values()
    assert labels.codes.dtype == np.uint8
    assert labels.codes.file.stat().st_size == labels.codes.start + len(train)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_numbers_of_a_stream_are_in_a_file_without_those_that_are_none(
    name: str, tmp_path: Path
) -> None:
    labels = [str(n / 8) if n % 700 else "none" for n in range(2100)]
    texts = {
        "rows.jsonl": "".join(
            json.dumps({"text": "red", "label": n if n == "none" else float(n)}) + "\n"
            for n in labels
        ),
        "rows.csv": "text,label\n" + "".join(f"red,{label}\n" for label in labels),
    }
    (tmp_path / name).write_text(texts[name])
    read = partial(read_labeled, tmp_path / name, problem_type="regression", stream=True)
    with pytest.raises(DataError, match=r"row 1: label is a string \('none'\), expected a number"):
        read()
    rows = read(most_bad_rows=3)
    assert isinstance(rows.labels, StoredArray)
    assert rows.labels[:].tolist() == [n / 8 for n in range(2100) if n % 700]
    assert rows.values.numbers(np.array([0, 698, 699, 2096])).tolist() == [1, 699, 701, 2099]


@pytest.mark.parametrize("held", [False, True], ids=["fraction", "eval_data"])
@pytest.mark.parametrize("some", SOME)
@pytest.mark.parametrize("task", TASKS)
def test_streamed_rows_are_the_stored_ones(
    task: str, some: str, held: bool, tmp_path: Path
) -> None:
    rows = [ROWS[task](n) | {"kind": n % 4} for n in range(90)]
    options = SOME[some] | {
        "data": str(write(tmp_path / "rows.jsonl", rows, (7, 50) if "bad" in some else ()))
    }
    if held:
        options["eval_data"] = str(
            write(tmp_path / "held.jsonl", [row for row in rows if row["kind"] == 1][:9])
        )
    streamed, stored = both(task, **options)
    assert len(streamed.train) == stored.facts["train"]["rows"] == streamed.facts["train"]["rows"]
    check_alike(streamed.train, stored.train)
    assert streamed.evaluation.content == stored.evaluation.content
    assert streamed.bad_rows == stored.bad_rows
    assert len(stored.bad_rows) == (2 if "bad" in some else 0)


@pytest.mark.parametrize("mix_by", ["rows", "tokens"])
@pytest.mark.parametrize("task", TASKS)
def test_a_streamed_mixture_is_the_stored_one(task: str, mix_by: str, tmp_path: Path) -> None:
    files = [
        write(
            tmp_path / f"{name}.jsonl",
            [ROWS[task](n * k) | {"kind": n % 4} for n in range(60)],
            (3,) * (k - 1),
        )
        for k, name in enumerate(("web", "code"), 1)
    ]
    order = Order(mix={"web": 0.6, "code": 0.4}, mix_by=mix_by)  # type: ignore[arg-type]
    data = ",".join(map(str, files))
    streamed, stored = both(
        task, data=data, order=order, filter=Filter("kind", "[012]"), skip_bad_rows=1
    )
    one, other = streamed.train.row_order, stored.train.row_order
    assert isinstance(one, MixedRows)
    assert one.content == other.content
    check_alike(streamed.train, stored.train)


def test_tokens_of_many_rows_are_those_of_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        write(
            tmp_path / f"{name}.jsonl",
            [{"prompt": words(n), "completion": words(k, 99)} for n in range(300)],
        )
        for k, name in ((2, "web"), (40, "code"))
    ]
    held = str(write(tmp_path / "held.jsonl", [{"prompt": "red", "completion": "sun"}] * 5))
    options: dict[str, Any] = {"data": ",".join(map(str, files)), "eval_data": held}
    order = Order(mix={"web": 0.5, "code": 0.5}, mix_by="tokens")
    monkeypatch.setattr(values, "SAMPLE", 30)
    seen = counted(monkeypatch)
    rows = prompts(**options, order=order).train
    assert len(seen) == 30 + 2 * 30 + 2 * 5, (
        "the vocabulary, the lengths of each source, and the evaluation rows twice"
    )
    exact = [rows.lengths[np.arange(start, start + 300)].mean() for start in (0, 300)]
    shares = shares_of([0.5 / exact[0], 0.5 / exact[1]])
    assert rows.row_order.shares == pytest.approx(shares, rel=0.1)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that are read by number."""
    seen, get = list[int](), IndexedRows.__getitem__

    def counting(rows: IndexedRows, numbers: Any) -> Any:
        seen.extend(np.asarray(numbers).tolist())
        return get(rows, numbers)

    monkeypatch.setattr(IndexedRows, "__getitem__", counting)
    return seen


def test_a_pass_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(
        tmp_path / "rows.jsonl", [ROWS["prompts"](n) | {"kind": n % 4} for n in range(90)], (7,)
    )
    task: Any = CausalLM(data=str(data), stream=True, skip_bad_rows=1, filter=Filter("kind", "1"))
    first = task.prepare(RunConfig())
    monkeypatch.setattr(values, "choose_rows", None)
    again = task.prepare(RunConfig())
    assert again.train.content == first.train.content
    assert again.bad_rows == first.bad_rows
    assert len(first.bad_rows) == 1


def test_a_pickled_stream_brings_no_rows_to_its_new_process(tmp_path: Path) -> None:
    rows = prompts(
        data=str(write(tmp_path / "rows.jsonl", [ROWS["prompts"](n) for n in range(90)]))
    ).train
    numbers = np.arange(20)
    batch = rows.batch(numbers)
    again = pickle.loads(pickle.dumps(rows))
    assert (len(rows.table._kept), len(again.table._kept)) == (20, 0)
    assert again.batch(numbers)["input_ids"].tolist() == batch["input_ids"].tolist()


def test_a_resume_knows_which_rows_are_kept(tmp_path: Path) -> None:
    data = str(
        write(tmp_path / "rows.jsonl", [ROWS["prompts"](n) | {"kind": n % 4} for n in range(90)])
    )
    changed: list[dict[str, Any]] = [{}, {"eval_fraction": 0.2}, {"filter": Filter("kind", "[12]")}]
    contents = [prompts(data=data, **options).train.content for options in changed]
    contents.append(prompts(1, data=data).train.content)
    assert len({*contents}) == 4


def test_the_split_of_very_many_rows_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "DRAWN", 50)
    data = str(
        write(tmp_path / "rows.jsonl", [{"prompt": str(n), "completion": "sun"} for n in range(90)])
    )
    sets = [prompts(seed, data=data, eval_fraction=0.2) for seed in (0, 0, 1)]
    assert [len(some.train) for some in sets] == [72] * 3
    assert [some.facts["evaluation"]["rows"] for some in sets] == [18] * 3
    assert sets[0].train.content == sets[1].train.content != sets[2].train.content


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            '{"prompt": "red", "completion": " "}',
            "row 31: completion is empty: fill it in or remove the row",
        ),
        (
            '{"prompt": "red"}',
            "row 31: no column 'completion', which the rows before it have; fill it in",
        ),
        (
            json.dumps({"prompt": "red " * 90, "completion": "sun"}),
            "row 31: the answer is cut off entirely: ",
        ),
        (
            json.dumps({"prompt": "red", "completion": "sun" * 900}),
            "row 31: has more characters in a line, over the",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named_when_its_step_comes(
    row: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "900")
    data = write(tmp_path / "rows.jsonl", [ROWS["prompts"](n) for n in range(60)])
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:30], row, *lines[30:]]))
    held = str(write(tmp_path / "held.jsonl", [ROWS["prompts"](n) for n in range(5)]))
    monkeypatch.setattr(values, "SAMPLE", 2)
    rows = prompts(data=str(data), eval_data=held, max_seq_len=30).train
    assert len(rows) == 61
    rows.batch(np.array([29, 31]))
    with pytest.raises(DataError) as error:
        rows.batch(np.array([5, 30]))
    assert str(error.value).startswith(f"data file {data}, {problem}")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (CausalLM(stream=True), "data: stdlib-source comes with distcore and is no file"),
        (
            MaskedLM(stream=True, split_texts=False),
            "data: stdlib-lines comes with distcore and is no file",
        ),
        (
            MaskedLM(stream=True, data="rows.jsonl"),
            (
                "split_texts: a text is one row, which is cut to max_seq_len: --set"
                " task_options.split_texts=false"
            ),
        ),
    ],
)
def test_an_option_that_a_stream_cannot_have_is_one_line(task: Any, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        task.prepare(RunConfig())
    assert str(error.value) == f"task_options.stream = true, {line}"


def test_texts_and_labels_belong_together_where_labels_are_passed_over(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": words(n, 40), "label": WORDS[n % 3]} for n in range(40)]
    for bad in (0, 17, 18, 39):
        rows[bad]["label"] = None
    streamed, stored = both(
        "labels", data=str(write(tmp_path / "rows.jsonl", rows)), skip_bad_rows=4
    )
    check_alike(streamed.train, stored.train, np.arange(len(stored.train)))
    assert streamed.evaluation.content == stored.evaluation.content


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "labels": ("text-classification", {"model": "bert-tiny"}),
    "tags": ("token-classification", {}),
    "pairs": ("seq2seq", {"tokenizer": {"vocab_size": 300}}),
    "rewards": ("reward-model", {}),
    "mismatched": ("preference", {"loss": "kto"}),
    "groups": ("embedding", {}),
}


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.programs if case == "labels" else pytest.mark.slow)
        for case in RUNS
    ],
)
def test_two_ranks_that_stream_and_go_on_inside_an_epoch_train_as_one_that_stores(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "STORED_TOKENS", 0)
    task, options = RUNS[case]
    data = write(tmp_path / "rows.jsonl", [ROWS[case](n) for n in range(60)])
    options = options | {
        "data": str(data),
        "max_seq_len": 32,
        "dropout": 0.0,
        "order": {"kind": "windows"},
    }
    keys: dict[str, Any] = {
        "task": task,
        "global_batch_size": 8,
        "device": "cpu",
        "lr": 2e-4,
        "max_steps": 14,
        "log_every": 1,
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }

    def config(out: str, **changes: Any) -> RunConfig:
        own = options | {"stream": changes.pop("stream", True)}
        return RunConfig.model_validate(
            keys | {"task_options": own, "out": str(tmp_path / out)} | changes
        )

    def losses(out: str) -> list[float]:
        lines = map(json.loads, (tmp_path / out / "metrics.jsonl").read_text().splitlines())
        return [line["train/loss"] for line in lines if "train/loss" in line]

    train(config("one", stream=False))
    two: dict[str, Any] = {"nproc": 2, "strategy": "ddp"}
    launch(train, config("two", max_steps=3, **two), nproc=2)
    launch(
        train,
        config("two", resume="auto", max_steps=14, resume_changed="max_steps", **two),
        nproc=2,
    )
    entries = [
        json.loads(entry.read_text()) for entry in (tmp_path / "cache").glob("*/*/entry.json")
    ]
    assert sorted(len(entry.get("streamed", [])) for entry in entries) == [
        0,
        2,
    ], "both datasets of the ranks"
    assert len(losses("one")) == 14
    assert losses("two") == pytest.approx(losses("one"), rel=2e-4)
    reports = [json.loads((tmp_path / out / "report.json").read_text()) for out in ("one", "two")]
    one, other = (report["evaluation"] for report in reports)
    assert other["loss"] == pytest.approx(one["loss"], rel=2e-4)
    assert other["evaluated"] == other["unique"] == one["evaluated"] == 6
