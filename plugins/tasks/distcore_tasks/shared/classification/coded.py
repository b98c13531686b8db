"""Labels of very many rows: each distinct one in memory once, and a number per row in a file."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from distcore_data import ChosenRows, cache_root
from distcore_tasks.shared.arrays import (
    BLOCK,
    ArrayFile,
    array_blocks,
    count_numbers,
    digest_arrays,
)
from distcore_tasks.shared.jagged import read_content, write_content
from distcore_tasks.shared.stored_arrays import Entries, StoredArray, open_array, stored

LABELS, TARGETS = "labels.npy", "targets.npy"
"""Files with the number of each row's target, and with the targets.

Without numbers, the first file has the target of each row, and the second one is empty.
"""


@dataclass(frozen=True, eq=False, slots=True)
class CodedLabels(Sequence[Any]):
    """Labels of very many rows; each distinct one is in memory once."""

    codes: Entries
    """Place of the label of each row among ``names``, integers ``(rows,)``."""
    names: Sequence[Any]
    """The distinct labels, in the order of their first rows; some may have none."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def __getitem__(self, row: Any) -> Any:
        """Return the label of a row."""
        return self.names[self.code(row)]

    def code(self, row: int) -> int:
        """Return the place of the label of a row among ``names``."""
        return int(self.codes[row : row + 1][0])

    def __iter__(self) -> Iterator[Any]:
        """Yield the label of each row."""
        for block in array_blocks(self.codes):
            for code in block.tolist():
                yield self.names[code]

    def counts(self) -> Iterator[tuple[Any, int]]:
        """Yield each label with the number of its rows, which is not 0."""
        counts = count_numbers(self.codes, len(self.names)).tolist()
        for name, count in zip(self.names, counts, strict=True):
            if count:
                yield name, count

    def numbers(self, classes: Sequence[str]) -> np.ndarray:
        """Return the class number of each distinct label, int64 ``(names,)``.

        It is 0 for a label that no row has any more.
        """
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers.get(str(name), 0) for name in self.names], np.int64)

    def sets(self, classes: Sequence[str]) -> np.ndarray:
        """Return 1 for each class of each distinct list of labels, uint8 ``(names, classes)``."""
        numbers = {name: number for number, name in enumerate(classes)}
        table = np.zeros((len(self.names), len(classes)), np.uint8)
        for code, labels in enumerate(self.names):
            if not isinstance(labels, list):  # no row has it any more
                continue
            for label in labels:
                if str(label) in numbers:
                    table[code, numbers[str(label)]] = 1
        return table

    def rows_of(self, codes: Collection[int]) -> Iterator[int]:
        """Yield the rows with one of some labels, ascending."""
        is_wanted = np.zeros(len(self.names), bool)
        is_wanted[[*codes]] = True
        starts = range(0, len(self), BLOCK)
        for start, block in zip(starts, array_blocks(self.codes), strict=True):
            rows = start + np.flatnonzero(is_wanted[block])
            yield from rows.tolist()

    def without(self, codes: Collection[int]) -> tuple[CodedLabels, ChosenRows]:
        """Return the labels of all rows but those with one of some labels, and these rows."""
        is_good = np.ones(len(self.names), bool)
        is_good[[*codes]] = False

        def good_rows() -> Iterator[np.ndarray]:
            for start in range(0, len(self), BLOCK):
                block = self.codes[start : start + BLOCK]
                yield start + np.flatnonzero(is_good[block])

        chosen = ChosenRows.from_blocks(len(self), good_rows())
        assert isinstance(self.codes, StoredArray)
        return CodedLabels(self.codes.only(chosen), self.names), chosen


@dataclass(frozen=True, eq=False, slots=True)
class CodedTargets:
    """Encoded labels: each distinct value once, rows by code; implements ``Entries``."""

    codes: Entries
    """Place of the target of each row, integers ``(rows,)``."""
    targets: np.ndarray
    """The targets: class numbers, int64 ``(codes,)``.

    For several classes per row they are uint8 ``(codes, classes)``.
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a target."""
        return self.targets.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.targets.ndim

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return the targets of rows, ``(n, …)``."""
        targets: np.ndarray = self.targets[self.codes[rows]]
        return targets

    def only(self, rows: ChosenRows) -> CodedTargets:
        """Return the targets of some rows of all."""
        assert isinstance(self.codes, StoredArray)
        return CodedTargets(self.codes.only(rows), self.targets)


def save_targets(folder: Path, labels: Entries) -> None:
    """Write encoded labels, and a digest of them, to ``folder``."""
    if isinstance(labels, CodedTargets):
        codes, targets = labels.codes, labels.targets
    else:
        codes, targets = labels, np.empty(0)
    with ArrayFile(folder / LABELS, codes.dtype) as file:
        for block in array_blocks(codes):
            file.add(block)
    np.save(folder / TARGETS, targets)
    write_content(folder, digest_arrays(codes, targets))


def open_targets(folder: Path) -> tuple[Entries, str]:
    """Return the labels that ``save_targets`` wrote to ``folder``, and their digest."""
    codes: Entries = open_array(folder / LABELS)
    targets = np.load(folder / TARGETS, allow_pickle=False)
    labels = CodedTargets(codes, targets) if len(targets) else codes
    return labels, read_content(folder)


def distinct_targets(labels: Entries) -> tuple[np.ndarray, np.ndarray]:
    """Return encoded labels, and the number of rows of each, int64; together all rows.

    Some of the labels may be equal.
    """
    if isinstance(labels, CodedTargets):
        return labels.targets, count_numbers(labels.codes, len(labels.targets))
    return labels[:], np.ones(len(labels), np.int64)


class LabelCoder:
    """Collects labels row by row."""

    def __init__(self) -> None:
        """Begin without labels. Raises OSError if the disk of the cache cannot be written."""
        cache_root().mkdir(parents=True, exist_ok=True)
        # Closed with this object.
        self._file: IO[bytes] = TemporaryFile(dir=cache_root())  # noqa: SIM115
        self._codes = dict[object, int]()
        self._names = list[Any]()
        # Codes that are not in the file yet.
        self._pending = array("I")

    def __del__(self) -> None:
        """Close the file, also if a row is refused before all labels are there."""
        if hasattr(self, "_file"):
            self._file.close()

    def add(self, label: Any) -> None:
        """Add the label of the next row, of any type: 1, 1.0 and True are three."""
        key = label if type(label) is str else (type(label), repr(label))
        if key not in self._codes:
            self._codes[key] = len(self._names)
            self._names.append(label)
        self._pending.append(self._codes[key])
        if len(self._pending) == BLOCK:
            self._write()

    def coded(self) -> CodedLabels:
        """Return all labels."""
        self._write()
        self._file.seek(0)
        largest_code = max(0, len(self._names) - 1)
        smallest_type = np.min_scalar_type(largest_code)
        with self._file:
            codes = stored(block.astype(smallest_type) for block in self._blocks())
        return CodedLabels(codes, self._names)

    def _write(self) -> None:
        """Append the pending codes to the file."""
        self._file.write(self._pending.tobytes())
        self._pending = array("I")

    def _blocks(self) -> Iterator[np.ndarray]:
        """Yield all codes from the file, uint32, block by block."""
        while content := self._file.read(BLOCK * self._pending.itemsize):
            yield np.frombuffer(content, np.uint32)
