"""Distillation: the loss is the paper's formula, the same under every strategy; a student
that fits its teacher.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from distcore import ModelError, RunConfig, train
from distcore.cli.main import main
from distcore_tasks.distillation.task import Distillation
from distcore_tasks.text_classification.options import Tokenizer

ROWS = Path(__file__).parents[1] / "text_classification/rows.json"
SMALL: dict[str, Any] = {"data": str(ROWS), "tokenizer": {"vocab_size": 200}, "dropout": 0.0}


def run(out: Path, **changes: Any) -> list[dict[str, float]]:
    config: dict[str, Any] = {
        "task": "distillation",
        "out": str(out),
        "max_steps": 3,
        "global_batch_size": 8,
        "lr": 0.01,
        "log_every": 1,
        "task_options": SMALL,
        "device": "cpu",
        "extensions": {"progress": False},
        "optimizer": {"eps": 1e-2},
        "schedule": {"name": "constant"},
    }
    train(RunConfig.model_validate(config | changes))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of the same rows, trained for a few steps and exported."""
    folder = tmp_path_factory.mktemp("teacher")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTCORE_CACHE", str(folder / "cache"))
        run(folder / "run", task="text-classification", task_options=SMALL | {"model": "bert-tiny"})
    assert main(["checkpoint", "export", str(folder / "run"), "--to", str(folder / "model")]) == 0
    return folder / "model"


@pytest.mark.parametrize("hidden", [0.0, 0.5])
def test_loss_and_gradient_are_the_formula(hidden: float) -> None:
    task = Distillation(
        data=str(ROWS),
        tokenizer=Tokenizer(vocab_size=200),
        teacher="bert-tiny",
        temperature=3.0,
        label_weight=0.25,
        hidden_weight=hidden,
        dropout=0.0,
    )
    config, data = RunConfig(), task.prepare(RunConfig())
    torch.manual_seed(0)
    model, frozen = (
        task.build_model(config, data),
        task.frozen(config, data)["teacher"].build(config, data),
    )
    plain = data.train.batch(np.arange(8))
    batch = task.consult({"teacher": frozen.eval()}, plain)
    given = task.loss(model.eval(), batch)
    inputs = {
        name: plain[name]
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in plain
    }
    mine, theirs = (each(**inputs, output_hidden_states=True) for each in (model, frozen))
    q, p = (each.logits.div(3).softmax(-1) for each in (mine, theirs))
    hard = -mine.logits.softmax(-1)[torch.arange(8), plain["labels"]].log()
    expected = 0.25 * hard + 0.75 * 9 * (p * (p / q).log()).sum(-1)
    near = cosine_similarity(mine.hidden_states[-1][:, 0], theirs.hidden_states[-1][:, 0])
    expected = (expected + hidden * (1 - near)).sum()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours, formula = (
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
        for loss in (given, expected)
    )
    assert given.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float((ours - formula).norm() / formula.norm()) <= 1e-5


@cache
def alone(folder: Path, teacher: Path) -> list[dict[str, float]]:
    return run(
        folder / "distilled-alone",
        micro_batch_size=8,
        task_options=SMALL | {"teacher": str(teacher)},
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "options"), [("ddp", {}), ("fsdp", {}), ("deepspeed", {"stage": 3})]
)
def test_two_ranks_have_the_losses_of_one(
    strategy: str, options: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    one, known = alone(tmp_path.parent, teacher), SMALL | {"teacher": str(teacher)}
    two = run(
        tmp_path / "run",
        strategy=strategy,
        nproc=2,
        strategy_options=options,
        micro_batch_size=2,
        task_options=known,
    )
    for name in ("train/loss", "train/grad_norm"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=2e-5)


@pytest.mark.programs
def test_a_student_of_a_folder_predicts_and_says_how_often_it_agrees(
    teacher: Path, tmp_path: Path
) -> None:
    # It begins as the teacher, at a rate of nearly nothing.
    run(
        tmp_path / "run",
        lr=1e-12,
        task_options=SMALL | {"teacher": str(teacher), "model": str(teacher)},
    )
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["evaluation"]["agreement"] == 1.0
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one"}\n{"text": "two"}\n')
    command = ["predict", str(tmp_path / "run"), "--data", str(texts)]
    command += ["--out", str(tmp_path / "told.jsonl")]
    assert main(command) == 0
    assert len((tmp_path / "told.jsonl").read_text().splitlines()) == 2


def test_a_teacher_that_does_not_fit_is_one_line(
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(teacher, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    names = {number: f"other {name}" for number, name in config["id2label"].items()}
    (other / "config.json").write_text(json.dumps(config | {"id2label": names, "label2id": {}}))
    for words, says in (
        (["--teacher", str(other)], "its classes are"),
        (["--model", str(teacher)], "its tokens are not those of teacher bert-mini"),
        (
            ["--hidden-weight", "1"],
            "hidden states of bert-tiny have 128 values, those of teacher bert-mini 256",
        ),
        (
            ["--set", "task_options.problem_type=regression"],
            "distillation compares probabilities of classes",
        ),
        (["--teacher", "nowhere/at/all"], "no such folder"),
    ):
        command = ["train", "--task", "distillation", "--data", str(ROWS), "--device", "cpu"]
        command += words
        assert main(command) == 2
        (line,) = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert says in line


def test_numbered_classes_fit_numbers_alone() -> None:
    from distcore_tasks.distillation.models import check_classes

    class Teacher:
        from_scratch, model = False, "numbered"

        def model_folder(self) -> Path:
            return folder

    folder = Path("unused")
    given: Any = Teacher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "distcore_tasks.distillation.models.read_config",
            lambda *_: {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}},
        )
        check_classes(given, ["0", "1"], "rows.json")
        with pytest.raises(
            ModelError, match=r"its classes are LABEL_0, LABEL_1, those of rows\.json are no, yes"
        ):
            check_classes(given, ["no", "yes"], "rows.json")


@pytest.mark.programs
def test_distillation_has_data_of_its_own() -> None:
    data = Distillation().prepare(RunConfig())
    assert "teacher bert-mini has random weights" in data.warnings[-1]
