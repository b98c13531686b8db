"""The part of each tensor that this rank holds, as boxes of the whole tensor: to save,
load and initialize it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distcore import Box, Piece, Run, SavedState, State, WeightStream, defaults, dtensors


@dataclass(frozen=True)
class TensorSplit:
    """An even split of a tensor along one dimension, over the ranks of a tensor-parallel group."""

    dimension: int
    """The dimension that is split."""
    parts: int
    """Equal parts along that dimension, such as query, key and value. Each rank has its
    share of each part.
    """
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    def part_of(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of the part of ``rank``."""
        pieces = [
            part.chunk(ranks, self.dimension)[rank]
            for part in whole.chunk(self.parts, self.dimension)
        ]
        return torch.cat(pieces, self.dimension).contiguous()

    def shape_of_part(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of each rank's part."""
        own = list(self.shape)
        own[self.dimension] //= ranks
        return tuple(own)

    def boxes(self, rank: int, ranks: int, first: int, rows: int) -> Iterator[tuple[slice, ...]]:
        """Yield the boxes of the whole tensor that make up ``rows`` rows of a rank's part, from
        its row ``first`` on.

        A row is an element of the first dimension. Concatenated in this order along the split
        dimension, the boxes are those rows.
        """
        whole = self.shape[self.dimension] // self.parts
        share = whole // ranks
        for part in range(self.parts):
            start, stop = part * share, (part + 1) * share  # in the rank's part
            moved = part * whole + rank * share - start
            limits = [slice(first, first + rows), *(slice(0, length) for length in self.shape[1:])]
            if self.dimension == 0:
                start, stop = max(start, first), min(stop, first + rows)
            limits[self.dimension] = slice(start + moved, stop + moved)
            if start < stop:
                yield tuple(limits)


@dataclass(frozen=True)
class TensorLayout:
    """The splits of a model's tensors, and this rank's place in them."""

    splits: dict[str, TensorSplit]
    """The split of each parameter that is split, by name."""
    rank: int
    """This rank's number in its tensor-parallel group."""
    ranks: int
    """Size of that group."""
    replica: bool = False
    """True if another rank of the data shard saves the same part."""
    of_stage: frozenset[str] = frozenset()
    """Parameters that only the ranks of one pipeline stage hold."""
    is_first_of_stage: bool = True
    """True if this rank is the first one of its stage."""

    def split_of(self, name: str, tensor: Tensor) -> TensorSplit | None:
        """Return the split of an entry of the state: a parameter, or a moment of its
        shape. ``None``: not split.
        """
        split = self.splits.get(_parameter_of(name))
        if split is None or name.startswith("model/"):
            return split
        return split if tuple(tensor.shape) == split.shape_of_part(self.ranks) else None

    def save(self, run: Run) -> State:
        """Return this rank's part of the model and of the optimizer's state, by neutral name."""
        state: State = {}
        for name, tensor in (defaults.model_state(run) | defaults.optimizer_state(run)).items():
            if dtensors.is_empty(tensor):
                continue
            split = self.split_of(name, tensor)
            state[name] = (
                self._unsplit_entry(name, tensor.detach())
                if split is None
                else self._boxes(tensor.detach(), split)
            )
        return state

    @torch.no_grad()
    def load(self, run: Run, state: SavedState) -> bool:
        """Read this rank's part of every tensor; always true."""
        for name, tensor in defaults.model_state(run).items():
            self._fill(tensor, name, state, self.split_of(name, tensor))
        if run.optimizer is not None:
            defaults.load_optimizer(run, state, self._optimizer_tensor)
        return True

    @torch.no_grad()
    def replay(self, model: nn.Module, values: WeightStream) -> None:
        """Fill the parameters of ``model`` with this rank's part of ``values``."""
        own = dict(model.named_parameters())
        intervals = {name: self._interval(name, parameter) for name, parameter in own.items()}
        for name, drawn in values(lambda name: intervals.get(name, (0, 0))):
            if name in own:
                local, _ = dtensors.local_part(own[name])
                local.copy_(self._select(name, own[name], drawn).view_as(local))
            del drawn  # before the next one is drawn

    def _interval(self, name: str, parameter: Tensor) -> tuple[int, int]:
        """Return the start and the length of an interval of the flattened whole that
        contains this rank's part.
        """
        if name not in self.splits:
            local, start = dtensors.local_part(parameter)
            return start, local.numel()
        boxes, row = self._boxes_of(name, parameter), prod(self.splits[name].shape[1:])
        first, stop = (
            min((box[0].start for box in boxes), default=0),
            max((box[0].stop for box in boxes), default=0),
        )
        return first * row, (stop - first) * row

    def _select(self, name: str, parameter: Tensor, interval: Tensor) -> Tensor:
        """Return this rank's part of the elements of its interval."""
        split, boxes = self.splits.get(name), self._boxes_of(name, parameter)
        if split is None or not boxes:
            return interval
        rows, first = interval.view(-1, *split.shape[1:]), min(box[0].start for box in boxes)
        parts = [rows[box[0].start - first : box[0].stop - first][:, *box[1:]] for box in boxes]
        # which would copy it
        return parts[0] if len(parts) == 1 else torch.cat(parts, split.dimension)

    def _boxes_of(self, name: str, parameter: Tensor) -> list[tuple[slice, ...]]:
        if name not in self.splits:
            return []
        local, first = _rows(parameter)
        return list(self.splits[name].boxes(self.rank, self.ranks, first, len(local)))

    def _optimizer_tensor(self, parameter: Tensor, name: str, state: SavedState) -> Tensor:
        split = self.split_of(name, parameter)
        whole = tuple(parameter.shape) if split is None else split.shape
        if name.endswith("/step") or state.shape(name) != whole:
            return state[name]
        moment = torch.zeros_like(parameter, requires_grad=False)
        self._fill(moment, name, state, split)
        return moment

    def _fill(
        self, target: Tensor, name: str, state: SavedState, split: TensorSplit | None
    ) -> None:
        if split is not None:
            local, first = _rows(target)
            parts = [
                state.box(name, [at.start for at in box], [at.stop - at.start for at in box])
                for box in split.boxes(self.rank, self.ranks, first, len(local))
            ]
            if parts:
                local.copy_(torch.cat(parts, split.dimension))
        elif isinstance(target, DTensor):
            dtensors.fill(target, lambda start, count: state.piece(name, start, count))
        elif _parameter_of(name) in self.of_stage:
            _fill_from_piece(target, name, state)
        else:
            defaults.load_whole(target, name, state)

    def _unsplit_entry(self, name: str, tensor: Tensor) -> Tensor | Piece:
        """Return a tensor that is not split as an entry of the state: it is the same on every
        rank of the group.
        """
        local = dtensors.local_piece(tensor)
        if isinstance(local, Piece):
            return replace(local, replica=local.replica or self.rank > 0 or self.replica)
        if _parameter_of(name) not in self.of_stage:
            return local
        return Piece(local.reshape(-1), 0, tuple(local.shape), replica=not self.is_first_of_stage)

    def _boxes(self, tensor: Tensor, split: TensorSplit) -> list[Box]:
        local, first = _rows(tensor)
        boxes, at, replica = [], 0, self.replica or dtensors.is_replica(tensor)
        for box in split.boxes(self.rank, self.ranks, first, len(local)):
            length = box[split.dimension].stop - box[split.dimension].start
            values = local.narrow(split.dimension, at, length)
            boxes.append(Box(values, tuple(s.start for s in box), split.shape, replica=replica))
            at += length
        return boxes


def _fill_from_piece(target: Tensor, name: str, state: SavedState) -> None:
    """Read a tensor that this stage alone holds as the piece that it saves.

    Asking for the whole tensor in the memory of the ranks would gather it, while other
    stages gather other tensors.
    """
    if state.shape(name) != tuple(target.shape):
        defaults.load_whole(target, name, state)  # which refuses it
    target.copy_(state.piece(name, 0, target.numel()).view_as(target))


def _parameter_of(name: str) -> str:
    """Return the name of the parameter, or the buffer, that an entry of the state belongs to."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor or DTensor, and the number of the first one."""
    local, start = dtensors.local_part(tensor)
    return local, start // prod(tensor.shape[1:])
