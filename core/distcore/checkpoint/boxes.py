"""Boxes in a checkpoint: parts of a tensor by offset and size in each dimension, and
regular grids of them.

A tensor that is sharded over a mesh of ranks is a grid of boxes. A grid is one entry of
the manifest, however many
ranks wrote it: the block size, and the writing rank of each block in
row-major order. See docs/checkpoint-format.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**48)]
FileName = Annotated[
    str, Field(pattern=r"^((model|optimizer|ema)-[0-9]{5}-[0-9]{3}\.safetensors|state\.json)$")
]
Extent = Annotated[list[Count], Field(min_length=1, max_length=16)]
LARGEST_CUT = 2**24
"""Cells into which the cuts of irregular boxes may divide a tensor;
more is refused, not counted.
"""


class Region(NamedTuple):
    """A box without its values: index of its first element, and number of
    elements, in each dimension.
    """

    offset: tuple[int, ...]
    """Index of the first element, in each dimension."""
    size: tuple[int, ...]
    """Number of elements, in each dimension."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """The region as indices of a tensor whose first element has the index
        ``origin`` of the whole.
        """
        return tuple(
            slice(o - a, o - a + n) for o, a, n in zip(self.offset, origin, self.size, strict=True)
        )

    def overlap(self, other: Region) -> Region | None:
        """Return the intersection of two regions; ``None`` if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(end - start for end, start in zip(ends, offset, strict=True))
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
        """Where it lies in the whole tensor."""
        return Region(tuple(self.offset), tuple(self.size))


class GridEntry(Entry):
    """Boxes that cut every dimension at multiples of ``block``, in row-major order; those at an
    end may be smaller.

    Block ``i`` is the tensor ``NAME@offset,offset…`` in the file ``PART-RRRRR-NNN.safetensors``,
    where ``RRRRR`` is ``ranks[i]`` and ``NNN`` is ``numbers[i]``, or ``numbers[0]`` where all are
    alike.
    """

    block: Extent
    """Number of elements of a block, in each dimension."""
    ranks: list[Annotated[int, Field(ge=0, lt=100_000)]]
    """For each block, the rank that wrote its file."""
    numbers: Annotated[list[Annotated[int, Field(ge=0, lt=1_000)]], Field(min_length=1)]
    """File number of each block among the files of its rank; a single number
    holds for every block.
    """


def key_of(bare: str, offset: Iterable[int]) -> str:
    """Return the name in its file for the box of tensor ``bare`` that begins at ``offset``."""
    return f"{bare}@{','.join(map(str, offset))}"


def grid_of(boxes: Sequence[BoxEntry], shape: Sequence[int]) -> GridEntry | None:
    """Return the grid that ``boxes``, sorted by offset, make of a tensor of ``shape``; ``None``
    if they make none.
    """
    cuts = [sorted({box.offset[axis] for box in boxes}) for axis in range(len(shape))]
    block = [at[1] if len(at) > 1 else length for at, length in zip(cuts, shape, strict=True)]
    if len(boxes) != math.prod(map(len, cuts)) or not all(block):
        return None
    for box, region in zip(boxes, grid_regions(block, shape), strict=False):
        if box.region != region:
            return None
    files = [box.file.removesuffix(".safetensors").split("-") for box in boxes]
    numbers = [int(number) for _, _, number in files]
    alike = numbers[:1] if len(set(numbers)) == 1 else numbers
    whole = sum(box.region.elements for box in boxes) == math.prod(shape)
    return (
        GridEntry(block=block, ranks=[int(rank) for _, rank, _ in files], numbers=alike)
        if whole
        else None
    )


def grid_regions(block: Sequence[int], shape: Sequence[int]) -> Iterator[Region]:
    """Every block of a grid, in row-major order."""
    starts = [range(0, length, step) for length, step in zip(shape, block, strict=True)]
    for offset in product(*starts):
        yield Region(
            offset, tuple(min(n, s - o) for o, n, s in zip(offset, block, shape, strict=True))
        )


