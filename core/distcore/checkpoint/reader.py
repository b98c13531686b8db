"""Reading a committed checkpoint lazily: a file is opened when one of its tensors is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distcore.checkpoint.manifest import STATE, PieceEntry, TensorEntry, read_json, read_manifest
from distcore.checkpoint.tensors import DTYPES
from distcore.errors import CheckpointError, DamagedError


class Checkpoint:
    """The tensors of a checkpoint by name; implements ``distcore.SavedState``."""

    def __init__(self, path: Path) -> None:
        """Read the manifest, and no tensor; raises CheckpointError if it is not valid or a file is missing."""
        self.path = path
        self.manifest = read_manifest(path)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole tensor, a copy on the CPU; raises CheckpointError if there is none of that name."""
        entry = self.entry(name)
        return self.piece(name, 0, entry.count).reshape(entry.shape)

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count`` of the flattened tensor, shape ``(count,)``; read only these.

        Raises CheckpointError if there is no such tensor or range, or if a file is damaged.
        """
        entry = self.entry(name)
        if start < 0 or count < 0 or start + count > entry.count:
            raise CheckpointError(
                f"{self.path}: {name!r} has {entry.count} elements, asked for {start} to {start + count}"
            )
        parts = [
            self._read_overlap(entry, piece, start, count) for piece in entry.pieces if _overlap(piece, start, count)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[entry.dtype])

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and pieces of a tensor; raises CheckpointError if there is none of that name."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}; it was saved from another model")
        return self.manifest.tensors[name]

    def job_state(self) -> dict[str, Any]:
        """Return the contents of state.json; raises CheckpointError if the file is damaged."""
        text = read_json(self.path / STATE)
        self._check_digest(STATE, hashlib.sha256(text).hexdigest())
        try:
            job_state = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / STATE}: is not JSON: {error}") from None
        if not isinstance(job_state, dict):
            raise CheckpointError(f"{self.path / STATE}: expected a JSON object, found a {type(job_state).__name__}")
        return job_state

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Hash this rank's share of the files, all by default; raises DamagedError with the name of a damaged one."""
        for name in sorted(self.manifest.files)[rank::size]:
            with (self.path / name).open("rb") as file:
                self._check_digest(name, hashlib.file_digest(file, "sha256").hexdigest())

    def _check_digest(self, name: str, digest: str) -> None:
        if digest != self.manifest.files[name].sha256:
            raise DamagedError(f"{self.path / name}: damaged: its SHA-256 is not the one in the manifest")

    def _read_overlap(self, entry: TensorEntry, piece: PieceEntry, start: int, count: int) -> Tensor:
        """Return a copy of those elements of ``piece`` that lie between ``start`` and ``start + count``."""
        try:
            values: Tensor = self._file(piece.file).get_tensor(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / piece.file}: cannot be read: {error}") from None
        if values.numel() != piece.count or values.dtype != DTYPES[entry.dtype]:
            raise CheckpointError(
                f"{self.path / piece.file}: {piece.key!r} is {values.numel()} elements of {values.dtype}, the manifest "
                f"says {piece.count} of {DTYPES[entry.dtype]}"
            )
        first = max(0, start - piece.start)
        return values.reshape(-1)[first : start + count - piece.start].clone()  # a view would keep the file mapped

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]


def _overlap(piece: PieceEntry, start: int, count: int) -> bool:
    return piece.start < start + count and start < piece.start + piece.count
