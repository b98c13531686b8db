"""Whole runs on pairs, numbers and lists of labels: reports, predictions, exports, and the
same under all ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategy_chain
from transformers import pipeline

from distcore import RunConfig, launch, train
from distcore.cli.main import main

pytestmark = pytest.mark.programs

PHRASES = Path(__file__).with_name("phrases.jsonl")
ROWS = [json.loads(line) for line in PHRASES.read_text().splitlines()]
KINDS: dict[str, dict[str, Any]] = {
    "pairs": {
        "columns": {"text": "first", "text_pair": "second", "label": "same", "id": "id"},
        "class_names": ["other", "same"],
    },
    "numbers": {
        "columns": {"text": "first", "text_pair": "second", "label": "score", "id": "id"},
        "problem_type": "regression",
    },
    "lists": {
        "columns": {"text": "first", "label": "topics", "id": "id"},
        "problem_type": "multi_label",
    },
}

MORE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("pairs", "lists")]


def config(folder: Path, kind: str, **changes: Any) -> RunConfig:
    options = KINDS[kind] | {
        "data": str(PHRASES),
        "test_data": str(PHRASES),
        "model": "bert-tiny",
        "max_seq_len": 24,
        "dropout": 0.0,
        "eval_fraction": 0.25,
        "tokenizer": {"vocab_size": 200},
    }
    keys: dict[str, Any] = {
        "task_options": options,
        "device": "cpu",
        "max_steps": 10,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "lr": 1e-3,
        "log_every": 1,
        "extensions": {"progress": False},
        "out": str(folder / "single"),
        "schedule": {"name": "constant"},
    }
    return RunConfig(**(keys | changes))


@pytest.fixture(scope="module", params=KINDS)
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The kind, and a folder with a run of one process."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTCORE_CACHE", str(folder / "cache"))
        train(config(folder, request.param))
    return request.param, folder


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_alike(predictions: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The lines say the same of the same rows, but for the last digits."""
    for one, other in zip(predictions, expected, strict=True):
        assert one["id"] == other["id"]
        if "scores" in other:
            assert one["prediction"] == other["prediction"]
            assert one["scores"] == pytest.approx(other["scores"], abs=2e-5)
        else:
            assert one["prediction"] == pytest.approx(other["prediction"], rel=1e-4)


def test_report_and_predictions_have_the_labels_of_their_kind(trained: tuple[str, Path]) -> None:
    kind, folder = trained
    report = json.loads((folder / "single/report.json").read_text())
    predictions = lines(folder / "single/predictions.jsonl")
    assert [line["id"] for line in predictions] == [row["id"] for row in ROWS]
    written = {"pairs": "same", "numbers": "score", "lists": "topics"}[kind]
    words = {0: "other", 1: "same"}
    assert [line["label"] for line in predictions] == [
        words[row["same"]] if kind == "pairs" else row[written] for row in ROWS
    ]
    assert all(report["evaluation"][name] is not None for name in report["metrics"])
    if kind == "numbers":
        error = np.mean([(line["label"] - line["prediction"]) ** 2 for line in predictions])
        assert report["evaluation"]["loss"] == pytest.approx(error, rel=1e-4)
        assert set(predictions[0]) == {"index", "file", "row", "id", "label", "prediction"}
        return
    right = np.mean([line["label"] == line["prediction"] for line in predictions])
    accuracy = report["evaluation"]["accuracy" if kind == "pairs" else "subset_accuracy"]
    assert accuracy == pytest.approx(right)


def test_rows_without_labels_are_predicted_as_the_test_rows_were(
    trained: tuple[str, Path], tmp_path: Path
) -> None:
    kind, folder = trained
    names = [
        name
        for name in ("first", "second", "id")
        if name != "second" or "text_pair" in KINDS[kind]["columns"]
    ]
    (tmp_path / "new.jsonl").write_text(
        "".join(json.dumps({name: row[name] for name in names}) + "\n" for row in ROWS)
    )
    out = tmp_path / "out.jsonl"
    command = f"predict {folder}/single --data {tmp_path}/new.jsonl --id-column id --out {out}"
    assert main(command.split()) == 0
    assert_alike(lines(out), lines(folder / "single/predictions.jsonl"))


def test_a_pair_to_predict_without_its_second_text_is_one_line(
    trained: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, folder = trained
    (tmp_path / "new.jsonl").write_text(
        '["a", "b", "c"]\n["a", "", "d"]\n' if kind != "lists" else '["", "c"]\n'
    )
    command = (
        f"predict {folder}/single --data {tmp_path}/new.jsonl --id-column id --out"
        f" {tmp_path}/out.jsonl"
    )
    assert main(command.split()) == 2
    problem = "row 2: text_pair is empty" if kind != "lists" else "row 1: text is empty"
    assert f"new.jsonl, {problem}: fill it in or remove the row" in capfd.readouterr().err


def test_an_export_answers_in_transformers_as_the_run_did(
    trained: tuple[str, Path], tmp_path: Path
) -> None:
    kind, folder = trained
    assert main(["checkpoint", "export", str(folder / "single"), "--to", str(tmp_path / "hf")]) == 0
    classify: Any = pipeline(
        "text-classification", model=str(tmp_path / "hf"), device="cpu", top_k=None
    )
    paired = "text_pair" in KINDS[kind]["columns"]
    rows = [
        {"text": row["first"]} | ({"text_pair": row["second"]} if paired else {}) for row in ROWS
    ]
    answers = [
        {one["label"]: one["score"] for one in classify(row, truncation=True)} for row in rows
    ]
    expected = lines(folder / "single/predictions.jsonl")
    if kind == "numbers":
        assert [scores["LABEL_0"] for scores in answers] == pytest.approx(
            [one["prediction"] for one in expected], rel=1e-4
        )
    else:
        assert answers == [pytest.approx(one["scores"], abs=2e-5) for one in expected]


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trained", ["numbers", *MORE], indirect=True)
def test_two_ranks_have_the_losses_and_the_answers_of_one_process(
    trained: tuple[str, Path],
) -> None:
    kind, folder = trained
    launch(train, config(folder, kind, out=str(folder / "two"), strategy="ddp", nproc=2), nproc=2)
    assert strategy_chain.losses(folder / "two") == pytest.approx(
        strategy_chain.losses(folder / "single"), rel=1e-5
    )
    assert_alike(*(lines(folder / name / "predictions.jsonl") for name in ("two", "single")))
    reports = [
        json.loads((folder / name / "report.json").read_text()) for name in ("single", "two")
    ]
    for name, value in reports[0]["evaluation"].items():
        # correlations of predictions that are almost alike hang on their last digits
        if name in reports[0]["metrics"]:
            hangs = name in ("pearson", "spearman")
            expected = pytest.approx(value, abs=0.01) if hangs else pytest.approx(value, rel=1e-4)
            assert reports[1]["evaluation"][name] == expected


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_chain_of_checkpoints_over_all_strategies_is_one_run(trained: tuple[str, Path]) -> None:
    kind, folder = trained
    strategy_chain.run_chain(folder / "chain", lambda **changes: config(folder, kind, **changes))
    strategy_chain.assert_one_run(folder / "chain", folder / "single")
