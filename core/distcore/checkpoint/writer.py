"""One rank's part of a checkpoint: its own pieces, and its share of the replicated tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from distcore.checkpoint.boxes import BoxEntry, key_of
from distcore.checkpoint.commit import publish_rank_manifest, staging_of
from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import FileEntry, PieceEntry, RankManifest, TensorEntry
from distcore.checkpoint.read_back import check_file
from distcore.checkpoint.tensors import NAMES, write_file
from distcore.distributed.agreement import share_buffers, share_extra_state
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.state import Box, Piece, State

STATE_KINDS = ("model", "optimizer", "ema")
"""Prefixes of tensor names, before the first ``/``."""
FILE_BYTES = 2**30
"""Largest tensor data of one file, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The unit of writing, in one file: a whole tensor, a flat slice of it, or a box."""

    name: str
    """Name of the tensor, such as ``model/head.weight``."""
    values: Tensor
    """The elements: in the tensor's own shape if these are all, else of shape ``(count,)``."""
    start: int
    """Index of the first element in the flattened tensor; of a box, too."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...] | None = None
    """Of a box: the index of its first element in each dimension."""

    @property
    def key(self) -> str:
        """Key in the file: the name without its kind, and for a part with ``@`` and its start."""
        bare = self.name.partition("/")[2]
        if self.offset is not None:
            return key_of(bare, self.offset)
        whole = self.values.numel() == math.prod(self.shape)
        return bare if whole else f"{bare}@{self.start}"


def state_to_save(run: Run, hooks: Hooks) -> State:
    """Return this rank's part of the state.

    Every rank calls: all take over rank 0's buffers and extra state first.
    """
    share_buffers(run, hooks)
    share_extra_state(run, hooks)
    return hooks.save_checkpoint(run) | (run.ema or {})


def write_share(
    files: Files,
    final: Path,
    blocks: Sequence[Block],
    rank: int,
    limit: int = FILE_BYTES,
    reads_back: bool = False,
) -> None:
    """Write this rank's blocks of the checkpoint ``final``, and publish that they are written.

    ``limit`` bounds the bytes of data in a file. With ``reads_back`` each file is read again first.
    Raises CheckpointError if it returns other numbers.
    """
    written: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for kind in STATE_KINDS:
        blocks_of_kind = [block for block in blocks if block.name.startswith(f"{kind}/")]
        for index, group in enumerate(_group_into_files(blocks_of_kind, limit)):
            file = f"{kind}-{rank:05d}-{index:03d}.safetensors"
            values = {block.key: block.values for block in group}
            written[file] = write_file(files, staging_of(final) / file, values)
            if reads_back:
                check_file(staging_of(final) / file, values)
            for block in group:
                _add_entry(tensors, block, file)
    for block in blocks:
        if not block.values.numel():  # a tensor without elements is in the manifest, and in no file
            _add_entry(tensors, block, None)
    publish_rank_manifest(files, final, rank, RankManifest(files=written, tensors=tensors))


def blocks_to_write(state: State, rank: int, size: int, limit: int = FILE_BYTES) -> list[Block]:
    """Return the blocks that ``rank`` of ``size`` writes, in the order of names.

    Pieces are written by the rank that holds them. Whole tensors are on every rank, and each is
    written by one; all ranks compute the same assignment, so they need not communicate. Raises
    CheckpointError for a name or dtype that a checkpoint cannot have.
    """
    _check_names(state)
    own: list[Block] = []
    replicated: list[Block] = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            replicated += _split_large(name, value, 0, tuple(value.shape), limit)
        else:
            own += _split_sharded(name, value, limit)
    blocks = [*own, *_assign_to_rank(replicated, rank, size)]
    return sorted(blocks, key=lambda block: (block.name, block.start))


def copy_to_cpu(blocks: Sequence[Block], memory: dict[str, Tensor]) -> list[Block]:
    """Return the blocks with their values copied to main memory: training changes the originals.

    ``memory`` has the copies of the last save, and is used again: getting new pages costs more than
    copying.
    """
    copies = []
    for block in blocks:
        values = block.values.detach()
        key = f"{block.name}@{block.start}"
        copy = memory.get(key)
        if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
            copy = torch.empty_like(values, device="cpu", memory_format=torch.contiguous_format)
            memory[key] = copy
        copies.append(replace(block, values=copy.copy_(values)))
    return copies


def _check_names(state: State) -> None:
    """Raise CheckpointError for a name or dtype that a checkpoint cannot have."""
    for name, value in state.items():
        tensors = _values(value)
        unknown = [str(tensor.dtype) for tensor in tensors if tensor.dtype not in NAMES]
        if unknown or name.partition("/")[0] not in STATE_KINDS:
            dtype = unknown[0] if unknown else tensors[0].dtype
            raise CheckpointError(
                f"hook save_checkpoint(): returned {name!r} of {dtype}; expected"
                " model/NAME or optimizer/NAME/KEY and a dtype that safetensors knows"
            )


def _values(held: Tensor | Piece | Box | Sequence[Box]) -> list[Tensor]:
    """Return the elements of each part of one entry of a ``State``."""
    if isinstance(held, Tensor):
        return [held]
    return [part.values for part in _parts(held)]


def _parts(held: Piece | Box | Sequence[Box]) -> Sequence[Piece | Box]:
    return [held] if isinstance(held, Piece | Box) else held


def _split_sharded(name: str, held: Piece | Box | Sequence[Box], limit: int) -> Iterator[Block]:
    """Yield the blocks of this rank's parts of a tensor, without replicas of other ranks' parts."""
    for part in _parts(held):
        if part.replica:
            continue
        if isinstance(part, Piece):
            yield from _split_large(name, part.values, part.start, part.shape, limit)
        else:
            yield from _split_box(name, part.values, part.offset, part.shape, limit)


def _split_box(
    name: str, values: Tensor, offset: tuple[int, ...], shape: tuple[int, ...], limit: int
) -> Iterator[Block]:
    """Yield a box as one block, or as several where a file would grow beyond ``limit``.

    It is cut along the first dimension that can be.
    """
    if not shape or not len(offset) == values.dim() == len(shape):
        raise CheckpointError(
            f"hook save_checkpoint(): returned a box of {name!r} with values of shape"
            f" {list(values.shape)} at {list(offset)}; expected as many dimensions as the whole"
            f" has: {list(shape)}"
        )
    cuttable = [axis for axis, length in enumerate(values.shape) if length > 1]
    if values.nbytes > limit and cuttable:
        axis = cuttable[0]
        length = values.shape[axis]
        step = max(1, length * limit // values.nbytes)
        for at in range(0, length, step):
            part = values.narrow(axis, at, min(step, length - at))
            part_offset = list(offset)
            part_offset[axis] += at
            yield from _split_box(name, part, tuple(part_offset), shape, limit)
        return
    start = 0
    for at, length in zip(offset, shape, strict=True):
        start = start * length + at
    yield Block(name=name, values=values, start=start, shape=shape, offset=offset)


def _split_large(
    name: str, values: Tensor, start: int, shape: tuple[int, ...], limit: int
) -> Iterator[Block]:
    """Yield the block of ``values``, or flat slices of at most ``limit`` bytes of them."""
    step = max(1, limit // values.element_size())
    if values.numel() <= step:
        yield Block(name=name, values=values, start=start, shape=shape)
        return
    flat = values.reshape(-1)
    for at in range(0, values.numel(), step):
        part = flat[at : at + step]
        yield Block(name=name, values=part, start=start + at, shape=shape)


def _assign_to_rank(blocks: list[Block], rank: int, size: int) -> list[Block]:
    """Return the blocks of replicated tensors that ``rank`` writes: the largest first, each by the
    rank with the fewest bytes so far.
    """

    def largest_first(block: Block) -> tuple[int, str, int]:
        # Ties are broken by name: all ranks must come to the same order.
        return -block.values.nbytes, block.name, block.start

    loads = [0] * size
    mine = []
    for block in sorted(blocks, key=largest_first):
        taker = min(range(size), key=lambda other: (loads[other], other))
        loads[taker] += block.values.nbytes
        if taker == rank:
            mine.append(block)
    return mine


def _group_into_files(blocks: Sequence[Block], limit: int) -> Iterator[list[Block]]:
    """Yield the blocks of each file, at most ``limit`` bytes unless a single block has more."""
    group: list[Block] = []
    room = limit
    for block in blocks:
        if not block.values.numel():
            continue
        if group and block.values.nbytes > room:
            yield group
            group = []
            room = limit
        group.append(block)
        room -= block.values.nbytes
    if group:
        yield group


def _add_entry(tensors: dict[str, TensorEntry], block: Block, file: str | None) -> None:
    """Add a block to the entry of its tensor; without ``file``, make the entry alone."""
    new = TensorEntry(
        dtype=NAMES[block.values.dtype],
        shape=list(block.shape),
        pieces=[],
        boxes=None if block.offset is None else [],
    )
    entry = tensors.setdefault(block.name, new)
    if not file:
        return
    if block.offset is not None and entry.boxes is not None:
        offset = list(block.offset)
        size = list(block.values.shape)
        box = BoxEntry(file=file, key=block.key, offset=offset, size=size)
        entry.boxes.append(box)
    else:
        count = block.values.numel()
        piece = PieceEntry(file=file, key=block.key, start=block.start, count=count)
        entry.pieces.append(piece)
