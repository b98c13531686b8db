"""Saving in line and beside training: what goes wrong is one line, and leaves the previous
checkpoint and no litter.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from checkpoint_cases import Crash, Disk, Recorder, saver

from distcore.checkpoint import Checkpoint, find
from distcore.checkpoint.commit import clean_up
from distcore.checkpoint.saver import Saver
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Progress
from distcore.testing.lab import Unsynced

FULL = "checkpoint .*step-00000002 could not be written: .*No space left on device"


def save(saving: Saver, step: int) -> None:
    saving.save(Progress(step=step), None)
    saving.wait()


def train_on(saving: Saver) -> None:
    """Steps without a save."""
    for _ in range(1000):
        time.sleep(0.01)
        saving.check()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_one_line_and_leaves_the_previous_checkpoint(
    tmp_path: Path, asynchronous: bool
) -> None:
    disk = Disk()
    saving, _ = saver(tmp_path, disk, asynchronous)
    save(saving, 1)
    disk.full = True
    with pytest.raises(CheckpointError, match=FULL):
        save(saving, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    disk.full = False
    save(saving, 3)
    assert Checkpoint(tmp_path / "checkpoints/step-00000003")["model/scale"] == 1


def test_training_goes_on_while_a_save_is_written_and_its_failure_shows_at_a_later_step(
    tmp_path: Path,
) -> None:
    disk = Disk()
    saving, _ = saver(tmp_path, disk, asynchronous=True)
    disk.gate.clear()
    saving.save(Progress(step=2), None)
    saving.check()  # still writing
    disk.full = True
    disk.gate.set()
    with pytest.raises(CheckpointError, match=FULL):
        train_on(saving)
    saving.check()  # told once


def test_a_save_has_the_state_at_its_step(tmp_path: Path) -> None:
    disk = Disk()
    saving, run = saver(tmp_path, disk, asynchronous=True)
    disk.gate.clear()
    saving.save(Progress(step=1), None)
    with torch.no_grad():
        run.module.head.weight.fill_(7.0)
    disk.gate.set()
    saving.wait()
    saved = Checkpoint(tmp_path / "checkpoints/step-00000001")["model/head.weight"]
    assert not (saved == 7.0).any()


def test_saves_are_in_flight_one_at_a_time(tmp_path: Path) -> None:
    disk = Disk()
    saving, _ = saver(tmp_path, disk, asynchronous=True)
    disk.gate.clear()
    saving.save(Progress(step=1), None)
    threading.Timer(0.3, disk.gate.set).start()
    saving.save(Progress(step=2), None)
    assert (tmp_path / "checkpoints/step-00000001").exists()
    saving.wait()
    assert (tmp_path / "checkpoints/step-00000002").exists()


def test_a_state_that_was_copied_before_an_error_is_still_written(tmp_path: Path) -> None:
    disk = Disk()
    saving, _ = saver(tmp_path, disk, asynchronous=True)
    disk.gate.clear()
    saving.save(Progress(step=1), None)
    threading.Timer(0.3, disk.gate.set).start()
    saving.close()
    Checkpoint(tmp_path / "checkpoints/step-00000001").verify()


def test_listeners_hear_of_a_save_at_a_step_that_is_the_same_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, _ = saver(tmp_path, Disk(), asynchronous=True)
    heard: list[int] = []
    monkeypatch.setattr(
        saving._hooks, "on_checkpoint", lambda run, progress, path: heard.append(progress.step)
    )
    saving.save(Progress(step=1), None)
    assert saving._pending is not None
    saving._pending[0].result()
    saving.check()
    assert heard == []
    saving.save(Progress(step=2), None)
    assert heard == [1]
    saving.wait()
    assert heard == [1, 2]


def test_the_rank_with_the_cause_speaks_where_ranks_fail_together(tmp_path: Path) -> None:
    saving, run = saver(tmp_path, Disk(), asynchronous=True)
    saving._run = replace(run, world=replace(run.world, rank=1, size=2))
    with pytest.raises(ConnectionError, match="step-00000001 could not be written") as elsewhere:
        # the other rank has removed the folder
        saving._write(tmp_path / "checkpoints/step-00000001", [], {})
    failed: Future[Path] = Future()
    failed.set_exception(elsewhere.value)
    saving._pending = failed, Progress(step=1)
    saving.check()  # the other rank ends the run
    with pytest.raises(ConnectionError):
        saving.wait()


def test_memory_is_used_again_and_has_the_state_of_each_step(tmp_path: Path) -> None:
    saving, run = saver(tmp_path, Disk(), asynchronous=True)
    places = []
    for step in (1, 2):
        with torch.no_grad():
            run.module.head.weight.fill_(float(step))
        save(saving, step)
        places.append({name: copy.data_ptr() for name, copy in saving._memory.items()})
        saved = Checkpoint(tmp_path / f"checkpoints/step-0000000{step}")["model/head.weight"]
        assert (saved == step).all()
    assert places[0]
    assert places[0] == places[1]


def test_training_waits_where_there_is_no_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saving, _ = saver(tmp_path, Disk(), asynchronous=True)
    little = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    caplog.set_level("INFO", "distcore")
    for step in (1, 2):
        saving.save(Progress(step=step), None)
        assert (tmp_path / f"checkpoints/step-0000000{step}").is_dir()  # nothing to wait for
    assert not saving._memory
    assert [record.message for record in caplog.records].count(
        "training waits while checkpoints are written, as there is no memory for a copy"
    ) == 1


@pytest.mark.programs
def test_a_crash_at_any_file_operation_leaves_the_previous_or_the_new_checkpoint(
    tmp_path: Path,
) -> None:
    left, stops = [], 0
    while True:
        stop_at, after = divmod(stops, 2)
        out, disk = tmp_path / str(stops), Recorder(stop_at, bool(after))
        save(saver(out, Unsynced(), asynchronous=True, keep_last=1)[0], 1)
        try:
            save(saver(out, disk, asynchronous=True, keep_last=1)[0], 2)
        except Crash:
            disk.lose()
        else:
            break  # it came to its end: there are no more operations
        clean_up(Unsynced(), out / "checkpoints")
        path = find("auto", out)
        assert path is not None
        Checkpoint(path).verify()
        left.append(path.name)
        stops += 1
    assert len(left) > 20
    assert set(left) == {"step-00000001", "step-00000002"}
    assert left == sorted(left)
