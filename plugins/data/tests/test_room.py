"""All copies of remote files together are bounded, whatever processes of a machine fetch
them at a time.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import pytest
from filelock import FileLock

from distcore import DataError
from distcore_data import fetching, read_records, remote, room

fsspec = pytest.importorskip("fsspec")
FILES, ROWS = 12, 200
READER = """
import sys
from pathlib import Path
import numpy as np
from distcore_data import IndexedRows
rows = IndexedRows(Path(sys.argv[1]), {"columns.text": "text"})
random = np.random.default_rng(int(sys.argv[2]))
for file in [*random.permutation(12), *random.permutation(12)]:
    assert rows[[file * 200 + 7]] == [(f"file {file} row 7",)]
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "FIRST_WAIT", 0)
    remote.copies_of.cache_clear()
    return tmp_path / "cache/remote"


def on_disk(cache: Path) -> int:
    """Bytes of all copies and of those that are being fetched, when nobody makes room.

    A fetch that ends meanwhile renames its file, which then counts once or not at all.
    """
    sizes: dict[str, int] = {}
    with FileLock(cache / ".taken.lock"):
        for file in cache.glob("*/*.txt"):
            with suppress(FileNotFoundError):
                sizes[file.name.removeprefix(".")] = file.stat().st_size
    return sum(sizes.values())


@pytest.mark.programs
def test_processes_that_read_other_files_at_a_time_have_one_room(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").mkdir()
    for file in range(FILES):
        lines = "".join(f"file {file} row {row}\n" for row in range(ROWS))
        (tmp_path / f"far/{file:02}.txt").write_text(lines)
    limit = 4 * len(lines)
    monkeypatch.setenv(room.LIMIT, str(limit))
    cache.mkdir(parents=True)
    url, most = f"file://{tmp_path}/far", list[int]()
    readers = [
        Popen([sys.executable, "-c", READER, url, str(seed)], env={**os.environ})
        for seed in range(3)
    ]
    try:
        until = time.monotonic() + 60
        while any(reader.poll() is None for reader in readers) and time.monotonic() < until:
            most.append(on_disk(cache))
    finally:
        for reader in readers:
            reader.kill()
    assert [reader.wait() for reader in readers] == [0, 0, 0]
    assert limit // 2 < max(most) <= limit


def test_a_copy_that_a_killed_process_left_is_removed_and_one_being_fetched_counts(
    cache: Path,
) -> None:
    folder = cache / "version"
    folder.mkdir(parents=True)
    for name in ("left", "coming"):
        room.draft_of(folder / name).write_bytes(b"12345")
        (folder / f".{name}.lock").touch()
    with FileLock(folder / ".coming.lock"):
        assert list(room.drafts()) == [5]
    assert [file.name for file in folder.iterdir() if file.suffix != ".lock"] == [".coming"]


def test_a_fetch_that_fails_gives_its_room_back(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("memory").pipe("/room/rows.txt", b"a row\n")

    def away(file: fetching.RemoteFile, draft: Path) -> None:
        assert draft.stat().st_size == file.size == 6
        raise ConnectionError

    monkeypatch.setattr(fetching, "_write", away)
    with pytest.raises(DataError, match="cannot be fetched, after 4 attempts"):
        list(read_records(Path("memory://room/rows.txt"), {"columns.text": "text"}))
    assert (cache / ".taken").read_text() == "0"
    monkeypatch.undo()


@pytest.mark.parametrize("told", ["", "7000", "-3"])
def test_a_wrong_record_of_the_used_room_is_counted_again(
    told: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("memory").pipe("/room/more.txt", b"a row\n")
    cache.mkdir(parents=True)
    (cache / ".taken").write_text(told)
    monkeypatch.setenv(room.LIMIT, "6")
    assert list(read_records(Path("memory://room/more.txt"), {"columns.text": "text"})) == [
        ("a row",)
    ]
    assert (cache / ".taken").read_text() == "6"


def test_room_is_made_by_the_oldest_that_is_not_read_or_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "version").mkdir(parents=True)
    held, old, new, coming = (cache / "version" / name for name in ("held", "old", "new", "coming"))
    for age, copy in enumerate((held, old, new)):
        copy.write_bytes(b"12345")
        os.utime(copy, (1000 + age, 1000 + age))
    monkeypatch.setenv(room.LIMIT, "15")
    monkeypatch.setitem(room.HELD, held, 1)
    room.reserve(coming, 5)
    assert [copy.is_file() for copy in (held, old, new)] == [True, False, True]
    assert room.draft_of(coming).stat().st_size == 5
    with FileLock(cache / "version/.coming.lock"):
        assert not room._is_reserved(cache / "version/large", 6), (
            "what comes will be a copy, which can be dropped"
        )
        assert [copy.is_file() for copy in (held, new)] == [True, False]
    assert room._is_reserved(cache / "version/large", 6)


def test_a_copy_that_grows_does_not_wait_for_itself(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "version").mkdir(parents=True)
    coming = cache / "version/coming"
    monkeypatch.setenv(room.LIMIT, "5")
    with FileLock(cache / "version/.coming.lock"):
        room.reserve(coming, 5)
        assert room._is_reserved(coming, 7, 5)
        assert not room._is_reserved(cache / "version/other", 1), "it waits for what comes"
    assert room.draft_of(coming).stat().st_size == 7
    assert (cache / ".taken").read_text() == "7"
