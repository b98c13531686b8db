"""Reading a committed checkpoint lazily, a file when one of its tensors is asked for;
and which weights count.
"""

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

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes whose values are checked, by safetensors' names."""


class Checkpoint:
    """The tensors of a checkpoint by name; implements ``distcore.SavedState``."""

    def __init__(self, path: Path) -> None:
        """Read the manifest, and no tensor; raises CheckpointError if it is not valid
        or a file is missing.
        """
        self.path = path
        self.manifest = read_manifest(path)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __getitem__(self, name: str) -> Tensor:
        """Return a copy of the whole tensor on the CPU; raises CheckpointError
        for an unknown name.
        """
        entry = self.entry(name)
        if entry.boxes is not None or entry.grid is not None:
            return self._assemble(name, entry, entry.region)
        return self.piece(name, 0, entry.count).reshape(entry.shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, from the manifest; raises CheckpointError
        for an unknown name.
        """
        return tuple(self.entry(name).shape)

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count`` of the flattened tensor, shape
        ``(count,)``; read only these.

        Raises CheckpointError if there is no such tensor or range, or if a file is damaged.
        """
        entry = self.entry(name)
        if start < 0 or count < 0 or start + count > entry.count:
            raise CheckpointError(
                f"{self.path}: {name!r} has {entry.count} elements, asked for {start} to"
                f" {start + count}"
            )
        if entry.boxes is not None or entry.grid is not None:
            rows = _rows_around(entry, start, count)
            block = self._assemble(name, entry, rows).reshape(-1)
            return block[start - rows.offset[0] * math.prod(entry.shape[1:]) :][:count].clone()
        pieces = [p for p in entry.pieces if p.start < start + count and start < p.start + p.count]
        parts = [self._read_overlap(entry, piece, start, count) for piece in pieces]
        return torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[entry.dtype])

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements from ``offset`` on in each dimension. No other elements are
        read from the files.
        """
        entry, wanted = self.entry(name), Region(tuple(offset), tuple(size))
        inside = len(offset) == len(size) == len(entry.shape) and all(
            0 <= o <= o + n <= length
            for o, n, length in zip(offset, size, entry.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{self.path}: {name!r} is {entry.shape}, asked for {list(size)} at {list(offset)}"
            )
        if not offset:
            return self[name]
        if entry.boxes is not None or entry.grid is not None:
            return self._assemble(name, entry, wanted)
        row = math.prod(entry.shape[1:])
        rows = self.piece(name, offset[0] * row, size[0] * row).reshape(size[0], *entry.shape[1:])
        return rows[wanted.slices((offset[0], *(0,) * (len(offset) - 1)))].clone()

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and pieces of a tensor; raises CheckpointError
        for an unknown name.
        """
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
            # fails for text that could not be printed
            json.dumps(job_state, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / STATE}: is not JSON: {error}") from None
        if not isinstance(job_state, dict):
            raise CheckpointError(
                f"{self.path / STATE}: expected a JSON object, found a {type(job_state).__name__}"
            )
        return job_state

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Hash this rank's share of the files, all by default; raises DamagedError with the
        name of a damaged one.
        """
        for name in sorted(self.manifest.files)[rank::size]:
            with (self.path / name).open("rb") as file:
                self._check_digest(name, hashlib.file_digest(file, "sha256").hexdigest())
        self._verify_headers(sorted(self.manifest.files)[rank::size])

    def _verify_headers(self, names: Sequence[str]) -> None:
        wanted: dict[str, dict[str, tuple[str, int]]] = {
            name: {} for name in names if name != STATE
        }
        for name, entry in self.manifest.tensors.items():
            parts = [(piece.file, piece.key, piece.count) for piece in entry.pieces]
            parts += [
                (box.file, box.key, box.region.elements)
                for box in entry.boxes_in(name, entry.region)
            ]
            for file, key, count in parts:
                if file in wanted:
                    wanted[file][key] = (entry.dtype, count)
        for file, keys in wanted.items():
            header = self._header(file)
            if odd := sorted(
                key for key in header.keys() | keys.keys() if header.get(key) != keys.get(key)
            ):
                here, there = (tensors.get(odd[0], "nothing") for tensors in (header, keys))
                raise DamagedError(
                    f"{self.path / file}: damaged: its header says {here} of {odd[0]!r}, the"
                    f" manifest {there}"
                )
            self._verify_numbers(file)

    def _header(self, file: str) -> dict[str, tuple[str, int]]:
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                # no mapping
                slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
                return {
                    key: (part.get_dtype(), math.prod(part.get_shape()))
                    for key, part in slices.items()
                }
        except (OSError, SafetensorError) as error:
            raise DamagedError(f"{self.path / file}: damaged: {error}") from None

    def _verify_numbers(self, file: str) -> None:
        with safe_open(self.path / file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping
                if (
                    opened.get_slice(key).get_dtype() in FLOATS
                    and opened.get_tensor(key).isnan().any()
                ):
                    why = (
                        f"damaged: {key!r} is not a number (NaN) somewhere; training may have"
                        " diverged: lower --lr"
                    )
                    raise DamagedError(f"{self.path / file}: {why}")

    def _check_digest(self, name: str, digest: str) -> None:
        if digest != self.manifest.files[name].sha256:
            raise DamagedError(
                f"{self.path / name}: damaged: its SHA-256 is not the one in the manifest"
            )

    def _read_overlap(
        self, entry: TensorEntry, piece: PieceEntry, start: int, count: int
    ) -> Tensor:
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
        # a view would keep the file mapped
        return values.reshape(-1)[first : start + count - piece.start].clone()

    def _assemble(self, name: str, entry: TensorEntry, wanted: Region) -> Tensor:
        whole = torch.empty(wanted.size, dtype=DTYPES[entry.dtype])
        for box in entry.boxes_in(name, wanted) if wanted.elements else ():
            shared = box.region.overlap(wanted)
            assert shared is not None  # boxes_in gives no other
            try:
                stored = self._file(box.file).get_slice(box.key)
                problem = stored.get_shape() != box.size or stored.get_dtype() != entry.dtype
                values = None if problem else stored[shared.slices(box.offset)]
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / box.file}: cannot be read: {error}") from None
            if values is None:
                raise CheckpointError(
                    f"{self.path / box.file}: {box.key!r} is {stored.get_dtype()}"
                    f" {stored.get_shape()}, the manifest says {entry.dtype} {box.size}"
                )
            whole[shared.slices(wanted.offset)] = values
        return whole

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]


def _rows_around(entry: TensorEntry, start: int, count: int) -> Region:
    row = math.prod(entry.shape[1:]) or 1
    first, last = start // row, -(-(start + count) // row)
    return Region((first, *(0,) * (len(entry.shape) - 1)), (last - first, *entry.shape[1:]))


def weights_of(names: Iterable[str]) -> str:
    """Return which weights are evaluated of a checkpoint with tensors of these
    names: ``ema`` or ``raw``.
    """
    return "ema" if any(name.startswith(AVERAGE) for name in names) else "raw"


class Evaluated:
    """A checkpoint with averaged weights in place of the weights, if it
    has any. Implements ``distcore.SavedState``.
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
        """Return elements ``start`` to ``start + count`` of the
        flattened tensor, shape ``(count,)``.
        """
        return self._checkpoint.piece(self._name(name), start, count)

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements from ``offset`` on, in each dimension."""
        return self._checkpoint.box(self._name(name), offset, size)

    def _name(self, name: str) -> str:
        average = average_name(name)
        return average if average in self._checkpoint else name
