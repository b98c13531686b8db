"""``distcore train --sweep … --trials N``: settings that Optuna draws, the same
again after a stop.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from work_folder import STRANGERS, enter

from distcore.checkpoint import read_tensors
from distcore.cli.main import main
from distcore_workbench.compare.sweep_space import Range, axes_of, ends

optuna = pytest.importorskip("optuna")

from distcore_workbench.compare.trials import Behind  # noqa: E402

LINE = """
import time
import torch
from torch.utils.data import TensorDataset
from distcore import Simple

class Line(Simple):
    def data(self):
        x = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(x, 3 * x), TensorDataset(x[::8], 3 * x[::8])

    def model(self):
        return torch.nn.Linear(1, 1)

    def row_loss(self, model, batch):
        time.sleep(0.01)
        return (model(batch[0]) - batch[1]).square()[:, 0]
"""
JOB = [
    "train",
    "--task",
    "line.py:Line",
    "--max-steps",
    "40",
    "--eval-every",
    "4",
    "--save-every",
    "4",
    "--global-batch-size",
    "8",
    "--set",
    "device=cpu",
]
LATE = ["--set", "eval_at_epoch_end=false", "--set", "eval_every=0"]
SWEEP = [*JOB, "--sweep", "lr=1e-5..1e-1 log", "--sweep", "seed=1,2", "--prune", "--trials", "7"]


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the task in ``line.py``."""
    (tmp_path / "line.py").write_text(LINE)
    enter(tmp_path, monkeypatch)
    return tmp_path


def record(folder: str) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads(Path(folder, "trials.json").read_text())["trials"]
    return trials


def stop_in_second_trial(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the sweep ``stopped``, and send SIGTERM as soon as its second trial trains."""
    command = [sys.executable, "-m", "distcore", *SWEEP, "--out", "stopped"]
    own = {"DISTCORE_CACHE": str(folder / "cache"), "DISTCORE_BLOCK_PLUGINS": STRANGERS}
    with subprocess.Popen(
        command, cwd=folder, env=os.environ | own, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 100
        while len(list(folder.glob("stopped/*/metrics.jsonl"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, stderr=told)


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.timeout(300)
def test_a_stopped_search_goes_on_to_the_trials_of_one_that_was_not(
    lines: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*SWEEP, "--out", "whole"]) == 0
    out = capfd.readouterr().out
    trials = record("whole")
    assert len({one["run"] for one in trials}) == len(trials) == 7
    states = [one["state"] for one in trials]
    assert set(states) == {
        "complete",
        "pruned",
    }, "of seven rates over four orders of magnitude one falls behind"
    assert f"behind the median of those before: {states.count('pruned')} of 7 trials" in out
    best = min((one for one in trials if one["state"] == "complete"), key=lambda one: one["value"])
    assert f"best: {best['run']}, loss {best['value']:.4g}; the same again: " in out
    assert re.search(r"^importance for loss: lr \d\.\d+, seed \d\.\d+$", out, re.M)

    assert main(["compare", "whole", "--out", "page"]) == 0
    assert (
        f"behind the median of those before: {states.count('pruned')} of 7 trials"
        in capfd.readouterr().out
    )
    assert "Settings and loss, the best run in bold" in Path("page/compare.html").read_text()

    assert main(["train", f"whole/{best['run']}/config.yaml", "--out", "again"]) == 0
    last = "checkpoints/step-00000040"
    again, expected = (
        read_tensors(Path("again", last)),
        read_tensors(Path("whole", best["run"], last)),
    )
    assert all(again[name].equal(expected[name]) for name in expected)

    stopped = stop_in_second_trial(lines)
    assert stopped.returncode == 143
    assert stopped.stderr.splitlines()[-1].startswith(
        f"sweep stopped in {trials[1]['run']}; go on with: "
    )
    assert main([*SWEEP, "--out", "stopped"]) == 0
    assert record("stopped") == trials
    said = capfd.readouterr().err
    assert f"trial 1 of 7: {trials[0]['run']}: finished already\n" in said
    assert re.search(rf"trial 2 of 7: {trials[1]['run']}\n", said)


def test_a_trial_may_be_behind_at_its_first_evaluation_and_not_at_a_later_one(
    tmp_path: Path,
) -> None:
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner())
    for _ in range(5):
        trial = study.ask()
        for step in (4, 8):
            trial.report(0.5, step)
        study.tell(trial, 0.5)
    behind = Behind(study.ask(), tmp_path / "metrics.jsonl", "loss")
    assert not behind.is_to_end(), "there is no file yet"
    first, second = (json.dumps({"step": step, "eval/loss": 0.9}) + "\n" for step in (4, 8))
    (tmp_path / "metrics.jsonl").write_text(first + second[:9])
    assert not behind.is_to_end()
    (tmp_path / "metrics.jsonl").write_text(first + second)
    assert behind.is_to_end()


def test_a_range_of_integers_draws_integers_and_its_ends_are_checked_as_values_of_a_list() -> None:
    axes = axes_of(["max_steps=2..8", "lr=1e-4..1 log", "seed=1,2"], {})
    assert axes["max_steps"] == Range(low=2, high=8, log=False)
    assert axes["lr"] == Range(low=1e-4, high=1.0, log=True)
    assert list(ends(axes)) == [
        "max_steps=2,lr=0.0001,seed=1",
        "max_steps=8,lr=0.0001,seed=1",
        "max_steps=2,lr=1.0,seed=1",
        "max_steps=2,lr=0.0001,seed=2",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--sweep", "lr=1e-4..1e-3"],
            "--sweep lr=0.0001..0.001: say how many of these values to try, with --trials N",
        ),
        (
            ["--trials", "3"],
            "--trials, --sampler and --prune: are of a sweep; give --sweep KEY=LOW..HIGH, too",
        ),
        (["--sweep", "lr=1,2", "--prune"], "--prune: is of trials; say how many with --trials N"),
        (["--sweep", "lr=1..2", "--trials", "0"], "--trials 0: must be at least 1"),
        (
            ["--sweep", "lr=1..2", "--trials", "3", "--sampler", "grid"],
            "--sampler grid: expected one of tpe, random",
        ),
        (["--sweep", "lr=2..1", "--trials", "3"], "--sweep lr=2..1: 2 is not below 1"),
        (
            ["--sweep", "lr=0..1 log", "--trials", "3"],
            "--sweep lr=0..1 log: a range with log begins above 0",
        ),
        (
            ["--sweep", "lr=-1..1", "--trials", "3"],
            "command line: lr = -1: must be greater than 0 or 'auto'",
        ),
        (
            ["--sweep", "lr=1..2", "--trials", "3", "--set", "checkpoints.best=null"],
            "--trials: needs a metric to judge by; name one by checkpoints.best",
        ),
        (
            ["--sweep", "lr=1..2", "--trials", "3", "--prune", *LATE],
            "--prune: nothing is evaluated before the end; set --eval-every",
        ),
    ],
)
@pytest.mark.usefixtures("lines")
def test_trials_that_cannot_be_are_one_line_before_the_first_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, "--out", "none", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not Path("none").exists()


@pytest.mark.usefixtures("lines")
def test_a_dry_run_says_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SWEEP, "--out", "none", "--dry-run"]) == 0
    assert (
        capsys.readouterr().out
        == "7 trials by tpe, judged by loss (min), in none: lr of 1e-05..0.1 log, seed of 1|2\n"
    )
