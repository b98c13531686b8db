"""Labels of very many rows: each distinct one is in memory once, and a file has its number for each row."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from distcore_data import cache_root
from distcore_tasks.shared.arrays import BLOCK, array_blocks, count_numbers, mapped


@dataclass(frozen=True, eq=False, slots=True)
class CodedLabels(Sequence[Any]):
    """Labels of very many rows, of which each distinct one is in memory once."""

    codes: np.ndarray
    """Place of the label of each row among ``names``, integers ``(rows,)``."""
    names: Sequence[Any]
    """The distinct labels, in the order of their first rows; some may have none."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def __getitem__(self, row: Any) -> Any:
        """Return the label of a row."""
        return self.names[self.codes[row]]

    def __iter__(self) -> Iterator[Any]:
        """Yield the label of each row."""
        return map(self.names.__getitem__, self.codes)

    def counts(self) -> Iterator[tuple[Any, int]]:
        """Yield each label with the number of its rows, which is not 0."""
        counts = count_numbers(self.codes, len(self.names)).tolist()
        return ((name, count) for name, count in zip(self.names, counts, strict=True) if count)

    def rows_of(self, codes: Collection[int]) -> Iterator[int]:
        """Yield the rows of some labels, ascending."""
        asked = np.zeros(len(self.names), bool)
        asked[[*codes]] = True
        for block, start in zip(array_blocks(self.codes), range(0, len(self), BLOCK), strict=True):
            yield from (np.flatnonzero(asked[block]) + start).tolist()

    def without(self, codes: Collection[int]) -> tuple[CodedLabels, Iterator[np.ndarray]]:
        """Return the labels without some, and their rows, int64, some of them at a time."""
        good = np.ones(len(self.names), bool)
        good[[*codes]] = False
        starts = range(0, len(self), BLOCK)
        rows = (np.flatnonzero(good[self.codes[start : start + BLOCK]]) + start for start in starts)
        return CodedLabels(mapped(block[good[block]] for block in array_blocks(self.codes)), self.names), rows

    def encoded(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the number of each row, whose label has one of ``numbers``, of the narrowest type, ``(rows,)``."""
        by_code = np.array(numbers, np.min_scalar_type(max(numbers, default=0)))
        return mapped(by_code[block] for block in array_blocks(self.codes))


class LabelCoder:
    """Labels that are told one after the other."""

    def __init__(self) -> None:
        """Begin without labels. Raises OSError if the disk of the cache cannot be written."""
        cache_root().mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = TemporaryFile(dir=cache_root())  # noqa: SIM115  # ``coded`` closes it
        self._codes, self._names, self._some = dict[object, int](), list[Any](), array("I")

    def add(self, label: Any) -> None:
        """Add the label of the next row, of any type: 1, 1.0 and True are three."""
        key = label if type(label) is str else (type(label), repr(label))
        if key not in self._codes:
            self._codes[key] = len(self._names)
            self._names.append(label)
        self._some.append(self._codes[key])
        if len(self._some) == BLOCK:
            self._write()

    def coded(self) -> CodedLabels:
        """Return all labels."""
        self._write()
        self._file.seek(0)
        kind = np.min_scalar_type(max(0, len(self._names) - 1))
        with self._file:
            return CodedLabels(mapped(block.astype(kind) for block in self._blocks()), self._names)

    def _write(self) -> None:
        self._file.write(self._some.tobytes())
        self._some = array("I")

    def _blocks(self) -> Iterator[np.ndarray]:
        while content := self._file.read(BLOCK * self._some.itemsize):
            yield np.frombuffer(content, np.uint32)
