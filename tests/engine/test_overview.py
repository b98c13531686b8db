"""The lines before the first step, and what is kept for whoever asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from work_folder import enter

from distcore.cli.main import main

TASK = """
import torch
from torch import nn
from distcore import Simple

class Points(Simple):
    def data(self):
        sets = [
            torch.utils.data.TensorDataset(torch.randn(rows, 4), torch.randn(rows))
            for rows in (1200, 16, 8)
        ]
        return sets

    def model(self):
        return nn.Linear(4, 1)

    def row_loss(self, model, batch):
        points, targets = batch
        return (model(points)[:, 0] - targets) ** 2
"""
JOB = (
    "train --device cpu --task points.py:Points --max-steps 2 --global-batch-size 8 --set"
    " extensions.progress=false"
)


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)
    Path("points.py").write_text(TASK)


def lines_of(flags: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    assert main([*JOB.split(), "--out", "run", *flags.split()]) == 0
    return capfd.readouterr().err.splitlines()


def test_a_block_says_what_will_be_done_and_nothing_of_tokens(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert lines_of("--freeze bias", capfd) == [
        "task:   points.py:Points",
        "rows:   1,200 to train on, 16 to evaluate on, 8 to test on",
        "model:  Linear, 5 parameters, 4 of them trained",
        "ranks:  1 rank (single) on cpu, in fp32",
        "steps:  2 of 8 rows, 0.0133 epochs",
    ]
    report = json.loads(Path("run/report.json").read_text())
    assert report["model"] == {"parameters": 5, "trained": 4}
    assert report["micro_batches"]["tokens"] == 4096
    assert report["padding_free"] == {
        "on": False,
        "why": report["padding_free"]["why"],
        "difference": None,
    }


@pytest.mark.parametrize(("warmup", "is_said"), [("1", False), ("2", True)])
def test_a_warmup_that_does_not_end_is_said(
    warmup: str, is_said: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = ", all of them warm-up" if is_said else ""
    assert lines_of(f"--warmup {warmup}", capfd)[-1] == f"steps:  2 of 8 rows, 0.0133 epochs{ends}"


def test_a_batch_larger_than_the_data_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    said = lines_of("--global-batch-size 2000", capfd)[-1]
    assert said == "steps:  2 of 2000 rows, 2 epochs, each of all 1200 rows, which are fewer"
    assert main([*JOB.split(), "--global-batch-size", "2000", "--warmup", "3", "--dry-run"]) == 0
    printed = capfd.readouterr().out
    assert (
        "# warning: schedule.warmup_steps = 3: all 2 steps are warm-up, below the rate 0.001\n"
        in printed
    )
    assert (
        "# warning: a global batch of 2000 rows is larger than the data, of which each step"
        " takes all" in printed
    )


@pytest.mark.parametrize(
    ("patience", "every", "is_said"), [(2, 1, True), (1, 1, False), (1, 2, True), (0, 0, False)]
)
def test_a_patience_that_no_evaluation_reaches_is_said(
    patience: int, every: int, is_said: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = f", too few evaluations for --patience {patience}" if is_said else ""
    said = next(
        line
        for line in lines_of(f"--patience {patience} --eval-every {every}", capfd)
        if "steps:" in line
    )
    assert said == f"steps:  2 of 8 rows, 0.0133 epochs{ends}"


@pytest.mark.programs
@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize(
    ("flags", "is_said"), [("--micro-batch-size 8", False), ("--micro-batch-size 4", True)]
)
@pytest.mark.parametrize("is_global", [False, True])
def test_batch_normalization_is_said_where_a_result_depends_on_micro_batches(
    flags: str, is_said: bool, is_global: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("points.py").write_text(
        TASK.replace("nn.Linear(4, 1)", "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))")
    )
    flags += "" if is_global else " --set extensions.batch_norm=false"
    notes = [line for line in lines_of(flags, capfd) if line.startswith("note:")]
    assert notes == (is_said and not is_global) * [
        "note:   batch normalization mixes the rows of a micro-batch: results depend on ranks and"
        " micro-batches"
    ]


POWER = (
    "note:   the spectral norm of '0' makes a power iteration in each of up to 2 micro-batches of a"
    " step, not one: "
)
RUNNING = (
    "note:   running statistics of instance normalization take the main rank's rows, once in each"
    " micro-batch: "
)


@pytest.mark.programs
@pytest.mark.parametrize(("size", "is_said"), [(4, True), (8, False)])
@pytest.mark.parametrize(
    ("layers", "note"),
    [
        (
            "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
            POWER + "results depend on micro-batches",
        ),
        ("nn.utils.spectral_norm(nn.Linear(4, 4))", POWER + "results depend on micro-batches"),
        (
            "nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()",
            RUNNING + "evaluations depend on ranks and micro-batches",
        ),
        ("nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2), nn.Flatten()", ""),
    ],
)
def test_state_that_each_micro_batch_moves_is_said_without_a_proof_too(
    layers: str, note: str, size: int, is_said: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("points.py").write_text(
        TASK.replace("nn.Linear(4, 1)", f"nn.Sequential({layers}, nn.Linear(4, 1))")
    )
    lines = lines_of(f"--micro-batch-size {size} --prove off", capfd)
    assert [line for line in lines if line.startswith("note:")] == [note] * (is_said and bool(note))


@pytest.mark.programs
@pytest.mark.parametrize("masks", ["row", "rank"])
@pytest.mark.parametrize(
    ("p", "size", "is_said"), [(0.1, 4, True), (0.1, 8, False), (0.0, 4, False)]
)
def test_dropout_is_said_where_its_masks_depend_on_micro_batches(
    p: float, size: int, is_said: bool, masks: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("points.py").write_text(
        TASK.replace("nn.Linear(4, 1)", f"nn.Sequential(nn.Dropout({p}), nn.Linear(4, 1))")
    )
    lines = lines_of(f"--micro-batch-size {size} --set dropout_masks={masks}", capfd)
    assert [line for line in lines if line.startswith("note:")] == (is_said and masks == "rank") * [
        "note:   dropout masks follow from the rank, not from the row: results depend on ranks and"
        " micro-batches"
    ]


def test_how_steps_are_cut_is_for_those_who_debug(capfd: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in lines_of("--log-level debug", capfd) if "micro-batches" in line)
    assert line == "D rank 0: micro-batches: at most 4096 rows"


def test_who_wants_no_messages_gets_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert lines_of("--log-level warning", capfd) == []


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
def test_the_main_rank_says_it_once(capfd: pytest.CaptureFixture[str]) -> None:
    lines = lines_of("--strategy ddp --nproc 2", capfd)
    assert [line.partition(":")[0] for line in lines] == ["task", "rows", "model", "ranks", "steps"]
    assert lines[3] == "ranks:  2 ranks (ddp) on cpu, in fp32"
