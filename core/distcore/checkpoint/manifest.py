"""The manifest of a checkpoint: size and SHA-256 of its files, and where tensors' pieces are.

A piece is a range of consecutive elements of a flattened tensor. A manifest may be damaged, or
written by somebody who is not trusted, so all of it is checked before any of it is used.
docs/checkpoint-format.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from distcore.checkpoint.boxes import (
    BoxEntry,
    Count,
    Entry,
    FileName,
    GridEntry,
    Region,
    grid_boxes,
    grid_files,
    grid_of,
    key_of,
    problem_of_boxes,
    problem_of_grid,
)
from distcore.errors import CheckpointError, DamagedError
from distcore.files import unique_json

FORMAT = 2
READABLE = (1, 2)
"""Formats that are read; format 1 knows neither boxes nor grids."""
MANIFEST, CHECKSUM, STATE = "manifest.json", "manifest.json.sha256", "state.json"
LARGEST_JSON = 2**30
"""Largest JSON file that is read, in bytes: a damaged or hostile one must not fill the memory."""
BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
}
"""Bytes per element, by safetensors' names of dtypes."""


class FileEntry(Entry):
    """One file of the checkpoint."""

    size: Count
    """In bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """In hexadecimal."""


class PieceEntry(Entry):
    """Elements ``start`` to ``start + count`` of a flattened tensor, and where they are stored."""

    file: FileName
    """Name of the safetensors file."""
    key: str
    """Name of the stored tensor in that file."""
    start: Count
    """Index of the first element in the flattened tensor."""
    count: Annotated[Count, Field(gt=0)]
    """Number of elements."""


class TensorEntry(Entry):
    """One tensor, whole: pieces that follow each other, boxes, or a regular grid of boxes.

    None of the three leaves a gap or overlaps.
    """

    dtype: str
    """In safetensors' name, such as ``F32``."""
    shape: Annotated[list[Count], Field(max_length=16)]
    """Shape of the whole tensor."""
    pieces: list[PieceEntry] = Field(default_factory=list)
    """In the order of ``start``; empty where the tensor is kept as boxes."""
    boxes: list[BoxEntry] | None = None
    """In the order of their offsets, where they make no regular grid."""
    grid: GridEntry | None = None
    """The boxes, where they make a regular grid; ``None`` where they do not."""

    @property
    def count(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def region(self) -> Region:
        """The whole tensor as a region."""
        return Region((0,) * len(self.shape), tuple(self.shape))

    def boxes_in(self, name: str, wanted: Region) -> list[BoxEntry]:
        """The stored boxes of the tensor ``name`` that share an element with ``wanted``."""
        if self.grid is not None:
            return list(grid_boxes(name, self.grid, self.shape, wanted))
        return [box for box in self.boxes or () if box.region.overlap(wanted)]


class RankManifest(Entry):
    """The files and tensors of one rank. Pieces of other ranks fill the gaps of its tensors."""

    files: dict[FileName, FileEntry]
    """By name."""
    tensors: dict[str, TensorEntry]
    """By name, such as ``model/head.weight``."""


class Manifest(RankManifest):
    """The contents of a whole checkpoint; creating one raises ValueError if it is inconsistent."""

    format: int
    """Version of the format: ``FORMAT``."""

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, tree: object) -> object:
        version = tree.get("format") if isinstance(tree, dict) else None
        if version not in READABLE:
            formats = " and ".join(map(str, READABLE))
            raise ValueError(f"checkpoint format {version}, this distcore reads {formats}")
        return tree

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if STATE not in self.files:
            raise ValueError(f"does not list {STATE}")
        for name, tensor in self.tensors.items():
            self._check(name, tensor)
        return self

    def _check(self, name: str, tensor: TensorEntry) -> None:
        """Raise ValueError if the pieces or boxes of a tensor are not the whole of it."""
        if tensor.dtype not in BYTES:
            raise ValueError(f"tensor {name!r}: unknown dtype {tensor.dtype!r}")
        if tensor.boxes is not None or tensor.grid is not None:
            self._check_boxes(name, tensor)
            return
        end = 0
        kind, _, bare = name.partition("/")
        for piece in tensor.pieces:
            key = bare if piece.count == tensor.count else f"{bare}@{piece.start}"
            _check_place(name, piece, key, kind)
            if piece.start != end:
                problem = "overlap" if piece.start < end else "leave a gap"
                raise ValueError(
                    f"tensor {name!r}: pieces {problem} at element {min(end, piece.start)}"
                )
            end += piece.count
            if not self._can_hold(piece.file, piece.count, tensor.dtype):
                raise ValueError(
                    f"tensor {name!r}: {piece.file} is not listed, or smaller than the piece it"
                    " holds"
                )
        if end != tensor.count:
            raise ValueError(f"tensor {name!r}: pieces hold {end} of its {tensor.count} elements")

    def _can_hold(self, file: str, elements: int, dtype: str) -> bool:
        """Return True if the file is listed and large enough.

        The size bounds how much a reader allocates for a count that somebody made up.
        """
        return file in self.files and elements * BYTES[dtype] <= self.files[file].size

    def _check_boxes(self, name: str, tensor: TensorEntry) -> None:
        """Raise ValueError if the boxes, or the grid, of a tensor are not the whole of it."""
        has_both = tensor.boxes is not None and tensor.grid is not None
        if tensor.pieces or has_both or self.format == 1:
            raise ValueError(
                f"tensor {name!r}: expected pieces, boxes or a grid, found more than one of them"
            )
        elements_of_files: dict[str, int] = {}
        if tensor.grid is not None:
            problem = problem_of_grid(tensor.grid, tensor.shape)
            if not problem:
                elements_of_files = grid_files(name, tensor.grid, tensor.shape)
        else:
            boxes = tensor.boxes or []
            problem = problem_of_boxes(boxes, tensor.shape)
            elements_of_files = {box.file: box.region.elements for box in boxes}
        if problem:
            raise ValueError(f"tensor {name!r}: {problem}")
        kind, _, bare = name.partition("/")
        for box in tensor.boxes or ():
            _check_place(name, box, key_of(bare, box.offset), kind)
        for file, elements in elements_of_files.items():
            if not self._can_hold(file, elements, tensor.dtype):
                raise ValueError(
                    f"tensor {name!r}: {file} is not listed, or smaller than the box it holds"
                )


