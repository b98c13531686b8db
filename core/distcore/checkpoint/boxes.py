"""Boxes in a checkpoint: parts of a tensor by offset and size, and regular grids of them.

A tensor that is sharded over a mesh of ranks is a grid of boxes. A grid is one entry of the
manifest, however many ranks wrote it: the block size, and the writing rank of each block in
row-major order. See docs/checkpoint-format.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import add, mul, sub
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from distcore.rounding import ceil_div

Count = Annotated[int, Field(ge=0, lt=2**48)]
FileName = Annotated[
    str, Field(pattern=r"^((model|optimizer|ema)-[0-9]{5}-[0-9]{3}\.safetensors|state\.json)$")
]
Extent = Annotated[list[Count], Field(min_length=1, max_length=16)]
# A name of a file has five digits for the rank and three for the number.
RankNumber = Annotated[int, Field(ge=0, lt=100_000)]
FileNumber = Annotated[int, Field(ge=0, lt=1_000)]
LARGEST_CUT = 2**24
"""Cells into which irregular boxes may cut a tensor; more is refused, not counted."""


class Region(NamedTuple):
    """A box without its values."""

    offset: tuple[int, ...]
    """Index of the first element, in each dimension."""
    size: tuple[int, ...]
    """Number of elements, in each dimension."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """The region as indices of a tensor that begins at the index ``origin`` of the whole."""
        slices = []
        for first, first_of_tensor, count in zip(self.offset, origin, self.size, strict=True):
            start = first - first_of_tensor
            slices.append(slice(start, start + count))
        return tuple(slices)

    def overlap(self, other: Region) -> Region | None:
        """Return the intersection of two regions; ``None`` if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        own_ends = map(add, self.offset, self.size)
        other_ends = map(add, other.offset, other.size)
        ends = map(min, own_ends, other_ends)
        size = tuple(map(sub, ends, offset))
        return Region(offset, size) if min(size) > 0 else None


class Entry(BaseModel):
    """A part of a manifest: every key is known, and of its own type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BoxEntry(Entry):
    """One box: the tensor ``key`` of ``file``, whose shape is the box's size."""

    file: FileName
    """Name of the safetensors file."""
    key: str
    """Name of the stored tensor in that file."""
    offset: Extent
    """Index of the first element in the whole tensor, in each dimension."""
    size: Extent
    """Number of elements, in each dimension."""

    @property
    def region(self) -> Region:
        """Where the box lies in the whole tensor."""
        return Region(tuple(self.offset), tuple(self.size))


class GridEntry(Entry):
    """Boxes that cut every dimension at multiples of ``block``, in row-major order.

    Those at an end may be smaller.

    Block ``i`` is the tensor ``NAME@offset,offset…`` in the file ``PART-RRRRR-NNN.safetensors``,
    where ``RRRRR`` is ``ranks[i]`` and ``NNN`` is ``numbers[i]``, or ``numbers[0]`` where all are
    alike.
    """

    block: Extent
    """Number of elements of a block, in each dimension."""
    ranks: list[RankNumber]
    """For each block, the rank that wrote its file."""
    numbers: Annotated[list[FileNumber], Field(min_length=1)]
    """File number of each block among the files of its rank; a single one holds for all."""

    def number(self, index: int) -> int:
        """Return the file number of block ``index``."""
        return self.numbers[index] if len(self.numbers) > 1 else self.numbers[0]


def key_of(bare: str, offset: Iterable[int]) -> str:
    """Return the name in its file for the box of tensor ``bare`` that begins at ``offset``."""
    return f"{bare}@{','.join(map(str, offset))}"


def grid_of(boxes: Sequence[BoxEntry], shape: Sequence[int]) -> GridEntry | None:
    """Return the grid that ``boxes``, sorted by offset, make of a tensor of ``shape``.

    ``None`` if they make none.
    """
    block = []
    blocks_along = []
    for axis, length in enumerate(shape):
        offsets = sorted({box.offset[axis] for box in boxes})
        # The second offset of a dimension is the size of its first block.
        block.append(offsets[1] if len(offsets) > 1 else length)
        blocks_along.append(len(offsets))
    if len(boxes) != math.prod(blocks_along) or not all(block):
        return None
    for box, region in zip(boxes, grid_regions(block, shape), strict=False):
        if box.region != region:
            return None
    if sum(box.region.elements for box in boxes) != math.prod(shape):
        return None
    files = [box.file.removesuffix(".safetensors").split("-") for box in boxes]
    ranks = [int(rank) for _, rank, _ in files]
    numbers = [int(number) for _, _, number in files]
    if len(set(numbers)) == 1:
        numbers = numbers[:1]
    return GridEntry(block=block, ranks=ranks, numbers=numbers)


