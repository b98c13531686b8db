"""``--profile`` says where a step's time goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_task import TEXTS

from distcore import launch, load_config, train
from distcore_workbench.profiling.phases import PHASES, overlap, union
from distcore_workbench.profiling.profile import StepWindows

pytestmark = pytest.mark.programs  # its runs are whole ones

CHANGES = {
    "task": TEXTS,
    "max_steps": 12,
    "global_batch_size": 8,
    "device": "cpu",
    "extensions.progress": False,
    "extensions.profile": {"wait": 2, "steps": 4, "traced": 2},
    "checkpoints.best": None,
    "log_level": "error",
}


@pytest.fixture
def rows(work_folder: Path) -> str:
    return str(work_folder / "rows.json")


def trained(
    changes: dict[str, object], out: Path
) -> tuple[dict[str, float], dict[str, float] | None]:
    config = load_config(None, CHANGES | changes | {"out": str(out)})
    launch(train, config, nproc=int(config.nproc)) if config.nproc != "auto" else train(config)
    facts = json.loads((out / "profile.json").read_text())
    return facts["seconds_per_step"], facts["communication_in"]


def test_the_phases_of_one_process_add_up_to_the_step(rows: str, tmp_path: Path) -> None:
    seconds, inside = trained({"data": rows}, tmp_path / "run")
    assert sum(seconds[phase] for phase in PHASES) == pytest.approx(seconds["total"], rel=1e-9)
    assert (
        min(seconds["forward"], seconds["backward"], seconds["optimizer"])
        > 10 * seconds["data_wait"] / 100
        > 0
    )
    assert (seconds["communication"], inside) == (0.0, None)
    trace = json.loads((tmp_path / "run/trace-rank0.json").read_text())["traceEvents"]
    assert {"distcore:forward", "distcore:backward"} <= {event.get("name") for event in trace}


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_two_ranks_show_the_all_reduce_in_the_backward_pass(
    rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds, inside = trained({"data": rows, "strategy": "ddp", "nproc": 2}, tmp_path / "run")
    assert inside is not None
    assert 0 < seconds["communication"] < seconds["total"]
    assert inside["backward"] == max(inside.values())
    assert all(inside[phase] <= seconds[phase] for phase in PHASES)
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "run/trace-rank1.json").read_text())["traceEvents"]
    }
    assert "gloo:all_reduce" in names
    assert "gloo:broadcast" not in names  # BERT's buffers never change
    assert "ERROR" not in capfd.readouterr().err


def test_a_run_shorter_than_its_profile_says_so_and_profiles_the_steps_that_there_are(
    rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seconds, _ = trained({"data": rows, "max_steps": 3, "log_level": "warning"}, tmp_path / "run")
    assert (
        "profile: 3 step(s) to train, a whole profile needs 8: 0 not measured, 2 timed, 1 traced"
        in caplog.text
    )
    facts = json.loads((tmp_path / "run/profile.json").read_text())
    assert (facts["steps"], facts["traced_steps"]) == (2, 1)
    assert 0 < seconds["total"] < 60
    assert (tmp_path / "run/trace-rank0.json").exists()


def test_a_step_that_is_timed_cannot_be_traced(
    rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(
        None, CHANGES | {"data": rows, "max_steps": 1, "out": str(tmp_path / "run")}
    )
    train(config)
    assert "profile: 1 step(s) to train, a whole profile needs 8: none is written" in caplog.text
    assert not [*(tmp_path / "run").glob("profile*"), *(tmp_path / "run").glob("trace*")]
    assert "profile of" not in capsys.readouterr().err


@pytest.mark.parametrize("left", range(2, 20))
def test_a_plan_uses_the_steps_that_are_left(left: int) -> None:
    plan = StepWindows(5, 10, 3).within(left)
    assert plan.end == min(left, 18)
    assert plan.steps >= plan.traced >= 1


def test_time_that_collectives_share_counts_once() -> None:
    busy = union([(5, 7), (0, 2), (1, 3)])
    assert busy == [(0, 3), (5, 7)]
    assert overlap((2, 6), busy) == 2