def _check_place(name: str, part: PieceEntry | BoxEntry, key: str, kind: str) -> None:
    """Raise ValueError if a part is not stored under ``key`` in a file of its kind."""
    if part.key != key or not part.file.startswith(f"{kind}-"):
        raise ValueError(
            f"tensor {name!r}: expected under {key!r} in a file {kind}-…, found at {part.key!r}"
        )


def merge_tensors(shares: Iterable[RankManifest]) -> dict[str, TensorEntry]:
    """Merge the tensors of all ranks, in the order of names.

    Of several copies of a piece or box the first is kept. Raises CheckpointError if ranks disagree
    on the dtype or shape of a tensor.
    """
    dtypes: dict[str, TensorEntry] = {}
    pieces: dict[str, dict[tuple[int, int], PieceEntry]] = {}
    boxes: dict[str, dict[Region, BoxEntry]] = {}
    for share in shares:
        for name, tensor in share.tensors.items():
            first = dtypes.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"tensor {name!r}: ranks disagree on dtype or shape: {first.dtype}"
                    f" {first.shape} and {tensor.dtype} {tensor.shape}; the strategy's"
                    " save_checkpoint() is wrong"
                )
            for piece in tensor.pieces:
                pieces.setdefault(name, {}).setdefault((piece.start, piece.count), piece)
            for box in tensor.boxes or ():
                boxes.setdefault(name, {}).setdefault(box.region, box)
    return {
        name: _whole(first, pieces.get(name, {}), boxes.get(name, {}))
        for name, first in sorted(dtypes.items())
    }


def _whole(
    first: TensorEntry, pieces: dict[tuple[int, int], PieceEntry], boxes: dict[Region, BoxEntry]
) -> TensorEntry:
    """Return ``first`` with the pieces or boxes of all ranks: as a grid, where they make one."""
    pieces_in_order = [piece for _, piece in sorted(pieces.items())]
    boxes_in_order = [box for _, box in sorted(boxes.items())]
    grid = grid_of(boxes_in_order, first.shape) if boxes_in_order else None
    stored_boxes = None if grid else boxes_in_order or None
    return first.model_copy(update={"pieces": pieces_in_order, "boxes": stored_boxes, "grid": grid})


def text_of(share: RankManifest) -> bytes:
    """Return the merged manifest as JSON: one line per file and per tensor."""
    tree = share.model_dump(mode="json", exclude_none=True)
    parts = [f' "format": {FORMAT}']
    for key, entries in tree.items():
        lines = ",\n".join(f"  {_json(name)}: {_json(entry)}" for name, entry in entries.items())
        parts.append(f" {_json(key)}: {{\n{lines}\n }}")
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def parse(text: bytes, file: Path) -> Manifest:
    """Return the manifest in ``text``.

    Raises CheckpointError, one line, if it is not valid JSON or not consistent.
    """
    try:
        manifest = Manifest.model_validate_json(text)
        unique_json(text)
    except ValidationError as error:
        raise CheckpointError(f"{file}: {_explain(error)}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint ``path``; check it, and that all files are complete.

    Reads no tensor. Raises CheckpointError with the name of the file that is wrong.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path}: is a link; give the checkpoint's own folder")
    text = read_json(path / MANIFEST)
    if read_json(path / CHECKSUM) != checksum_line(text):
        raise DamagedError(f"{path / MANIFEST}: damaged: its SHA-256 is not the one in {CHECKSUM}")
    manifest = parse(text, path / MANIFEST)
    for name, file in manifest.files.items():
        size = size_of(path / name)
        if size != file.size:
            raise DamagedError(
                f"{path / name}: damaged: {size} bytes, the manifest says {file.size}"
            )
    return manifest


def checksum_line(text: bytes) -> bytes:
    """Return the output of ``sha256sum manifest.json`` for a manifest ``text``."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def size_of(file: Path) -> int:
    """Return the size of a file in bytes.

    Raises CheckpointError, without opening it, for a link, a pipe or a device; DamagedError if
    it cannot be read.
    """
    try:
        status = file.lstat()
    except OSError as error:
        raise DamagedError(f"{file}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: is not a regular file")
    return status.st_size


def read_json(file: Path) -> bytes:
    """Return the bytes of a JSON file.

    Raises CheckpointError if it is larger than ``LARGEST_JSON`` or unreadable.
    """
    if (size := size_of(file)) > LARGEST_JSON:
        raise CheckpointError(
            f"{file}: {size} bytes of JSON, more than the limit of {LARGEST_JSON}"
        )
    try:
        return file.read_bytes()
    except OSError as error:
        raise DamagedError(f"{file}: cannot be read: {error.strerror}") from None


def _explain(error: ValidationError) -> str:
    """Return the first problem that pydantic reports, in one line of at most 300 characters."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    line = " ".join(f"{where}: {first['msg']}".split())
    return line[:300].removeprefix(": ").replace("Value error, ", "")
