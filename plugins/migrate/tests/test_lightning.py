"""Optimizer, schedule and clipping of a file of the Lightning CLI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distcore.config import flatten
from distcore_migrate import Migration, migrate

JOB = """\
trainer: {max_epochs: 4, accelerator: cpu, gradient_clip_val: 0.5}
model: {class_path: models.Classifier}
data: {class_path: rows.Rows, init_args: {batch_size: 8}}
"""
SGD = "optimizer: {class_path: torch.optim.SGD, init_args: {momentum: 0.9}}\n"


def made_of(text: str, folder: Path) -> tuple[Migration, dict[str, Any]]:
    (folder / "job.yaml").write_text(text)
    made = migrate([str(folder / "job.yaml")], [])
    return made, flatten(made.config.model_dump(mode="json"))


def test_the_optimizer_is_that_of_the_file_with_the_rate_of_torch_and_a_constant_schedule(
    tmp_path: Path,
) -> None:
    _, config = made_of(JOB + SGD, tmp_path)
    assert (config["optimizer.name"], config["optimizer.momentum"], config["lr"]) == (
        "sgd",
        0.9,
        1e-3,
    )
    assert (config["schedule.name"], config["clip.norm"], config["clip.value"]) == (
        "constant",
        0.5,
        None,
    )


@pytest.mark.parametrize(
    ("given", "schedule", "said"),
    [
        ("T_max: 4", ("cosine", "epoch"), False),
        ("T_max: 5", ("constant", "step"), True),
        ("T_max: 4, eta_min: 0.1", ("constant", "step"), True),
    ],
)
def test_a_cosine_over_the_epochs_is_ours_and_another_is_constant(
    given: str, schedule: tuple[str, str], said: bool, tmp_path: Path
) -> None:
    name = "torch.optim.lr_scheduler.CosineAnnealingLR"
    made, config = made_of(
        f"{JOB}{SGD}lr_scheduler: {{class_path: {name}, init_args: {{{given}}}}}\n", tmp_path
    )
    assert (config["schedule.name"], config["schedule.interval"]) == schedule
    assert ("written as constant" in made.text) is said


def test_clipping_by_value_is_no_norm(tmp_path: Path) -> None:
    _, config = made_of(JOB.replace("0.5}", "0.5, gradient_clip_algorithm: value}") + SGD, tmp_path)
    assert (config["clip.norm"], config["clip.value"]) == (None, 0.5)


def test_an_optimizer_that_the_model_makes_is_an_open_question(tmp_path: Path) -> None:
    assert "configure_optimizers() of the model says it" in made_of(JOB, tmp_path)[0].text.replace(
        "\n#  ", ""
    )


def test_an_optimizer_without_an_equal_is_said(tmp_path: Path) -> None:
    assert (
        "left at the default, adamw" in made_of(JOB + SGD.replace("SGD", "Rprop"), tmp_path)[0].text
    )


def test_the_command_reads_its_file_and_its_flags_go_first(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + SGD)
    line = (
        f"python train.py fit --config {tmp_path / 'job.yaml'} --trainer.max_epochs 2"
        " --optimizer.init_args.lr 0.5"
    )
    config = flatten(migrate([], line.split()).config.model_dump(mode="json"))
    assert (config["task"], config["epochs"], config["lr"], config["optimizer.name"]) == (
        "models.py:Classifier", 2, 0.5, "sgd",
    )  # fmt: skip
