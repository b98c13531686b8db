"""Image classification as a user runs it: what it learns, reports and
exports; under every strategy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategy_chain
import torch
from image_cases import in_folders
from safetensors.torch import load_file
from transformers import pipeline

from distcore import Report, RunConfig, launch, train
from distcore.checkpoint import read_tensors
from distcore.cli.main import main

pytestmark = pytest.mark.programs  # its runs are whole ones

STEPS = 10
ROWS = 60
AUGMENT = {"shift": 0.2, "flip": True}


def config(folder: Path, out: str, **changes: Any) -> RunConfig:
    tree = {
        "task": "image-classification",
        "out": str(folder / out),
        "max_steps": STEPS,
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "lr": 1e-3,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    options = {
        "data": str(folder / "photos"),
        "image_size": 16,
        "augment": AUGMENT,
        "model": "vit-tiny",
    }
    return RunConfig.model_validate(
        tree | {"task_options": options | changes.pop("task_options", {})} | changes
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    in_folders(folder / "photos", ROWS)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Report:
    """The report of one process."""
    return train(config(folder, "single"))


def lines(file: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, file.read_text().splitlines()))


def test_a_run_reports_the_metrics_of_classification(plain: Report) -> None:
    evaluation = plain["evaluation"]
    assert evaluation["accuracy"] > evaluation["majority_accuracy"]
    assert "blue" in evaluation["classification_report"]
    assert evaluation["evaluated"] == evaluation["dataset_size"] == 6
    assert plain["data"]["classes"] == ["blue", "red"]


def test_predictions_name_the_files(plain: Report, folder: Path) -> None:
    predictions = lines(folder / "single/predictions.jsonl")
    assert [list(line) for line in predictions] == [
        ["index", "file", "label", "prediction", "scores"]
    ] * 6
    assert all(Path(line["file"]).parent.name == line["label"] for line in predictions)
    right = sum(line["label"] == line["prediction"] for line in predictions)
    assert right / 6 == pytest.approx(plain["evaluation"]["accuracy"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world", ["--strategy single", "--strategy fsdp --nproc 2 --set micro_batch_size=1"]
)
def test_images_without_labels_are_predicted_as_the_run_s_own_test_did(
    plain: Report, folder: Path, tmp_path: Path, world: str
) -> None:
    given = ["--data", str(folder / "photos"), "--out", str(tmp_path / "lines.jsonl")]
    assert main(["predict", str(folder / "single"), *given, *world.split()]) == 0
    predictions = lines(tmp_path / "lines.jsonl")
    assert [line["file"] for line in predictions] == sorted(
        map(str, (folder / "photos").glob("*/*.png"))
    )
    assert set(predictions[0]) == {"file", "prediction", "scores"}
    by_file = {line["file"]: line for line in predictions}
    for tested in lines(folder / "single/predictions.jsonl"):
        line = by_file[tested["file"]]
        assert line["prediction"] == tested["prediction"]
        assert line["scores"] == pytest.approx(tested["scores"], abs=2e-5)


def test_an_exported_model_predicts_the_same_in_a_pipeline(plain: Report, folder: Path) -> None:
    command = ["checkpoint", "export", str(folder / "single"), "--to", str(folder / "exported")]
    assert main(command) == 0
    classify = pipeline("image-classification", str(folder / "exported"))
    loss = 0.0
    for line in lines(folder / "single/predictions.jsonl"):
        scores = {answer["label"]: answer["score"] for answer in classify(line["file"])}
        assert max(scores, key=scores.__getitem__) == line["prediction"]
        loss -= float(np.log(scores[line["label"]])) / 6
    assert loss == pytest.approx(plain["evaluation"]["loss"], rel=1e-4)


def test_an_exported_model_can_be_trained_on(plain: Report, folder: Path) -> None:
    main(["checkpoint", "export", str(folder / "single"), "--to", str(folder / "again")])
    report = train(
        config(folder, "tuned", max_steps=1, lr=1e-9, task_options={"model": str(folder / "again")})
    )
    assert report["evaluation"]["loss"] == pytest.approx(plain["evaluation"]["loss"], rel=1e-4)


def test_the_convolutional_net_learns_and_its_export_is_bare_weights(folder: Path) -> None:
    report = train(config(folder, "conv", task_options={"model": "conv-tiny"}))
    assert report["evaluation"]["accuracy"] > report["evaluation"]["majority_accuracy"]
    command = [
        sys.executable,
        "-m",
        "distcore",
        "checkpoint",
        "export",
        str(folder / "conv"),
        "--to",
    ]
    done = subprocess.run(
        [*command, str(folder / "bare")], capture_output=True, text=True, check=True
    )
    assert "ConvNet is not a model of transformers; " in done.stderr
    assert {file.name for file in (folder / "bare").iterdir()} >= {"README.md", "model.safetensors"}
    card = (folder / "bare/README.md").read_text()
    assert 'load_model(model, "bare/model.safetensors")  # model: a ConvNet' in card
    checkpoint = max((folder / "conv/checkpoints").iterdir())
    trained = read_tensors(checkpoint)
    for name, tensor in load_file(folder / "bare/model.safetensors").items():
        assert torch.equal(tensor, trained[f"model/{name}"])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["vit-tiny", "conv-tiny"])
def test_a_chain_of_checkpoints_over_all_strategies_is_one_run(folder: Path, model: str) -> None:
    """Each strategy goes on for two steps where another one stopped, over two
    epochs of images that change.
    """
    whole, chain = folder / f"whole-{model}", folder / f"chain-{model}"
    train(config(folder, str(whole), task_options={"model": model}))
    strategy_chain.run_chain(
        chain, lambda **changes: config(folder, task_options={"model": model}, **changes)
    )
    strategy_chain.assert_one_run(chain, whole)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_two_ranks_with_loader_workers_and_a_resume_see_the_same_images(
    folder: Path, plain: Report
) -> None:
    """Stopped in the first epoch, after 3 of its 5 steps, and gone on with until the
    end of the second.
    """
    workers = {"strategy": "ddp", "loader": {"workers": 2}, "nproc": 2}
    launch(train, config(folder, "workers", **workers, max_steps=3), nproc=2)
    going_on = {"resume": "auto", "resume_changed": ["total_steps"]}
    launch(train, config(folder, "workers", **workers, **going_on), nproc=2)
    losses, whole = (strategy_chain.losses(folder / out) for out in ("workers", "single"))
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(whole, rel=1e-5)
