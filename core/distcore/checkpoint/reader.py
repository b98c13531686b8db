"""Read a committed checkpoint lazily, each file when one of its tensors is needed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distcore.checkpoint.boxes import Region
from distcore.checkpoint.manifest import STATE, PieceEntry, TensorEntry, read_json, read_manifest
from distcore.checkpoint.tensors import DTYPES
from distcore.errors import CheckpointError, DamagedError
from distcore.files import unique_json
from distcore.model.averages import AVERAGE, average_name
from distcore.rounding import ceil_div

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes whose values are checked, by safetensors' names."""


class Checkpoint:
    """The tensors of a checkpoint by name; implements ``distcore.SavedState``."""

    def __init__(self, path: Path) -> None:
        """Read the manifest, and no tensor; raises CheckpointError if it or a file is not whole."""
        self.path = path
        self.manifest = read_manifest(path)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __getitem__(self, name: str) -> Tensor:
        """Return a copy of the whole tensor on the CPU; an unknown name raises CheckpointError."""
        entry = self.entry(name)
        if entry.boxes is not None or entry.grid is not None:
            return self._assemble(name, entry, entry.region)
        return self.piece(name, 0, entry.count).reshape(entry.shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor; an unknown name raises CheckpointError."""
        return tuple(self.entry(name).shape)

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count``, flat: shape ``(count,)``.

        Reads only these. Raises CheckpointError if there is no such tensor or range, or if a file
        is damaged.
        """
        entry = self.entry(name)
        end = start + count
        if start < 0 or count < 0 or end > entry.count:
            raise CheckpointError(
                f"{self.path}: {name!r} has {entry.count} elements, asked for {start} to {end}"
            )
        if entry.boxes is not None or entry.grid is not None:
            rows = _rows_around(entry, start, count)
            flat = self._assemble(name, entry, rows).reshape(-1)
            first = start - rows.offset[0] * math.prod(entry.shape[1:])
            return flat[first : first + count].clone()
        parts = []
        for piece in entry.pieces:
            if piece.start < end and start < piece.start + piece.count:
                parts.append(self._read_overlap(entry, piece, start, count))
        if not parts:
            return torch.empty(0, dtype=DTYPES[entry.dtype])
        return torch.cat(parts)

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements from ``offset`` on, in each dimension; reads no others."""
        entry = self.entry(name)
        is_inside = len(offset) == len(size) == len(entry.shape) and all(
            0 <= first <= first + n <= length
            for first, n, length in zip(offset, size, entry.shape, strict=True)
        )
        if not is_inside:
            raise CheckpointError(
                f"{self.path}: {name!r} is {entry.shape}, asked for {list(size)} at {list(offset)}"
            )
        if not offset:
            return self[name]
        wanted = Region(tuple(offset), tuple(size))
        if entry.boxes is not None or entry.grid is not None:
            return self._assemble(name, entry, wanted)
        elements_of_row = math.prod(entry.shape[1:])
        flat = self.piece(name, offset[0] * elements_of_row, size[0] * elements_of_row)
        rows = flat.reshape(size[0], *entry.shape[1:])
        origin_of_rows = (offset[0], *(0,) * (len(offset) - 1))
        return rows[wanted.slices(origin_of_rows)].clone()

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and pieces of a tensor; an unknown name raises CheckpointError."""
        if name not in self.manifest.tensors:
            raise CheckpointError(
                f"{self.path}: holds no tensor {name!r}; it was saved from another model"
            )
        return self.manifest.tensors[name]

    def job_state(self) -> dict[str, Any]:
        """Return the contents of state.json; raises CheckpointError if the file is damaged."""
        text = read_json(self.path / STATE)
        self._check_digest(STATE, hashlib.sha256(text).hexdigest())
        try:
            job_state = unique_json(text)
            # This fails for text that could not be printed.
            json.dumps(job_state, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / STATE}: is not JSON: {error}") from None
        if not isinstance(job_state, dict):
            raise CheckpointError(
                f"{self.path / STATE}: expected a JSON object, found a {type(job_state).__name__}"
            )
        return job_state

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Hash this rank's share of the files, all by default.

        Raises DamagedError with the name of a damaged one.
        """
        names = sorted(self.manifest.files)[rank::size]
        for name in names:
            with (self.path / name).open("rb") as file:
                self._check_digest(name, hashlib.file_digest(file, "sha256").hexdigest())
        self._verify_headers(names)

    def _verify_headers(self, names: Sequence[str]) -> None:
        """Raise DamagedError if a file holds other tensors than the manifest says, or a NaN."""
        listed: dict[str, dict[str, tuple[str, int]]] = {
            name: {} for name in names if name != STATE
        }
        for name, entry in self.manifest.tensors.items():
            parts = [(piece.file, piece.key, piece.count) for piece in entry.pieces]
            for box in entry.boxes_in(name, entry.region):
                parts.append((box.file, box.key, box.region.elements))
            for file, key, count in parts:
                if file in listed:
                    listed[file][key] = (entry.dtype, count)
        for file, tensors in listed.items():
            header = self._header(file)
            for key in sorted(header.keys() | tensors.keys()):
                if header.get(key) != tensors.get(key):
                    here, there = header.get(key, "nothing"), tensors.get(key, "nothing")
                    raise DamagedError(
                        f"{self.path / file}: damaged: its header says {here} of {key!r}, the"
                        f" manifest {there}"
                    )
            self._verify_numbers(file)

    def _header(self, file: str) -> dict[str, tuple[str, int]]:
        """Return dtype and number of elements of each tensor in a file, by key."""
        header = {}
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  # no mapping
                    part = opened.get_slice(key)
                    header[key] = (part.get_dtype(), math.prod(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"{self.path / file}: damaged: {error}") from None
        return header

    def _verify_numbers(self, file: str) -> None:
        """Raise DamagedError if a tensor of a file has a NaN."""
        with safe_open(self.path / file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping
                is_float = opened.get_slice(key).get_dtype() in FLOATS
                if is_float and opened.get_tensor(key).isnan().any():
                    raise DamagedError(
                        f"{self.path / file}: damaged: {key!r} is not a number (NaN) somewhere;"
                        " training may have diverged: lower --lr"
                    )

    def _check_digest(self, name: str, digest: str) -> None:
        if digest != self.manifest.files[name].sha256:
            raise DamagedError(
                f"{self.path / name}: damaged: its SHA-256 is not the one in the manifest"
            )

    def _read_overlap(
        self, entry: TensorEntry, piece: PieceEntry, start: int, count: int
    ) -> Tensor:
        """Return the elements of a piece that are in the range, shape ``(count of these,)``."""
        try:
            values: Tensor = self._file(piece.file).get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / piece.file}: cannot be read: {error}") from None
        if values.numel() != piece.count or values.dtype != DTYPES[entry.dtype]:
            raise CheckpointError(
                f"{self.path / piece.file}: {piece.key!r} is {values.numel()} elements of"
                f" {values.dtype}, the manifest says {piece.count} of {DTYPES[entry.dtype]}"
            )
        first = max(0, start - piece.start)
        end = start + count - piece.start
        return values.reshape(-1)[first:end].clone()  # a view would keep the file mapped

    def _assemble(self, name: str, entry: TensorEntry, wanted: Region) -> Tensor:
        """Return the region ``wanted`` of a tensor, from the stored boxes that share it."""
        result = torch.empty(wanted.size, dtype=DTYPES[entry.dtype])
        for box in entry.boxes_in(name, wanted) if wanted.elements else ():
            shared = box.region.overlap(wanted)
            assert shared is not None  # boxes_in gives no other
            try:
                stored = self._file(box.file).get_slice(box.key)
                fits = stored.get_shape() == box.size and stored.get_dtype() == entry.dtype
                values = stored[shared.slices(box.offset)] if fits else None
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / box.file}: cannot be read: {error}") from None
            if values is None:
                raise CheckpointError(
                    f"{self.path / box.file}: {box.key!r} is {stored.get_dtype()}"
                    f" {stored.get_shape()}, the manifest says {entry.dtype} {box.size}"
                )
            result[shared.slices(wanted.offset)] = values
        return result

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]


def _rows_around(entry: TensorEntry, start: int, count: int) -> Region:
    """Return the whole rows, along the first dimension, that have a range of flat elements."""
    elements_of_row = math.prod(entry.shape[1:]) or 1
    first = start // elements_of_row
    end = ceil_div(start + count, elements_of_row)
    offset = (first, *(0,) * (len(entry.shape) - 1))
    return Region(offset, (end - first, *entry.shape[1:]))


def weights_of(names: Iterable[str]) -> str:
    """Return which weights a checkpoint with tensors of these names is judged by: ema or raw."""
    return "ema" if any(name.startswith(AVERAGE) for name in names) else "raw"


class Evaluated:
    """A checkpoint with averaged weights, if it has any, in place of the trained ones.

    Implements ``distcore.SavedState``.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole tensor, a copy on the CPU."""
        return self._checkpoint[self._name(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor; reads none."""
        return self._checkpoint.shape(name)

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count``, flat: shape ``(count,)``."""
        return self._checkpoint.piece(self._name(name), start, count)

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements from ``offset`` on, in each dimension."""
        return self._checkpoint.box(self._name(name), offset, size)

    def _name(self, name: str) -> str:
        average = average_name(name)
        return average if average in self._checkpoint else name
