"""A run without a better evaluation for so long ends, with a report, and a resume knows how
long it has waited.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distcore import CheckpointError, ConfigError, Datasets, Report, RunConfig, train
from distcore.checkpoint import Checkpoint
from distcore.testing.problem import Problem, RandomRows

STANDS_STILL = 1e-30
"""Learning rate at which no evaluation is better than the first."""


def run(out: Path, **changes: Any) -> Report:
    config: dict[str, Any] = {
        "out": str(out),
        "lr": STANDS_STILL,
        "max_steps": 12,
        "eval_every": 2,
        "save_every": 2,
        "global_batch_size": 4,
        "device": "cpu",
        "patience": 2,
        "checkpoints": {"keep_last": 9},
        "extensions": {"progress": False},
    }
    return train(RunConfig(**config | changes), Problem())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ended") / "run"
    report = run(out)
    assert report["steps"] == 6  # best at step 2, none better at 4 and 6
    return out


def test_a_run_out_of_patience_ends_with_a_checkpoint_of_its_last_step(ended: Path) -> None:
    state = Checkpoint(ended / "checkpoints/step-00000006").job_state()
    assert (state["best"]["step"], state["best"]["waited"], state["total_steps"]) == (2, 2, 12)


@pytest.mark.programs
def test_a_resume_of_it_trains_no_further_unless_there_is_more_patience(
    ended: Path, tmp_path: Path
) -> None:
    shutil.copytree(ended, tmp_path / "run")
    assert run(tmp_path / "run", resume="auto")["steps"] == 6
    assert run(tmp_path / "run", resume="auto", patience=3)["steps"] == 8
    assert run(tmp_path / "run", resume="auto", patience=0)["steps"] == 12


def test_a_run_that_was_interrupted_ends_where_it_would_have(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
    assert run(tmp_path / "run", resume="auto")["steps"] == 6


def change_evaluation_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the task have other evaluation rows, as a file does that was written anew."""
    prepare = Problem.prepare

    def with_other_rows(self: Problem, config: RunConfig) -> Datasets:
        other = RandomRows(self.evaluation_rows, seed=7)
        return replace(prepare(self, config), evaluation=other, test=other)

    monkeypatch.setattr(Problem, "prepare", with_other_rows)


def test_changed_evaluation_rows_are_refused_before_ranks_start(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ended, tmp_path / "run")
    change_evaluation_rows(monkeypatch)
    line = (
        r"step-00000006': its best evaluation, loss [\d.]+ at step 2, is of other evaluation rows,"
        r" .*_data: best and"
    )
    with pytest.raises(CheckpointError, match=line):
        run(tmp_path / "run", resume="auto")
    monkeypatch.setattr(
        "distcore.jobs.train.launch", lambda *_, **__: pytest.fail("ranks were started")
    )
    with pytest.raises(CheckpointError, match=line):
        run(tmp_path / "run", resume="auto", nproc=2, strategy="ddp")


def test_best_and_patience_begin_anew_with_other_rows_that_the_user_accepts(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distcore")
    shutil.copytree(ended, tmp_path / "run")
    change_evaluation_rows(monkeypatch)
    report = run(tmp_path / "run", resume="auto", resume_changed="eval_data")
    assert report["best"]
    assert report["best"]["step"] == 8
    assert report["steps"] == 12  # two evaluations after step 8 are not better
    assert "at step 2, is of other evaluation rows: best and patience begin anew" in caplog.text
    # the rows of the last checkpoint are these
    again = run(tmp_path / "run", resume="auto", patience=3)
    assert again["best"] == report["best"]


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_ranks_end_together(tmp_path: Path) -> None:
    assert run(tmp_path / "run", nproc=2, strategy="ddp")["steps"] == 6


def test_patience_without_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^patience = 2: needs a metric to judge by; name one by checkpoints.best$",
    ):
        run(tmp_path / "run", checkpoints={"best": None})