def grid_regions(block: Sequence[int], shape: Sequence[int]) -> Iterator[Region]:
    """Every block of a grid, in row-major order."""
    starts = []
    for length, step in zip(shape, block, strict=True):
        starts.append(range(0, length, step))
    for offset in product(*starts):
        yield _block_at(offset, block, shape)


def _block_at(offset: tuple[int, ...], block: Sequence[int], shape: Sequence[int]) -> Region:
    """Return the block that begins at ``offset``; at an end of the tensor it is smaller."""
    left = map(sub, shape, offset)
    return Region(offset, tuple(map(min, block, left)))


def _blocks_along(block: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the number of blocks in each dimension."""
    lengths = zip(shape, block, strict=True)
    return [ceil_div(length, block_length) for length, block_length in lengths]


def grid_boxes(
    name: str, grid: GridEntry, shape: Sequence[int], wanted: Region
) -> Iterator[BoxEntry]:
    """The blocks of a grid that share an element with ``wanted``.

    Others are not visited: a grid may have very many blocks, and a rank needs few of them.
    """
    part, _, bare = name.partition("/")
    counts = _blocks_along(grid.block, shape)
    touched = []
    for start, size, step in zip(wanted.offset, wanted.size, grid.block, strict=True):
        first = start // step
        end = ceil_div(start + size, step)
        touched.append(range(first, end))
    for position in product(*touched):
        # The number of the block in row-major order.
        index = 0
        for number_along, count in zip(position, counts, strict=True):
            index = index * count + number_along
        region = _block_at(tuple(map(mul, position, grid.block)), grid.block, shape)
        yield BoxEntry(
            file=f"{part}-{grid.ranks[index]:05d}-{grid.number(index):03d}.safetensors",
            key=key_of(bare, region.offset),
            offset=list(region.offset),
            size=list(region.size),
        )


def grid_files(name: str, grid: GridEntry, shape: Sequence[int]) -> dict[str, int]:
    """Return the files of a grid, each with the smallest number of elements of its blocks."""
    part, *_ = name.partition("/")
    smallest = 1
    for length, block_length in zip(shape, grid.block, strict=True):
        # The last block of a dimension has the rest of it.
        smallest *= length % block_length or block_length
    files = {}
    for index, rank in enumerate(grid.ranks):
        number = grid.number(index)
        files[f"{part}-{rank:05d}-{number:03d}.safetensors"] = smallest
    return files


def problem_of_grid(grid: GridEntry, shape: Sequence[int]) -> str | None:
    """Return the defect of a grid of a tensor of ``shape``; ``None`` if it is correct."""
    if len(grid.block) != len(shape) or not all(grid.block):
        return f"blocks of {grid.block} do not cut a tensor of shape {list(shape)}"
    wanted = math.prod(_blocks_along(grid.block, shape))
    if len(grid.ranks) != wanted or len(grid.numbers) not in (1, wanted):
        names = f"{len(grid.ranks)} ranks and {len(grid.numbers)} files"
        return f"a grid of {wanted} blocks names {names}"
    return None


def problem_of_boxes(boxes: Sequence[BoxEntry], shape: Sequence[int]) -> str | None:
    """Return the defect of boxes of a whole tensor of ``shape``; ``None`` if there is none.

    Defects are an overlap, a gap, and a box that does not lie inside the tensor.
    """
    for box in boxes:
        if not len(box.offset) == len(box.size) == len(shape):
            return f"a box of {len(box.offset)} dimensions in a tensor of {len(shape)}"
        ends = map(add, box.offset, box.size)
        is_inside = all(end <= length for end, length in zip(ends, shape, strict=True))
        if not is_inside or not all(box.size):
            return f"the box at {box.offset} of size {box.size} does not lie inside {list(shape)}"
    # Cut at every border of every box: then each cell lies in a box as a whole or not at all, and
    # can be counted.
    cuts = []
    for axis, length in enumerate(shape):
        starts = [box.offset[axis] for box in boxes]
        stops = [box.offset[axis] + box.size[axis] for box in boxes]
        cuts.append(np.unique([0, length, *starts, *stops]))
    cells = [len(borders) - 1 for borders in cuts]
    if math.prod(cells) > LARGEST_CUT:
        return f"{len(boxes)} boxes cut the tensor into {math.prod(cells)} cells; refused"
    covered = np.zeros(cells, dtype=np.int32)
    for box in boxes:
        inside = []
        for borders, start, size in zip(cuts, box.offset, box.size, strict=True):
            first, last = np.searchsorted(borders, [start, start + size])
            inside.append(slice(int(first), int(last)))
        covered[tuple(inside)] += 1
    wrong = np.argwhere(covered != 1)
    if not len(wrong):
        return None
    first_wrong = wrong[0]
    at = [int(cuts[axis][index]) for axis, index in enumerate(first_wrong)]
    problem = "overlap" if covered[tuple(first_wrong)] else "leave a gap"
    return f"boxes {problem} at {at}"
