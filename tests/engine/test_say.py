"""Listeners with a say: they keep state, log sums, hear epochs, and wish for a stop, an
evaluation or a checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distcore import Report, RunConfig, hookimpl, train
from distcore.checkpoint import Checkpoint
from distcore.errors import StrategyError, TaskError
from distcore.plugin.strategy.contract import Progress, Run, StepResult
from distcore.testing.problem import Problem

HERE = Path(__file__)


def run(out: Path, extension: str, task: Any = None, **changes: Any) -> Report:
    options = changes.pop("options", True)
    config: dict[str, Any] = {
        "out": str(out),
        "lr": 1e-2,
        "max_steps": 12,
        "global_batch_size": 10,
        "device": "cpu",
        "log_every": 2,
        "extensions": (
            {"progress": False, f"{HERE}:{extension}": options}
            if extension
            else {"progress": False}
        ),
        "checkpoints": {"keep_last": 9, "best": None},
    }
    return train(RunConfig(**config | changes), task or Problem())


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@dataclass
class WishesAlone:
    """On the last rank alone wishes for an evaluation and a checkpoint in step 7, and for the
    end in step 9.
    """

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress) -> list[str] | str | None:
        if run.world.rank == run.world.size - 1:
            return {7: ["evaluate", "save"], 9: "stop"}.get(progress.step)  # type: ignore[return-value]
        return None


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_wish_of_one_rank_is_done_by_all_at_the_next_log_line(nproc: int, tmp_path: Path) -> None:
    report = run(
        tmp_path / "run", "WishesAlone", strategy="ddp" if nproc > 1 else "single", nproc=nproc
    )
    assert report["steps"] == 10
    evaluated = [line["step"] for line in lines(tmp_path / "run") if "eval/loss" in line]
    assert evaluated == [5, 8, 10]  # the end of an epoch of 5 steps, the wish, the end
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["step-00000008", "step-00000010"]


@dataclass
class Counts:
    """Keeps the samples after each step and the epochs that it heard of; wishes for the
    end after ``steps`` steps.
    """

    steps: int = 99

    def __post_init__(self) -> None:
        self.heard: list[int] = []
        self.epochs: list[str] = []

    def state(self) -> object:
        return {"heard": self.heard, "epochs": self.epochs}

    def load_state(self, state: Any) -> None:
        self.heard, self.epochs = state["heard"], state["epochs"]

    @hookimpl
    def on_run_start(self) -> str | None:
        return "stop" if len(self.heard) >= self.steps else None

    @hookimpl
    def on_epoch_start(self, progress: Progress) -> None:
        self.epochs.append(f"{progress.epoch} from {progress.step}")

    @hookimpl
    def on_step_end(self, progress: Progress) -> str | None:
        self.heard.append(progress.samples)
        return "stop" if len(self.heard) >= self.steps else None

    @hookimpl
    def on_epoch_end(self, progress: Progress) -> None:
        self.epochs.append(f"to {progress.step}")


def kept(out: Path, step: int) -> Any:
    (state,) = Checkpoint(out / f"checkpoints/step-{step:08d}").job_state()["states"].values()
    return state


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_the_state_of_a_listener_is_resumed_at_another_world_size(
    tmp_path: Path,
) -> None:
    run(tmp_path / "whole", "Counts")
    run(tmp_path / "cut", "Counts", strategy="ddp", nproc=2, save_every=3)
    run(tmp_path / "on", "Counts", resume=str(tmp_path / "cut/checkpoints/step-00000003"))
    assert kept(tmp_path / "on", 12) == kept(tmp_path / "cut", 12) == kept(tmp_path / "whole", 12)
    assert kept(tmp_path / "whole", 12) == {
        "heard": [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120],
        "epochs": ["0 from 0", "to 5", "1 from 5", "to 10", "2 from 10"],
    }


def test_a_resume_does_not_go_beyond_where_a_listener_wished_to_stop(tmp_path: Path) -> None:
    assert run(tmp_path / "run", "Counts", options={"steps": 3})["steps"] == 4
    assert run(tmp_path / "run", "Counts", options={"steps": 3}, resume="auto")["steps"] == 4
    assert run(tmp_path / "run", "Counts", options={"steps": 7}, resume="auto")["steps"] == 8


@dataclass
class Logs:
    """Logs the rank, in every step."""

    logs = ("rank",)

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        run.log("rank", run.world.rank)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
@pytest.mark.parametrize("size", [10, 40])
def test_the_values_that_an_extension_logs_are_means_over_ranks(size: int, tmp_path: Path) -> None:
    """Also where a rank has no row, as in every second step on 41 rows by 40."""
    run(
        tmp_path / "run",
        "Logs",
        Problem(rows=41),
        strategy="ddp",
        nproc=2,
        global_batch_size=size,
        log_every=1,
    )
    assert [line["train/rank"] for line in lines(tmp_path / "run") if "train/rank" in line] == [
        0.5
    ] * 12


@dataclass
class LogsAnother:
    """Logs what it has not declared."""

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        run.log("rank", 1.0)


def test_a_name_that_was_not_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError,
        match=r"^log\('rank'\): is not declared; name it in `logs` of the task or extension",
    ):
        run(tmp_path / "run", "LogsAnother")


@dataclass
class TakesAll:
    """Takes every argument, so that it is called directly where it is alone; wishes for the
    end in step 3.
    """

    many: bool = False

    @hookimpl
    def on_step_end(
        self, run: Run, progress: Progress, result: StepResult
    ) -> list[str] | str | None:
        return (["stop"] if self.many else "stop") if progress.step == 3 else None


@pytest.mark.parametrize("many", [False, True])
def test_a_lone_listener_that_is_called_directly_is_heard(many: bool, tmp_path: Path) -> None:
    extensions = {"progress": False, "watchdog": False, f"{HERE}:TakesAll": {"many": many}}
    assert run(tmp_path / "run", "", extensions=extensions)["steps"] == 4  # the next log line


@dataclass
class Mumbles:
    """Answers what is no wish."""

    @hookimpl
    def on_step_end(self) -> str:
        return "sleep"


def test_an_answer_that_is_no_wish_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError,
        match=r"on_step_end\(\) answered 'sleep'; expected one of \['stop', 'evaluate'",
    ):
        run(tmp_path / "run", "Mumbles")


@dataclass
class Forgets:
    """Keeps a state that it could not read."""

    def state(self) -> object:
        return 1


def test_state_without_load_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"Forgets'?: has one of state\(\) and load_state\(\)"):
        run(tmp_path / "run", "Forgets")


@dataclass
class Infinite(Counts):
    """Keeps what JSON does not have."""

    def state(self) -> object:
        return float("inf")


def test_a_state_that_is_no_json_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"state\(\) returned no JSON value"):
        run(tmp_path / "run", "Infinite")
    assert not (tmp_path / "run/checkpoints").exists()


@dataclass
class OfItsRank(Counts):
    """Keeps another state on each rank."""

    @hookimpl
    def on_log(self, run: Run) -> None:
        self.heard.append(run.world.rank)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_a_state_that_is_not_that_of_all_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        Exception, match=r"ranks disagree on state\(\) of .*OfItsRank: rank 1 differs from rank 0"
    ):
        run(tmp_path / "run", "OfItsRank", strategy="ddp", nproc=2, max_steps=2)


class Curriculum(Problem):
    """A task that hears, keeps and wishes as an extension does."""

    @hookimpl
    def on_epoch_end(self, run: Run, progress: Progress) -> str:
        EPOCHS.append(progress.epoch)
        return "save"

    def state(self) -> object:
        return len(EPOCHS)

    def load_state(self, state: Any) -> None:
        EPOCHS[:] = range(1, state + 1)


EPOCHS: list[int] = []


def test_a_task_has_the_same_say(tmp_path: Path) -> None:
    EPOCHS.clear()
    run(tmp_path / "run", "", Curriculum())
    assert EPOCHS == [1, 2]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    # the log lines after the epochs' ends
    assert saved == ["step-00000006", "step-00000010", "step-00000012"]
    assert kept(tmp_path / "run", 6) == 1


def test_a_method_of_a_task_without_the_mark_is_refused(tmp_path: Path) -> None:
    task = type("Unmarked", (Problem,), {"on_epoch_end": lambda self: None})()
    with pytest.raises(
        StrategyError, match=r"extension 'task': on_epoch_end\(\) has no @hookimpl mark"
    ):
        run(tmp_path / "run", "", task)
