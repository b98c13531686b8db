"""``--profile`` says where a step's time goes; ``--preset`` fills in what the user leaves open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distcore import RunConfig, load_config, train
from distcore.config import dump_config
from distcore.distributed.devices import has_fast_bf16
from distcore.errors import ConfigError
from distcore.extensions.phases import PHASES, overlap, union
from distcore.extensions.profile import StepWindows
from distcore.launchers import launch
from distcore.resolve.resolve import resolve

pytestmark = pytest.mark.programs  # its runs are whole ones

CHANGES = {
    "model": "bert-tiny", "max_steps": 12, "global_batch_size": 8, "device": "cpu", "extensions.progress": False,
    "extensions.profile": {"wait": 2, "steps": 4, "traced": 2}, "checkpoints.best": None, "log_level": "error",
}  # fmt: skip


@pytest.fixture
def rows(work_folder: Path) -> str:
    return str(work_folder / "rows.json")


def trained(changes: dict[str, object], out: Path) -> tuple[dict[str, float], dict[str, float] | None]:
    config = load_config(None, CHANGES | changes | {"out": str(out)})
    launch(train, config, nproc=int(config.nproc)) if config.nproc != "auto" else train(config)
    facts = json.loads((out / "profile.json").read_text())
    return facts["seconds_per_step"], facts["communication_in"]


def test_the_phases_of_one_process_add_up_to_the_step(rows: str, tmp_path: Path) -> None:
    seconds, inside = trained({"data": rows}, tmp_path / "run")
    assert sum(seconds[phase] for phase in PHASES) == pytest.approx(seconds["total"], rel=1e-9)
    assert min(seconds["forward"], seconds["backward"], seconds["optimizer"]) > 10 * seconds["data_wait"] / 100 > 0
    assert (seconds["communication"], inside) == (0.0, None)
    trace = json.loads((tmp_path / "run/trace-rank0.json").read_text())["traceEvents"]
    assert {"distcore:forward", "distcore:backward"} <= {event.get("name") for event in trace}


@pytest.mark.ranks
def test_two_ranks_show_the_all_reduce_in_the_backward_pass(
    rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds, inside = trained({"data": rows, "strategy": "ddp", "nproc": 2}, tmp_path / "run")
    assert inside is not None
    assert 0 < seconds["communication"] < seconds["total"]
    assert inside["backward"] == max(inside.values())
    assert all(inside[phase] <= seconds[phase] for phase in PHASES)
    names = {event.get("name") for event in json.loads((tmp_path / "run/trace-rank1.json").read_text())["traceEvents"]}
    assert "gloo:all_reduce" in names
    assert "gloo:broadcast" not in names  # BERT's buffers never change
    assert "ERROR" not in capfd.readouterr().err


def test_a_run_shorter_than_its_profile_says_so_and_profiles_the_steps_that_there_are(
    rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seconds, _ = trained({"data": rows, "max_steps": 3, "log_level": "warning"}, tmp_path / "run")
    assert "profile: 3 step(s) to train, a whole profile needs 8: 0 not measured, 2 timed, 1 traced" in caplog.text
    facts = json.loads((tmp_path / "run/profile.json").read_text())
    assert (facts["steps"], facts["traced_steps"]) == (2, 1)
    assert 0 < seconds["total"] < 60
    assert (tmp_path / "run/trace-rank0.json").exists()


def test_one_step_cannot_be_timed_and_traced(
    rows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, CHANGES | {"data": rows, "max_steps": 1, "out": str(tmp_path / "run")})
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


def test_a_preset_gives_way_to_what_the_user_says() -> None:
    fast = load_config(None, {"preset": "fast"})
    assert (fast.loader.length_grouping, fast.precision) == ("auto", "auto")
    mixed = load_config(None, {"preset": "fast", "precision": "fp32", "loader.length_grouping": "window"})
    assert (mixed.loader.length_grouping, mixed.precision) == ("window", "fp32")
    assert load_config(None, {}).loader.length_grouping == "batch"


def test_a_preset_fills_in_a_config_made_in_python_and_is_not_applied_again_to_what_a_card_repeats() -> None:
    fast = RunConfig(preset="fast", loader={"workers": 1}, precision="fp32")
    assert (fast.loader.length_grouping, fast.loader.workers, fast.precision) == ("auto", 1, "fp32")
    assert "preset" not in dump_config(fast, defaults=False)
    assert load_config(None, {"preset": "fast", "precision": "fp32"}) == RunConfig(preset="fast", precision="fp32")


def test_an_unknown_preset_is_one_line() -> None:
    with pytest.raises(ConfigError, match="preset = 'fats'"):
        load_config(None, {"preset": "fats"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "batch"),
        ({"precision": "bf16"}, "window"),
        ({"padding_free": "off"}, "batch"),  # a trial of tune, which must not change the order of the rows
        ({"task": "image-classification", "data": "shapes"}, "window"),  # has no form without padding
        ({"strategy": "mesh", "nproc": 2}, "batch"),  # it pads, but may go on with what another strategy began
    ],
)
def test_length_grouping_auto_is_windows_where_they_save_time(
    rows: str, changes: dict[str, object], expected: str
) -> None:
    job = {"data": rows, "model": "bert-tiny", "device": "cpu", "precision": "fp32", "loader.length_grouping": "auto"}
    if "task" in changes:
        del job["model"]
    assert resolve(load_config(None, job | changes)).config.loader.length_grouping == expected


def test_precision_auto_takes_bf16_only_where_the_hardware_has_it(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, {"precision": "auto", "data": rows, "device": "cpu"})
    assert resolve(config).config.precision == ("bf16" if has_fast_bf16() else "fp32")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert resolve(config).config.precision == "fp32"
