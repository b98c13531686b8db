"""Law 6: a checkpoint exists whole or not at all, whatever instant the machine stops at; and what
is let go of.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from checkpoint_cases import Crash, Recorder, state, value_in, write

from distcore.checkpoint import find
from distcore.checkpoint.commit import clean_up
from distcore.checkpoint.files import Files
from distcore.checkpoint.retention import retain
from distcore.errors import CheckpointError
from distcore.testing.lab import Unsynced

RANKS = 2


def crash_everywhere(
    work: Callable[[Path, Files], object], prepare: Callable[[Path], object], tmp_path: Path
) -> list[float]:
    """Stop ``work`` before and after each of its operations; return what a resume finds each
    time; 0 is nothing.
    """
    whole = Recorder(-1, after=False)
    prepare(tmp_path / "whole")
    work(tmp_path / "whole" / "checkpoints", whole)
    values = []
    for stop_at in range(len(whole.operations)):
        for after in (False, True):
            out = tmp_path / f"{stop_at}-{after}"
            prepare(out)
            files = Recorder(stop_at, after)
            with pytest.raises(Crash):
                work(out / "checkpoints", files)
            files.lose()
            clean_up(Unsynced(), out / "checkpoints")
            left = {
                path.name for path in out.glob("checkpoints/*") if not path.name.startswith("step-")
            }
            path = find("auto", out)
            assert not left
            values.append(value_in(path) if path else 0.0)
    assert len(values) > 20
    return values


def saved(*steps: int) -> Callable[[Path], object]:
    """Returns a function that fills a run folder with checkpoints after these steps."""

    def prepare(out: Path) -> None:
        (out / "checkpoints").mkdir(parents=True)
        for step in steps:
            write(out / "checkpoints", [state(float(step))] * RANKS, step)

    return prepare


@pytest.mark.programs
def test_a_crash_leaves_the_previous_or_the_new_checkpoint(tmp_path: Path) -> None:
    values = crash_everywhere(
        lambda f, files: write(f, [state(2.0)] * RANKS, 2, files), saved(1), tmp_path
    )
    assert set(values) == {1.0, 2.0}
    assert values == sorted(values)  # once it is there it stays


def test_a_crash_of_the_first_save_leaves_nothing_or_the_checkpoint(tmp_path: Path) -> None:
    values = crash_everywhere(
        lambda f, files: write(f, [state(1.0)] * RANKS, 1, files), saved(), tmp_path
    )
    assert set(values) == {0.0, 1.0}


@pytest.mark.programs
def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    values = crash_everywhere(
        lambda f, files: write(f, [state(3.0)] * RANKS, 2, files), saved(1, 2), tmp_path
    )
    assert set(values) == {2.0, 3.0}


@pytest.mark.programs
def test_a_crash_in_retention_leaves_the_newest(tmp_path: Path) -> None:
    def work(folder: Path, files: Files) -> None:
        write(folder, [state(9.0)] * RANKS, 9, files)
        retain(folder, 1, None, files)

    assert set(crash_everywhere(work, saved(1, 2, 3), tmp_path)) == {3.0, 9.0}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    saved(*range(1, 7))(tmp_path)
    retain(tmp_path / "checkpoints", keep_last=2, best=3)
    assert [path.name[-1] for path in sorted(tmp_path.glob("checkpoints/*"))] == ["3", "5", "6"]


def test_the_last_good_one_stays_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    saved(1, 2, 3)(tmp_path)
    for step in (2, 3):
        (tmp_path / f"checkpoints/step-0000000{step}" / "state.json").write_text("{")
    retain(tmp_path / "checkpoints", keep_last=2, best=None)
    assert value_in(find("auto", tmp_path) or Path()) == 1.0


class Full(Files):
    """A disk on which so many more bytes have room."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        def counted() -> Iterable[bytes | memoryview]:
            for chunk in chunks:
                self.room -= len(chunk)
                if self.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                yield chunk

        super().write(path, counted())


@pytest.mark.parametrize("room", [0, 100, 300, 900, 1500])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, room: int) -> None:
    saved(1)(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path / "checkpoints", [state(2.0)] * RANKS, 2, Full(room))
    clean_up(Files(), tmp_path / "checkpoints")
    assert value_in(find("auto", tmp_path) or Path()) == 1.0


def test_auto_goes_by_number_and_says_why_none_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find("auto", tmp_path) is None
    saved(99_999_999, 100_000_000)(tmp_path)
    assert (find("auto", tmp_path) or Path()).name == "step-100000000"
    for path in tmp_path.glob("checkpoints/*/manifest.json"):
        path.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"none of 2 checkpoints is whole: .*manifest.json: cannot be read.*anew",
    ):
        find("auto", tmp_path)
    assert "skipped" not in caplog.text  # the error says it
