"""Which checkpoint of a run a command takes, and what it says of the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import state, write

from distcore.checkpoint import find
from distcore.checkpoint.choice import choose
from distcore.errors import CheckpointError


def run_folder(out: Path, best: dict[str, Any] | None) -> Path:
    """A run with checkpoints after steps 10, 30 and 40."""
    for step in (10, 30, 40):
        write(out / "checkpoints", [state(1.0)], step, best=best if step >= 30 else None)
    return out


@pytest.mark.parametrize(
    ("best", "asked", "words"),
    [
        (30, {}, "step-00000040, the newest; the best by loss is step-00000030: --best"),
        (40, {}, "step-00000040, the newest, the best by loss"),
        (20, {}, "step-00000040, the newest"),
        (None, {}, "step-00000040, the newest"),
        (30, {"best": True}, "step-00000030, the best by loss: 0.2500"),
        (30, {"step": 10}, "step-00000010; the best by loss is step-00000030: --best"),
        (30, {"step": 30}, "step-00000030, the best by loss"),
    ],
)
def test_the_chosen_checkpoint_is_the_one_asked_for_and_named(
    tmp_path: Path, best: int | None, asked: dict[str, Any], words: str
) -> None:
    out = run_folder(tmp_path, {"step": best, "metric": "loss", "value": 0.25} if best else None)
    path, said = choose(out, **asked)
    assert said == words
    assert path == out / "checkpoints" / words[:13]


def test_a_checkpoint_is_itself(tmp_path: Path) -> None:
    path = run_folder(tmp_path, None) / "checkpoints/step-00000010"
    assert choose(path) == (path, "step-00000010")
    with pytest.raises(
        CheckpointError, match="is a checkpoint; --best and --step choose one of a run folder"
    ):
        choose(path, step=10)


def test_a_damaged_newest_is_passed_over(tmp_path: Path) -> None:
    (run_folder(tmp_path, None) / "checkpoints/step-00000040/manifest.json").write_text("{")
    assert choose(tmp_path)[1] == "step-00000030, the newest whole one"


@pytest.mark.parametrize(
    ("best", "asked", "line"),
    [
        (None, {"step": 35}, r"no checkpoint of step 35 \(there are: 10, 30, 40\)"),
        (20, {"best": True}, r"no checkpoint of step 20 \(there are: 10, 30, 40\)"),
        (
            None,
            {"best": True},
            r"no best checkpoint: no evaluation was compared \(checkpoints.best\)",
        ),
    ],
)
def test_a_checkpoint_that_is_not_there_is_one_line(
    tmp_path: Path, best: int | None, asked: dict[str, Any], line: str
) -> None:
    out = run_folder(tmp_path, {"step": best, "metric": "loss", "value": 0.25} if best else None)
    with pytest.raises(CheckpointError, match=line):
        choose(out, **asked)


@pytest.mark.parametrize(
    "file", ["config.json", "adapter_config.json", "model.safetensors", ".metadata"]
)
def test_an_exported_folder_is_named_as_what_it_is(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    says = (
        rf"is an exported model \(it has {file}\), which its README.md says how to use; name the"
        r" run folder that it"
    )
    with pytest.raises(CheckpointError, match=says):
        choose(tmp_path)


def test_a_folder_in_which_nothing_is_whole_says_what_is_wrong(tmp_path: Path) -> None:
    (write(tmp_path / "checkpoints", [state(1.0)], 10) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints is whole: .*manifest\.json"):
        choose(tmp_path)


def test_a_path_to_resume_from_is_a_folder_with_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint there; name a folder"):
        find(str(tmp_path), tmp_path)
    assert find(str(write(tmp_path, [state(1.0)])), tmp_path) == tmp_path / "step-00000001"
