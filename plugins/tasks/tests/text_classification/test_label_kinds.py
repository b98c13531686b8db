"""Labels that are numbers or lists, and classes with names: bad ones, the loss,
the metrics, the predictions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import write
from label_cases import labels_of, source_rows
from scipy import stats
from sklearn.metrics import f1_score

from distcore.config import RunConfig
from distcore.errors import ConfigError, DataError
from distcore_tasks.text_classification.models import PROBLEM_TYPES
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.task import TextClassification

PHRASES = Path(__file__).with_name("phrases.jsonl")
ROWS = [json.loads(line) for line in PHRASES.read_text().splitlines()]
TASK = TextClassification(
    data=str(PHRASES),
    columns=Columns(text="first", label="same"),
    model="bert-tiny",
    dropout=0.0,
    eval_fraction=0.25,
)
NUMBERS = replace(TASK, columns=Columns(text="first", label="score"), problem_type="regression")
LISTS = replace(TASK, columns=Columns(text="first", label="topics"), problem_type="multi_label")


@pytest.mark.parametrize("task", [TASK, NUMBERS, LISTS], ids=lambda task: task.problem_type)
def test_the_loss_is_that_of_transformers_and_an_export_says_what_it_is(
    task: TextClassification,
) -> None:
    data: Any = task.prepare(RunConfig())
    torch.manual_seed(0)
    model: Any = task.build_model(RunConfig(), data).eval()
    assert model.config.problem_type == PROBLEM_TYPES[task.problem_type]
    batch = data.train.batch(np.arange(7))
    labels = batch["labels"].float() if task is LISTS else batch["labels"]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.allclose(
            task.loss(model, batch), 7 * model(**inputs, labels=labels).loss, rtol=1e-6
        )
        losses = task.outputs(model, batch)["loss"]
    assert torch.allclose(losses.sum(), task.loss(model, batch), rtol=1e-6)
    assert losses.shape == (7,)


def test_numbers_are_kept_as_they_are(tmp_path: Path) -> None:
    scores = [0, 2.5, -1, 3, 1.25, 4] * 2
    for suffix in (".json", ".jsonl", ".csv", ".parquet"):
        values = list(map(float, scores)) if suffix == ".parquet" else scores
        file = write(tmp_path / f"rows{suffix}", text=[f"row {n}" for n in range(12)], label=values)
        data: Any = replace(NUMBERS, data=str(file), columns=Columns()).prepare(RunConfig())
        assert labels_of(data.train).dtype == np.float32
        assert np.array_equal(
            labels_of(data.train), np.array(scores, np.float32)[source_rows(data.train)]
        )
        assert data.facts["train"]["mean_label"] == pytest.approx(labels_of(data.train).mean())
    assert (data.classes, "classes" in data.facts) == ((), False)


def test_rows_whose_numbers_differ_behind_the_point_have_another_content(tmp_path: Path) -> None:
    contents = set()
    for name, more in (("a", 0.2), ("b", 0.4)):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(line(number + more) for number in (1, 2, 3, 4))
        )
        task = replace(NUMBERS, data=str(tmp_path / f"{name}.jsonl"), columns=Columns())
        data: Any = task.prepare(RunConfig())
        contents.add(data.train.content)
    assert len(contents) == 2


def test_lists_become_ones_where_a_class_applies(tmp_path: Path) -> None:
    labels = [["b", "a"], [], ["c"], ["a"]] * 3
    for suffix in (".json", ".jsonl", ".parquet"):
        file = write(tmp_path / f"rows{suffix}", text=[f"row {n}" for n in range(12)], label=labels)
        data: Any = replace(LISTS, data=str(file), columns=Columns()).prepare(RunConfig())
        expected = np.array([[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]] * 3)
        assert np.array_equal(labels_of(data.train), expected[source_rows(data.train)])
    assert data.facts["train"]["mean_labels"] == pytest.approx(
        labels_of(data.train).sum(1).mean(), abs=0.01
    )
    assert data.classes == ("a", "b", "c")


def line(label: object) -> str:
    return json.dumps({"text": "t", "label": label})


BAD: dict[str, Any] = {
    "a string": (NUMBERS, line("many"), r"row 3: label is a string \('many'\), expected a number$"),
    "null": (NUMBERS, line(None), r"row 3: label is missing \(null\), expected a number$"),
    "a boolean": (NUMBERS, line(True), r"row 3: label is a boolean \(True\), expected a number$"),
    "nan": (NUMBERS, line(float("nan")), "row 3: label is nan, expected a finite number of fp32$"),
    "infinity": (
        NUMBERS,
        line(float("-inf")),
        "row 3: label is -inf, expected a finite number of fp32$",
    ),
    "too large": (
        NUMBERS,
        line(1e39),
        r"row 3: label is 1e\+39, expected a finite number of fp32$",
    ),
    "a name": (
        LISTS,
        line("a"),
        r"row 3: label is a string \('a'\), expected a list of labels, as JSON, JSON Lines",
    ),
    "names in a string": (
        LISTS,
        line("a;b"),
        r"row 3: label is a string \('a;b'\), expected a list",
    ),
    "no list": (LISTS, line(None), r"row 3: label is missing \(null\), expected a list"),
    "twice": (LISTS, line(["a", "b", "a"]), "row 3: label 'a' is repeated in the list$"),
    "a blank name": (LISTS, line(["a", " "]), "row 3: label is empty: fill it in"),
    "another type": (
        LISTS,
        line([1]),
        r"row 3: label is an integer \(1\), but an earlier one is a string \('a'\)",
    ),
    "negative": (
        replace(LISTS, columns=Columns()),
        '{"text": "t", "label": [-1]}',
        "label -1 is out of range",
    ),
}


@pytest.mark.parametrize(("task", "bad", "message"), BAD.values(), ids=BAD.keys())
def test_a_label_that_cannot_be_is_one_line(
    task: Any, bad: str, message: str, tmp_path: Path
) -> None:
    good = [line(1.5), line(2)] if task is NUMBERS else [line(["a"]), line([])]
    good = [line([0]), line([1])] if "-1" in bad else good
    (tmp_path / "rows.jsonl").write_text("\n".join([*good, bad]))
    with pytest.raises(DataError, match=rf"^data file .*rows\.jsonl, .*{message}") as caught:
        replace(task, data=str(tmp_path / "rows.jsonl"), columns=Columns()).prepare(RunConfig())
    assert "\n" not in str(caught.value)


def test_a_string_of_a_table_is_not_guessed_to_be_several_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\nx,a;b\ny,a\n")
    with pytest.raises(
        DataError, match=r"rows\.csv, row 1: label is a string \('a;b'\), expected a list of labels"
    ):
        replace(LISTS, data=str(tmp_path / "rows.csv"), columns=Columns()).prepare(RunConfig())


def test_labels_from_which_nothing_can_be_learned_are_one_line(tmp_path: Path) -> None:
    for task, label, message in (
        (NUMBERS, 1.5, r"all 3 rows have the label 1\.5: there is nothing to learn$"),
        (LISTS, [], "no row has a label: a classifier needs at least 2 classes$"),
        (LISTS, ["a"], "all 3 rows have the label 'a': a classifier needs at least 2 classes$"),
    ):
        (tmp_path / "rows.jsonl").write_text("\n".join([line(label)] * 3))
        with pytest.raises(DataError, match=message):
            replace(task, data=str(tmp_path / "rows.jsonl"), columns=Columns()).prepare(RunConfig())


def test_a_single_row_cannot_be_split_and_a_label_that_training_lacks_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text(line(["a", "b"]))
    with pytest.raises(
        DataError, match="holds one row, so none is left for evaluation; give --eval-data a file"
    ):
        replace(LISTS, data=str(tmp_path / "rows.jsonl"), columns=Columns()).prepare(RunConfig())
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"first": "x", "topics": ["nose"]}))
    with pytest.raises(
        DataError, match=r"held-out\.jsonl, row 1: label 'nose' is out of range.*mean 'noise'"
    ):
        replace(LISTS, eval_data=str(tmp_path / "held-out.jsonl")).prepare(RunConfig())


def test_rare_classes_of_lists_are_named_with_their_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(map(line, [["a", "rare"], [], ["b"], ["a", "b"]] + [["a", "b"]] * 20))
    )
    data = replace(LISTS, data=str(tmp_path / "rows.jsonl"), columns=Columns()).prepare(RunConfig())
    assert any(
        "fewer than 3 rows, too few to learn from: 'rare' (row 1)" in said for said in data.warnings
    )


def test_the_report_of_numbers_has_correlations_and_the_baseline_of_the_training_mean() -> None:
    data: Any = NUMBERS.prepare(RunConfig())
    label, prediction = torch.tensor([1.0, 4.0, 2.0, 2.0]), torch.tensor([0.5, 3.0, 2.5, 1.0])
    report = NUMBERS.report(
        {"label": label, "prediction": prediction, "loss": (label - prediction) ** 2}, data
    )
    mean = labels_of(data.train).mean(dtype=np.float64)
    assert report == {
        "loss": pytest.approx(0.625),
        "rmse": pytest.approx(0.625**0.5),
        "pearson": pytest.approx(stats.pearsonr(label, prediction).statistic),
        "spearman": pytest.approx(stats.spearmanr(label, prediction).statistic),
        "baseline_loss": pytest.approx(float(((label.double() - mean) ** 2).mean())),
    }
    alike = NUMBERS.report(
        {"label": label, "prediction": torch.ones(4), "loss": (label - 1) ** 2}, data
    )
    assert (alike["pearson"], alike["spearman"], alike["loss"]) == (None, None, 2.75)
    assert set(NUMBERS.report({}, data).values()) == {None}


def test_the_report_of_lists_is_that_of_scikit_learn() -> None:
    data: Any = LISTS.prepare(RunConfig())
    label = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0]], dtype=torch.uint8)
    prediction = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.uint8)
    report = LISTS.report({"label": label, "prediction": prediction, "loss": torch.ones(4)}, data)
    assert (report["loss"], report["subset_accuracy"], report["majority_accuracy"]) == (
        1.0,
        0.5,
        0.5,
    )
    for average in ("micro", "macro"):
        expected = f1_score(label, prediction, average=average, zero_division=0)
        assert report[f"{average}_f1"] == pytest.approx(expected)
    assert "noise" in str(report["classification_report"])
    assert set(LISTS.report({}, data).values()) == {None}


def test_two_classes_have_the_f1_of_the_second_and_all_have_the_mean_over_classes() -> None:
    label, prediction = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 1, 0, 1, 1])
    outputs = {"label": label, "prediction": prediction, "loss": torch.ones(5)}
    report = TASK.report(outputs, TASK.prepare(RunConfig()))
    assert report["f1"] == pytest.approx(f1_score(label, prediction))
    assert report["macro_f1"] == pytest.approx(f1_score(label, prediction, average="macro"))
    three = replace(TASK, data=str(PHRASES.with_name("rows.json")), columns=Columns())
    assert "f1" not in three.report(outputs, three.prepare(RunConfig()))
    assert (list(TASK.metrics), list(replace(TASK, class_names=("other", "same")).metrics)) == (
        ["loss", "accuracy", "macro_f1"],
        ["loss", "accuracy", "macro_f1", "f1"],
    )


def test_predictions_of_numbers_and_lists_say_what_they_are() -> None:
    data: Any = NUMBERS.prepare(RunConfig())
    outputs = {"prediction": torch.tensor([3.3000001, -0.25]), "label": torch.tensor([3.4, 1e-9])}
    pairs = [(line["label"], line["prediction"]) for line in NUMBERS.predictions(outputs, data)]
    assert pairs == [(3.4, 3.3), (1e-9, -0.25)]
    data = LISTS.prepare(RunConfig())
    logits = torch.tensor([[2.0, -1.0, 0.5], [-1.0, -2.0, -3.0]])
    lines = list(LISTS.predictions(LISTS.problem.outputs(logits, None), data))
    assert [line["prediction"] for line in lines] == [["animal at rest", "water"], []]
    assert list(lines[0]["scores"].items()) == [  # type: ignore[attr-defined]
        ("animal at rest", 0.880797),
        ("water", 0.622459),
        ("noise", 0.268941),
    ]
    assert "label" not in lines[0]


def test_class_names_stand_for_integers_in_predictions_and_in_the_model() -> None:
    task = replace(TASK, class_names=("other", "same"))
    data: Any = task.prepare(RunConfig())
    assert (data.labels, data.facts["classes"]) == (("other", "same"), ["other", "same"])
    assert task.build_model(RunConfig(), data).config.id2label == {0: "other", 1: "same"}  # type: ignore[union-attr]
    first, *_ = task.predictions(
        task.problem.outputs(torch.tensor([[0.0, 1.0]]), torch.tensor([0])), data
    )
    assert (first["label"], first["prediction"], set(first["scores"])) == (  # type: ignore[call-overload]
        "other",
        "same",
        {"other", "same"},
    )
    assert np.array_equal(labels_of(data.train), labels_of(TASK.prepare(RunConfig()).train))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"class_names": ("a", "b", "c")},
            r"3 names, but data file .*phrases\.jsonl has 2 classes: 0, 1$",
        ),
        ({"class_names": ("a", "a")}, "a name is repeated$"),
        ({"class_names": ("a", "b"), "problem_type": "regression"}, "a regression has no classes$"),
        (
            {
                "class_names": ("a", "b"),
                "data": str(PHRASES.with_name("rows.json")),
                "columns": Columns(),
            },
            r"the labels of data file .*rows\.json are words already: rain, sun, wind$",
        ),
    ],
    ids=["count", "twice", "regression", "words"],
)
def test_class_names_that_cannot_be_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^class_names = \[.*\]: .*{message}"):
        replace(TASK, **changes).prepare(RunConfig())
