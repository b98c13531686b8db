"""Arrays in files answer as arrays in memory, and take none of it."""

from __future__ import annotations

import multiprocessing
import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcore_data import ChosenRows
from distcore_tasks.shared.arrays import array_blocks, count_numbers, digest_arrays
from distcore_tasks.shared.stored_arrays import StoredArray, open_array, stored

ROWS = 20_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))


def saved(folder: Path, array: np.ndarray) -> StoredArray:
    np.save(folder / "array.npy", array)
    return open_array(folder / "array.npy")


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 3)])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32])
def test_a_part_of_a_stored_array_equals_that_in_memory(
    kind: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    array = random.integers(0, 250, shape).astype(kind)
    given = stored(array[first:end] for first, end in pairwise([0, 1, 7000, ROWS]))
    odd, few = (
        ChosenRows.from_numbers(ROWS, np.arange(first, ROWS, step))
        for first, step in ((1, 2), (5, 4001))
    )
    some = [
        *((one, array) for one in (saved(tmp_path, array), given)),
        (given.only(odd), array[1::2]),
    ]
    some += [
        (given.only(few), array[5::4001]),
        (given.only(odd).only(ChosenRows.from_numbers(ROWS // 2, [2, 9])), array[[5, 19]]),
    ]
    for one, expected in some:
        assert (len(one), one.ndim, one.dtype) == (len(expected), expected.ndim, expected.dtype)
        numbers = random.integers(0, len(expected), 50)
        for part in (
            slice(None),
            slice(2, 2),
            slice(3, 4),
            numbers,
            numbers[:0],
            np.array([len(expected) - 1, 0]),
        ):
            assert np.array_equal(one[part], expected[part])
            assert one[part].flags.writeable or not len(one[part])
        assert digest_arrays(one) == digest_arrays(expected)
        assert np.array_equal(np.concatenate([*array_blocks(one)]), expected)


def test_processes_that_are_forked_do_not_disturb_each_other(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2**16, ROWS).astype(np.uint16)
    one = saved(tmp_path, array)
    assert np.array_equal(pickle.loads(pickle.dumps(one))[:], array)

    def differs(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(300):
            numbers = random.integers(0, ROWS, 20)
            assert np.array_equal(one[numbers], array[numbers])

    programs = [
        multiprocessing.get_context("fork").Process(target=differs, args=(seed,))
        for seed in range(3)
    ]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
        assert program.exitcode == 0


def test_rows_that_were_read_do_not_stay_in_memory(tmp_path: Path) -> None:
    rows = 2**24
    one = saved(tmp_path, np.zeros(rows, np.uint8))
    before = resident()
    count_numbers(one)
    one[np.random.default_rng(0).integers(0, rows, 5000)]
    assert resident() - before < rows / 2


def resident() -> int:
    """Bytes of this process in memory, those of mapped files, too."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.is_file():
        pytest.skip("tells memory on Linux alone")
    [size] = re.findall(r"^Rss: +(\d+)", rollup.read_text(), re.M)
    return int(size) * 1024