def grid_boxes(
    name: str, grid: GridEntry, shape: Sequence[int], wanted: Region
) -> Iterator[BoxEntry]:
    """The blocks of a grid that share an element with ``wanted``; the others
    are not even counted.
    """
    part, _, bare = name.partition("/")
    counts = [-(-length // step) for length, step in zip(shape, grid.block, strict=True)]
    touched = [
        range(start // step, -(-(start + size) // step))
        for start, size, step in zip(wanted.offset, wanted.size, grid.block, strict=True)
    ]
    for place in product(*touched):
        index = 0
        for at, count in zip(place, counts, strict=True):
            index = index * count + at
        offset = [at * step for at, step in zip(place, grid.block, strict=True)]
        size = [
            min(step, length - at)
            for at, step, length in zip(offset, grid.block, shape, strict=True)
        ]
        number = grid.numbers[index] if len(grid.numbers) > 1 else grid.numbers[0]
        file = f"{part}-{grid.ranks[index]:05d}-{number:03d}.safetensors"
        yield BoxEntry(file=file, key=key_of(bare, offset), offset=offset, size=size)


def grid_files(name: str, grid: GridEntry, shape: Sequence[int]) -> dict[str, int]:
    """Return the files of a grid, each with the smallest number of elements of its blocks."""
    part = name.partition("/")[0]
    smallest = math.prod(
        length % step or step for length, step in zip(shape, grid.block, strict=True)
    )
    numbers = grid.numbers if len(grid.numbers) > 1 else grid.numbers * len(grid.ranks)
    pairs = set(zip(grid.ranks, numbers, strict=True))
    return {f"{part}-{rank:05d}-{number:03d}.safetensors": smallest for rank, number in pairs}


def problem_of_grid(grid: GridEntry, shape: Sequence[int]) -> str | None:
    """Return the defect of a grid of a tensor of ``shape``; ``None`` if it is correct."""
    if len(grid.block) != len(shape) or not all(grid.block):
        return f"blocks of {grid.block} do not cut a tensor of shape {list(shape)}"
    wanted = math.prod(-(-length // step) for length, step in zip(shape, grid.block, strict=True))
    if len(grid.ranks) != wanted or len(grid.numbers) not in (1, wanted):
        return (
            f"a grid of {wanted} blocks names {len(grid.ranks)} ranks and {len(grid.numbers)} files"
        )
    return None


def problem_of_boxes(boxes: Sequence[BoxEntry], shape: Sequence[int]) -> str | None:
    """Return the defect of boxes of a whole tensor of ``shape``: overlap, gap, excess; ``None``
    if there is none.
    """
    for box in boxes:
        if len(box.offset) != len(shape) or len(box.size) != len(shape):
            return f"a box of {len(box.offset)} dimensions in a tensor of {len(shape)}"
        if any(
            o + n > length for o, n, length in zip(box.offset, box.size, shape, strict=True)
        ) or not all(box.size):
            return f"the box at {box.offset} of size {box.size} does not lie inside {list(shape)}"
    # Cut at every border of every box: then each cell lies in a box as a whole or not at all, and
    # can be counted.
    cuts = [
        np.unique(
            [
                0,
                length,
                *(b.offset[axis] for b in boxes),
                *(b.offset[axis] + b.size[axis] for b in boxes),
            ]
        )
        for axis, length in enumerate(shape)
    ]
    cells = [len(at) - 1 for at in cuts]
    if math.prod(cells) > LARGEST_CUT:
        return f"{len(boxes)} boxes cut the tensor into {math.prod(cells)} cells; refused"
    covered = np.zeros(cells, dtype=np.int32)
    for box in boxes:
        ends = (o + n for o, n in zip(box.offset, box.size, strict=True))
        first = [int(np.searchsorted(at, o)) for at, o in zip(cuts, box.offset, strict=True)]
        last = [int(np.searchsorted(at, end)) for at, end in zip(cuts, ends, strict=True)]
        covered[tuple(slice(a, b) for a, b in zip(first, last, strict=True))] += 1
    wrong = np.argwhere(covered != 1)
    if not len(wrong):
        return None
    at = [int(cuts[axis][index]) for axis, index in enumerate(wrong[0])]
    return f"boxes {'overlap' if covered[tuple(wrong[0])] else 'leave a gap'} at {at}"
