"""Several evaluation sets: each is evaluated whole, its metrics have its name, and one of
them is judged by.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from distcore import ConfigError, Datasets, Direction, OnResume, Report, RunConfig, train
from distcore.errors import TaskError
from distcore.plugin.task.bound import BoundTask
from distcore.testing.problem import Problem, RandomRows

STANDS_STILL = 1e-30
"""Learning rate at which no evaluation is better than the first."""


@dataclass(frozen=True, kw_only=True)
class Several(Problem):
    """A task with two evaluation sets."""

    metrics: ClassVar[dict[str, Direction]] = {"loss": "min", "accuracy": "max"}
    on_resume: ClassVar[dict[str, OnResume]] = {"first": "free"}

    first: str = "easy"

    def prepare(self, config: RunConfig) -> Datasets:
        data = super().prepare(config)
        return replace(
            data, evaluations={self.first: data.evaluation, "hard": RandomRows(7, seed=2)}
        )


class Uneven(Several):
    """Its report lacks a metric for the smaller set."""

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        given = super().report(outputs, data)
        return given if len(outputs["loss"]) > 7 else {"loss": given["loss"]}


class Misplaced(Problem):
    def prepare(self, config: RunConfig) -> Datasets:
        return replace(super().prepare(config), evaluations={"hard": RandomRows(7, seed=2)})


def run(out: Path, task: Problem, best: str = "auto", **changes: Any) -> Report:
    config: dict[str, Any] = {
        "out": str(out),
        "max_steps": 4,
        "eval_every": 2,
        "save_every": 2,
        "global_batch_size": 4,
        "lr": 0.01,
        "device": "cpu",
        "checkpoints": {"best": best, "keep_last": 9},
    }
    return train(RunConfig(**config | changes), task)


def evaluations(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval/evaluated" in line]


def test_each_set_has_its_metrics_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tmp_path / "run", Several())
    assert {name: one["evaluated"] for name, one in report["evaluations"].items()} == {
        "easy": 11,
        "hard": 7,
    }
    assert report["evaluation"] == report["evaluations"]["easy"]
    assert report["test_is_last_evaluation"]
    assert report["best"]
    assert report["best"]["metric"] == "easy/loss"
    last = evaluations(tmp_path / "run")[-1]
    of_sets = {f"eval/{name}/loss": one["loss"] for name, one in report["evaluations"].items()}
    assert last | of_sets == last
    assert last["eval/evaluated"] == 18
    said = capsys.readouterr().err
    assert "evaluation at step 4: easy/loss " in said
    assert "hard/accuracy " in said


def test_a_single_set_has_no_name_and_no_entry(tmp_path: Path) -> None:
    assert run(tmp_path / "run", Problem())["evaluations"] == {}
    assert "eval/loss" in evaluations(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("best", "metric"), [("accuracy", "easy/accuracy"), ("hard/accuracy", "hard/accuracy")]
)
def test_best_names_a_set_or_is_of_the_first(best: str, metric: str, tmp_path: Path) -> None:
    report = run(tmp_path / "run", Several(), best)
    values = [line[f"eval/{metric}"] for line in evaluations(tmp_path / "run")]
    assert report["best"] == {
        "step": [2, 4][values.index(max(values))],
        "metric": metric,
        "value": max(values),
    }


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_patience_is_of_the_named_set_and_ranks_end_together(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "lr": STANDS_STILL,
        "patience": 2,
        "max_steps": 12,
        "nproc": 2,
        "strategy": "ddp",
    }
    report = run(tmp_path / "run", Several(), "hard/loss", **changes)
    assert report["steps"] == 6
    assert report["best"]
    assert report["best"]["metric"] == "hard/loss"
    alone = run(
        tmp_path / "alone", Several(), "hard/loss", **changes | {"nproc": 1, "strategy": "single"}
    )
    for name, one in alone["evaluations"].items():
        assert report["evaluations"][name] == pytest.approx(one, rel=1e-5)


@pytest.mark.programs
def test_a_resume_judges_by_the_set_of_the_checkpoint_unless_it_has_another_name(
    tmp_path: Path,
) -> None:
    before = run(tmp_path / "run", Several(), "easy/loss", lr=STANDS_STILL)["best"]
    more: dict[str, Any] = {
        "lr": STANDS_STILL,
        "resume": "auto",
        "max_steps": 6,
        "resume_changed": "max_steps",
    }
    assert run(tmp_path / "run", Several(), "easy/loss", **more)["best"] == before
    other = run(tmp_path / "run", Several(first="other"), "loss", **more | {"max_steps": 8})["best"]
    assert other
    assert (other["step"], other["metric"]) == (8, "other/loss")


def test_a_resume_that_trains_nothing_evaluates_each_set(tmp_path: Path) -> None:
    report = run(tmp_path / "run", Several())
    again = run(tmp_path / "run", Several(), resume="auto")
    assert again["evaluations"] == report["evaluations"]
    assert not again["test_is_last_evaluation"]


@pytest.mark.parametrize("best", ["hrd/loss", "hard/f1"])
def test_a_best_metric_of_no_set_is_one_line(best: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^checkpoints\.best = '{best}': no metric of task "):
        run(tmp_path / "run", Several(), best)


def test_a_set_without_a_declared_metric_is_refused_by_name_before_the_first_step(
    tmp_path: Path,
) -> None:
    line = r"^evaluation set 'hard': task: the report lacks 'accuracy', which `metrics` declares"
    with pytest.raises(TaskError, match=line):
        run(tmp_path / "run", Uneven())
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_the_evaluation_rows_are_those_of_the_first_set() -> None:
    line = (
        r"^task Misplaced: prepare\(\) returned as 'evaluation' other rows than the first of its"
        r" sets$"
    )
    with pytest.raises(TaskError, match=line):
        BoundTask.wrap(Misplaced()).prepare(RunConfig())
