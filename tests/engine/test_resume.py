"""Laws 5 and 7: interrupted and resumed equals uninterrupted, and what would
not be exact is refused.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_job import at_step, run, start, wait_for

from distcore.checkpoint import Checkpoint
from distcore.checkpoint.distance import difference
from distcore.cli.main import main
from distcore.errors import CheckpointError

pytestmark = pytest.mark.programs  # its runs are whole ones

LAST = "step-00000015"


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference between the last checkpoints of two runs, in any tensor."""
    first, second = (Checkpoint(out / "checkpoints" / LAST) for out in (one, other))
    assert set(first) == set(second)
    assert first.job_state()["progress"] == second.job_state()["progress"]
    return max(difference(first[name], second[name]).largest for name in first)


@pytest.mark.parametrize("step", [8, 12])
def test_resumed_equals_uninterrupted_bit_for_bit(
    undisturbed: Path, tmp_path: Path, step: int
) -> None:
    run(at_step(step, undisturbed, tmp_path), resume="auto")
    assert largest_difference(tmp_path, undisturbed) == 0


def test_beside_training_the_same_checkpoints_are_written(
    undisturbed: Path, tmp_path: Path
) -> None:
    run(tmp_path, checkpoints={"keep_last": 3, "best": None, "asynchronous": True})
    assert largest_difference(tmp_path, undisturbed) == 0
    assert len(list(tmp_path.glob("checkpoints/*"))) == 3


def test_auto_starts_afresh_where_nothing_was_saved(undisturbed: Path, tmp_path: Path) -> None:
    run(tmp_path, resume="auto")
    assert largest_difference(tmp_path, undisturbed) == 0


def test_auto_goes_back_where_the_newest_is_damaged(undisturbed: Path, tmp_path: Path) -> None:
    at_step(12, undisturbed, tmp_path)
    file = tmp_path / "checkpoints/step-00000012/model-00000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match=f"{file}: damaged: its SHA-256 is not the one"):
        run(tmp_path, resume=str(file.parent))
    run(tmp_path, resume="auto")
    assert largest_difference(tmp_path, undisturbed) == 0


def test_folders_that_a_killed_writer_left_are_cleared(undisturbed: Path, tmp_path: Path) -> None:
    at_step(12, undisturbed, tmp_path)
    for name in (".writing-step-00000013", ".removing-step-00000004"):
        (tmp_path / "checkpoints" / name).mkdir()
    run(tmp_path, resume="auto")
    assert not list(tmp_path.glob("checkpoints/.*"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"global_batch_size": 10}, "global_batch_size was 12 and is 10: .*; resume with the same"),
        ({"seed": 1}, "seed was 0 and is 1: .*; resume with the same"),
        ({"lr": 0.02}, "lr was 0.01 and is 0.02: .*; accept that with --resume-changed lr"),
        (
            {"epochs": 4},
            (
                "the run was --epochs 3 and is --epochs 4 .15 and 20 steps.: .*; resume with"
                " --epochs 3, or accept"
            ),
        ),
        (
            {"optimizer": {"eps": 0.1}},
            r"optimizer was .* and is .*; accept that with --resume-changed optimizer",
        ),
        ({"clip": {"norm": 3.0}}, "clip was .*; accept that with --resume-changed clip"),
    ],
)
def test_a_resume_of_another_job_is_refused(
    undisturbed: Path, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(CheckpointError, match=line):
        run(at_step(12, undisturbed, tmp_path), resume="auto", **changes)


def test_a_resume_with_other_training_data_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it was saved with other training data"):
        run(at_step(12, undisturbed, tmp_path), resume="auto", rows=49)


@pytest.mark.needs("distcore-tasks")
def test_changed_words_are_other_data_even_where_every_length_is_the_same(tmp_path: Path) -> None:
    rows = [(f"{'good' if n % 2 else 'bad'} text {n % 7}", n % 2) for n in range(40)]
    others = {
        "labels": [(text, 1 - label) for text, label in rows],
        "words": [(text[::-1], label) for text, label in rows],
    }
    for name, content in {"saved": rows, "same": rows, **others}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    flags = (
        f"--out {tmp_path / 'run'} --model bert-tiny --global-batch-size 8 --max-steps 2 --set"
        " device=cpu"
    )
    command = ["train", *flags.split(), "--data"]
    assert main([*command, str(tmp_path / "saved.json")]) == 0
    for name, status in {"same": 0, "labels": 2, "words": 2}.items():
        assert main([*command, str(tmp_path / f"{name}.json"), "--resume", "auto"]) == status, name


def test_a_resume_of_another_model_is_refused_by_the_shape_that_differs(
    undisturbed: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"'model/head.bias' is \[4\] in the checkpoint, \[32\] here"
    ):
        run(at_step(12, undisturbed, tmp_path), resume="auto", tied=True)


def test_an_accepted_change_goes_on(undisturbed: Path, tmp_path: Path) -> None:
    run(at_step(12, undisturbed, tmp_path), resume="auto", epochs=4, resume_changed="total_steps")
    assert (tmp_path / "checkpoints/step-00000020").exists()
    state = Checkpoint(tmp_path / "checkpoints/step-00000016").job_state()
    assert state["learning_rates"] == pytest.approx([0.01 * 4 / 18] * 2)


def test_a_checkpoint_of_another_branch_is_replaced(undisturbed: Path, tmp_path: Path) -> None:
    at_step(15, undisturbed, tmp_path)
    run(tmp_path, resume=str(tmp_path / "checkpoints/step-00000008"), lr=0.02, resume_changed="lr")
    assert largest_difference(tmp_path, undisturbed) > 1e-3


def test_the_newer_checkpoints_of_a_course_that_was_left_are_gone(
    undisturbed: Path, tmp_path: Path
) -> None:
    at_step(15, undisturbed, tmp_path)
    left = tmp_path / "checkpoints/step-00000012"
    left.rename(left.with_name("step-00000013"))  # a step at which the new course saves nothing
    run(tmp_path, resume=str(tmp_path / "checkpoints/step-00000008"))
    there = {path.name for path in tmp_path.glob("checkpoints/step-*")}
    assert there == {"step-00000008", "step-00000012", LAST}
    assert largest_difference(tmp_path, undisturbed) == 0


def test_a_refused_resume_leaves_the_run_folder_as_it_was(
    undisturbed: Path, tmp_path: Path
) -> None:
    at_step(12, undisturbed, tmp_path)
    (tmp_path / "config.yaml").write_text("as: it was")
    with pytest.raises(CheckpointError, match="seed was 0 and is 1"):
        run(tmp_path, resume="auto", seed=1)
    assert (tmp_path / "config.yaml").read_text() == "as: it was"


@pytest.mark.programs
def test_a_run_goes_on_bit_for_bit_after_kill_9_at_any_moment(
    undisturbed: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        process = start(tmp_path, "seconds_a_step=0.02", "save_every=1", "resume=auto")
        wait_for(lambda: list(tmp_path.glob("checkpoints/.writing-*")), process)
        time.sleep(0.05 * float(torch.rand((), generator=generator)))
        process.kill()
        process.communicate(timeout=60)
    run(tmp_path, resume="auto", save_every=1)
    assert largest_difference(tmp_path, undisturbed) == 0
