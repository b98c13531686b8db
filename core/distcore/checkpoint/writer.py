"""What one rank writes of a checkpoint: its own pieces, and its share of the tensors that all ranks hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import FileEntry, PieceEntry, RankManifest, TensorEntry
from distcore.checkpoint.tensors import NAMES, write_file
from distcore.errors import CheckpointError
from distcore.plugin.contract import Piece, State

STATE_KINDS = ("model", "optimizer")
"""What the name of every tensor starts with, before the first ``/``."""
FILE_BYTES = 2**30
"""Largest tensor data of one file, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A tensor, or consecutive elements of a flattened one, that is written to one file."""

    name: str
    """Name of the tensor, such as ``model/head.weight``."""
    values: Tensor
    """The elements: in the tensor's own shape if these are all, else of shape ``(count,)``."""
    start: int
    """Index of the first element in the flattened tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def key(self) -> str:
        """Key in the file: the name without its kind and, for a part of a tensor, with ``@`` and ``start``."""
        bare = self.name.partition("/")[2]
        whole = self.values.numel() == math.prod(self.shape)
        return bare if whole else f"{bare}@{self.start}"


def write_rank_files(
    files: Files, folder: Path, blocks: Sequence[Block], rank: int, limit: int = FILE_BYTES
) -> RankManifest:
    """Write this rank's blocks into ``folder``, at most ``limit`` bytes of data per file; return what was written."""
    written: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for kind in STATE_KINDS:
        for index, group in enumerate(_group_into_files([b for b in blocks if b.name.startswith(f"{kind}/")], limit)):
            file = f"{kind}-{rank:05d}-{index:03d}.safetensors"
            written[file] = write_file(files, folder / file, {block.key: block.values for block in group})
            for block in group:
                _add_entry(tensors, block, file)
    for block in blocks:
        if not block.values.numel():  # a tensor without elements is in the manifest, and in no file
            _add_entry(tensors, block, None)
    return RankManifest(files=written, tensors=tensors)


def blocks_to_write(state: State, rank: int, size: int, limit: int = FILE_BYTES) -> list[Block]:
    """Return the blocks that ``rank`` of ``size`` writes, in the order of names.

    Pieces are written by the rank that holds them. Whole tensors are on every rank, and each is written by one; all
    ranks compute the same assignment, so they need not communicate.
    Raises CheckpointError for a name or dtype that a checkpoint cannot have.
    """
    _check_names(state)
    own = [
        block
        for name, piece in state.items()
        if isinstance(piece, Piece)
        for block in _split_large(name, piece.values, piece.start, piece.shape, limit)
    ]
    whole = [
        block
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
        for block in _split_large(name, tensor, 0, tuple(tensor.shape), limit)
    ]
    return sorted([*own, *_assign_to_rank(whole, rank, size)], key=lambda block: (block.name, block.start))


def copied_to_cpu(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks with their values copied to main memory, so that training may change the originals."""
    return [replace(block, values=block.values.detach().to("cpu", copy=True)) for block in blocks]


def _check_names(state: State) -> None:
    for name, value in state.items():
        dtype = (value.values if isinstance(value, Piece) else value).dtype
        if name.partition("/")[0] not in STATE_KINDS or dtype not in NAMES:
            raise CheckpointError(
                f"hook save_checkpoint(): returned {name!r} of {dtype}; expected model/NAME or optimizer/NAME/KEY "
                "and a dtype that safetensors knows"
            )


def _split_large(name: str, values: Tensor, start: int, shape: tuple[int, ...], limit: int) -> Iterator[Block]:
    """Yield one block, or several if the values have more than ``limit`` bytes."""
    step = max(1, limit // values.element_size())
    if values.numel() <= step:
        yield Block(name=name, values=values, start=start, shape=shape)
        return
    flat = values.reshape(-1)
    for at in range(0, values.numel(), step):
        yield Block(name=name, values=flat[at : at + step], start=start + at, shape=shape)


def _assign_to_rank(blocks: list[Block], rank: int, size: int) -> list[Block]:
    """Return the blocks of ``rank``: the largest block first, each goes to the rank with the fewest bytes so far."""
    loads = [0] * size
    mine = []
    # Ties are broken by name: all ranks must come to the same order.
    for block in sorted(blocks, key=lambda block: (-block.values.nbytes, block.name, block.start)):
        taker = min(range(size), key=lambda other: (loads[other], other))
        loads[taker] += block.values.nbytes
        if taker == rank:
            mine.append(block)
    return mine


def _group_into_files(blocks: Sequence[Block], limit: int) -> Iterator[list[Block]]:
    group: list[Block] = []
    room = limit
    for block in blocks:
        if not block.values.numel():
            continue
        if group and block.values.nbytes > room:
            yield group
            group, room = [], limit
        group.append(block)
        room -= block.values.nbytes
    if group:
        yield group


def _add_entry(tensors: dict[str, TensorEntry], block: Block, file: str | None) -> None:
    entry = tensors.setdefault(
        block.name, TensorEntry(dtype=NAMES[block.values.dtype], shape=list(block.shape), pieces=[])
    )
    if file:
        entry.pieces.append(PieceEntry(file=file, key=block.key, start=block.start, count=block.values.numel()))
