import json
from dataclasses import replace
from inspect import isfunction, signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from label_cases import source_rows
from row_cases import row_of
from torch import nn
from transformers import AutoTokenizer

from distcore.config import RunConfig
from distcore.errors import DataError, ModelError
from distcore.plugin.task.task import Datasets, Task
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.task import TextClassification

CONFIG = RunConfig()


@pytest.fixture
def task(tmp_path):
    rows = [
        [f"{'good fine' if row % 2 else 'bad awful'} {row}", "glad" if row % 2 else "sad"]
        for row in range(40)
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    return TextClassification(
        data=str(tmp_path / "data.json"),
        model="bert-tiny",
        max_seq_len=16,
        dropout=0.0,
        eval_fraction=0.2,
    )


@pytest.fixture
def data(task):
    return task.prepare(CONFIG)


@pytest.fixture
def model(task, data):
    torch.manual_seed(0)
    return task.build_model(CONFIG, data)


METHODS = [
    name for name, value in vars(Task).items() if isfunction(value) and not name.startswith("_")
]


@pytest.mark.parametrize("name", METHODS)
def test_text_classification_has_the_methods_of_a_task(name):
    assert list(signature(getattr(TextClassification, name)).parameters) == list(
        signature(getattr(Task, name)).parameters
    )


def test_prepared_data_are_datasets(data):
    assert isinstance(data, Datasets)
    assert all(
        len(part.lengths) == len(part.items) == len(part)
        for part in (data.train, data.evaluation, data.test)
    )


def test_facts_are_json_and_name_classes_rows_and_majority(task, data):
    facts = json.loads(json.dumps(data.facts))
    assert facts["data"] == task.data
    assert facts["classes"] == ["glad", "sad"]
    assert facts["train"]["rows"] == 32
    assert 0.5 <= facts["evaluation"]["majority_share"] <= 1


def test_loss_is_the_sum_over_rows(task, data, model):
    rows = np.arange(6)
    model.eval()
    whole = task.loss(model, data.train.batch(rows))
    pieces = [task.loss(model, data.train.batch(rows[[row]])) for row in range(6)]
    assert torch.allclose(whole, torch.stack(pieces).sum(), rtol=1e-5)
    assert whole.shape == ()


def test_outputs_have_a_loss_a_prediction_and_a_label_for_each_row(task, data, model):
    batch = data.train.batch(np.arange(5))
    model.eval()
    outputs = task.outputs(model, batch)
    shapes = {name: tuple(tensor.shape) for name, tensor in outputs.items()}
    per_row = dict.fromkeys(("loss", "prediction", "label"), (5,))
    assert shapes == per_row | dict.fromkeys(("scores", "scored"), (5, 2))
    assert torch.allclose(outputs["loss"].sum(), task.loss(model, batch), rtol=1e-5)
    assert torch.equal(outputs["label"], batch["labels"])


def test_padding_does_not_change_a_row(task, data, model):
    longest = int(data.train.lengths.argmax())
    shortest = int(data.train.lengths.argmin())
    model.eval()
    alone = task.outputs(model, data.train.batch(np.array([shortest])))["loss"]
    padded = task.outputs(model, data.train.batch(np.array([shortest, longest])))["loss"][:1]
    assert torch.allclose(alone, padded, rtol=1e-5)


def test_report_compares_with_the_majority_and_names_every_class(task, data):
    outputs = {
        "loss": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "prediction": torch.tensor([0, 0, 0, 0]),
        "label": torch.tensor([0, 0, 0, 1]),
    }
    report = task.report(outputs, data)
    assert (report["loss"], report["accuracy"], report["majority_accuracy"]) == (2.5, 0.75, 0.75)
    assert "glad     0.7500    1.0000    0.8571         3" in str(report["classification_report"])
    assert "sad     0.0000" in str(report["classification_report"])


@pytest.mark.parametrize(
    "outputs", [{}, {name: torch.empty(0) for name in ("loss", "prediction", "label")}]
)
def test_report_of_no_rows_is_empty(task, data, outputs):
    assert set(task.report(outputs, data).values()) == {None}


def scored(prediction, label):
    """Outputs of two classes, of which the predicted one has 0.75."""
    prediction = torch.tensor(prediction)
    classes = torch.tensor([[0, 1]]).expand(len(prediction), 2)
    scores = torch.where(classes == prediction[:, None], 0.75, 0.25)
    return {
        "prediction": prediction,
        "label": torch.tensor(label),
        "scored": classes,
        "scores": scores,
    }


def test_predictions_are_labels_as_the_file_writes_them_and_say_which_row_it_was(task, data):
    first, second = (int(row) for row in source_rows(data.test)[:2] + 1)
    where = {"file": task.data}
    assert list(task.predictions(scored([0, 1], [1, 1]), data)) == [
        {
            "index": 0,
            **where,
            "row": first,
            "label": "sad",
            "prediction": "glad",
            "scores": {"glad": 0.75, "sad": 0.25},
        },
        {
            "index": 1,
            **where,
            "row": second,
            "label": "sad",
            "prediction": "sad",
            "scores": {"sad": 0.75, "glad": 0.25},
        },
    ]


def test_predictions_of_a_test_file_name_its_rows_by_the_ids_that_they_have(task, tmp_path):
    rows = [
        {"text": f"{word} {n}", "label": word, "name": f"{word}-{n}"}
        for n in range(5)
        for word in ("glad", "sad")
    ]
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data": str(tmp_path / "train.jsonl"), "test_data": str(tmp_path / "test.jsonl")}
    task = replace(task, **files, columns=Columns(id="name"))
    first, *_ = task.predictions(scored([0], [0]), task.prepare(CONFIG))
    assert (first["file"], first["row"], first["id"]) == (files["test_data"], 1, "glad-0")


@pytest.mark.programs
def test_predictions_of_an_embedded_dataset_have_its_name(task):
    data = replace(task, data="stdlib-docs", columns=Columns(id="name")).prepare(CONFIG)
    first, *_ = task.predictions(scored([0], [0]), data)
    assert (first["file"], first["row"], "id" in first) == (
        "stdlib-docs",
        int(source_rows(data.test)[0]) + 1,
        False,
    )


def test_the_most_probable_of_very_many_classes_have_scores(task):
    model = nn.Module()
    model.forward = lambda **_: SimpleNamespace(logits=torch.arange(500.0).expand(3, 500))
    batch = dict.fromkeys(("input_ids", "attention_mask"), torch.zeros(3, 2))
    outputs = task.outputs(model, batch)
    assert set(outputs) == {"prediction", "scores", "scored"}
    assert outputs["scored"].tolist() == [list(range(480, 500))] * 3


def test_integer_labels_stay_integers_in_predictions(task, tmp_path):
    (tmp_path / "integers.json").write_text(json.dumps([["x", 3], ["y", 5]] * 5))
    data = replace(task, data=str(tmp_path / "integers.json")).prepare(CONFIG)
    (line,) = task.predictions(scored([0], [1]), data)
    assert (line["index"], line["label"], line["prediction"], line["scores"]) == (
        0,
        5,
        3,
        {"3": 0.75, "5": 0.25},
    )


def test_a_run_folder_gets_a_tokenizer_that_gives_the_same_tokens(task, data, tmp_path):
    task.save(tmp_path / "run", CONFIG, data)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    first = int(source_rows(data.train)[0])
    text = json.loads((tmp_path / "data.json").read_text())[first][0]
    assert tokenizer(text)["input_ids"] == row_of(data.train, "tokens", 0).tolist()
    assert json.loads((tmp_path / "run" / "labels.json").read_text()) == ["glad", "sad"]


def test_a_saved_run_serves_as_a_model_folder(task, data, model, tmp_path):
    task.save(tmp_path / "run", CONFIG, data)
    model.save_pretrained(tmp_path / "run")
    again = replace(task, model=str(tmp_path / "run"))
    loaded = again.build_model(CONFIG, again.prepare(CONFIG))
    batch = data.train.batch(np.arange(4))
    assert torch.equal(task.loss(loaded.eval(), batch), task.loss(model.eval(), batch))


def test_a_tokenizer_of_another_model_is_refused(task, data, model, tmp_path):
    task.save(tmp_path / "run", CONFIG, data)
    model.save_pretrained(tmp_path / "run")
    tree = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(tree | {"vocab_size": 6}))
    with pytest.raises(
        ModelError, match=r"but config.json has a vocabulary of 6: .* do not belong together"
    ):
        replace(task, model=str(tmp_path / "run")).prepare(CONFIG)


def test_bad_rows_are_found_before_any_rank_starts(task, tmp_path):
    (tmp_path / "bad.json").write_text('[["x", 1], ["y"]]')
    with pytest.raises(DataError, match=r"bad\.json, row 2: expected \[text, label\]"):
        replace(task, data=str(tmp_path / "bad.json")).prepare(CONFIG)


def test_a_few_steps_learn(task, data, model):
    batch = data.train.batch(np.arange(len(data.train)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    before = task.loss(model, batch).item()
    for _ in range(8):
        optimizer.zero_grad()
        (task.loss(model, batch) / len(data.train)).backward()
        optimizer.step()
    assert task.loss(model, batch).item() < before / 2
