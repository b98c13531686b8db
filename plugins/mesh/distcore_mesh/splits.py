"""Split tensors in checkpoints: of each the boxes that this rank holds, whatever else shards it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distcore import Box, Piece, Run, SavedState, State, Values, defaults, dtensors


@dataclass(frozen=True)
class Split:
    """How a tensor is split over the ranks of a tensor-parallel group: evenly, along one dimension."""

    dimension: int
    """The dimension that is split."""
    parts: int
    """Equal parts of it, such as query, key and value, of each of which a rank has its share."""
    shape: tuple[int, ...]
    """Shape of the whole."""

    def part_of(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return what ``rank`` of ``ranks`` holds, as a tensor of its own."""
        pieces = [part.chunk(ranks, self.dimension)[rank] for part in whole.chunk(self.parts, self.dimension)]
        return torch.cat(pieces, self.dimension).contiguous()

    def shape_of_part(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of what each of ``ranks`` holds."""
        own = list(self.shape)
        own[self.dimension] //= ranks
        return tuple(own)

    def boxes(self, rank: int, ranks: int, first: int, rows: int) -> Iterator[tuple[slice, ...]]:
        """Yield, in the whole, the boxes that make ``rows`` rows of what a rank holds, from its row ``first`` on.

        A row is an element of the first dimension. In their order the boxes follow each other in those rows along the
        dimension that is split.
        """
        whole = self.shape[self.dimension] // self.parts
        share = whole // ranks
        for part in range(self.parts):
            start, stop = part * share, (part + 1) * share  # in what the rank holds
            moved = part * whole + rank * share - start
            limits = [slice(first, first + rows), *(slice(0, length) for length in self.shape[1:])]
            if self.dimension == 0:
                start, stop = max(start, first), min(stop, first + rows)
            limits[self.dimension] = slice(start + moved, stop + moved)
            if start < stop:
                yield tuple(limits)


@dataclass(frozen=True)
class Layout:
    """How a model is split, and which part of it this rank has."""

    splits: dict[str, Split]
    """By the name of the parameter."""
    rank: int
    """This rank's number in its tensor-parallel group."""
    ranks: int
    """Size of that group."""
    replica: bool = False
    """Whether another rank of the data shard holds the same part."""
    of_stage: frozenset[str] = frozenset()
    """Parameters that only the ranks of one pipeline stage hold."""
    is_first_of_stage: bool = True
    """Whether this rank is the first of those."""

    def of(self, name: str, tensor: Tensor) -> Split | None:
        """Return how an entry of the state is split: a parameter, or a moment of its shape; ``None`` if it is not."""
        split = self.splits.get(_parameter_of(name))
        if split is None or name.startswith("model/"):
            return split
        return split if tuple(tensor.shape) == split.shape_of_part(self.ranks) else None

    def save(self, run: Run) -> State:
        """Return what this rank holds of the model and of the optimizer's state, by neutral name."""
        state: State = {}
        for name, tensor in (defaults.model_state(run) | defaults.optimizer_state(run)).items():
            if dtensors.is_empty(tensor):
                continue
            split = self.of(name, tensor)
            state[name] = self._held(name, tensor.detach()) if split is None else self._boxes(tensor.detach(), split)
        return state

    @torch.no_grad()
    def load(self, run: Run, state: SavedState) -> bool:
        """Read this rank's part of every tensor; always true."""
        for name, tensor in defaults.model_state(run).items():
            self._fill(tensor, name, state, self.of(name, tensor))
        if run.optimizer is not None:
            defaults.load_optimizer(run, state, self._optimizer_tensor)
        return True

    @torch.no_grad()
    def replay(self, model: nn.Module, values: Values) -> None:
        """Give the parameters of ``model`` this rank's part of ``values``; of a split one, the rows that it is in."""
        own = dict(model.named_parameters())
        runs = {name: self._run(name, parameter) for name, parameter in own.items()}
        for name, drawn in values(lambda name: runs.get(name, (0, 0))):
            if name in own:
                local, _ = dtensors.local_part(own[name])
                local.copy_(self._cut(name, own[name], drawn).view_as(local))
            del drawn  # before the next one is drawn

    def _run(self, name: str, parameter: Tensor) -> tuple[int, int]:
        """Return the run of elements, in the flattened whole, that has in it all that this rank holds."""
        if name not in self.splits:
            local, start = dtensors.local_part(parameter)
            return start, local.numel()
        boxes, row = self._boxes_of(name, parameter), prod(self.splits[name].shape[1:])
        first, stop = min((box[0].start for box in boxes), default=0), max((box[0].stop for box in boxes), default=0)
        return first * row, (stop - first) * row

    def _cut(self, name: str, parameter: Tensor, run: Tensor) -> Tensor:
        """Return what this rank holds, out of that run."""
        split, boxes = self.splits.get(name), self._boxes_of(name, parameter)
        if split is None or not boxes:
            return run
        rows, first = run.view(-1, *split.shape[1:]), min(box[0].start for box in boxes)
        parts = [rows[box[0].start - first : box[0].stop - first][:, *box[1:]] for box in boxes]
        return torch.cat(parts, split.dimension)

    def _boxes_of(self, name: str, parameter: Tensor) -> list[tuple[slice, ...]]:
        if name not in self.splits:
            return []
        local, first = _rows(parameter)
        return list(self.splits[name].boxes(self.rank, self.ranks, first, len(local)))

    def _optimizer_tensor(self, parameter: Tensor, name: str, state: SavedState) -> Tensor:
        split = self.of(name, parameter)
        whole = tuple(parameter.shape) if split is None else split.shape
        if name.endswith("/step") or state.shape(name) != whole:
            return state[name]
        moment = torch.zeros_like(parameter, requires_grad=False)
        self._fill(moment, name, state, split)
        return moment

    def _fill(self, target: Tensor, name: str, state: SavedState, split: Split | None) -> None:
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
        else:
            defaults.load_whole(target, name, state)

    def _held(self, name: str, tensor: Tensor) -> Tensor | Piece:
        """Return a tensor that is not split: the same on every rank of the group."""
        held = dtensors.held(tensor)
        if isinstance(held, Piece):
            return replace(held, replica=held.replica or self.rank > 0 or self.replica)
        if _parameter_of(name) not in self.of_stage:
            return held
        return Piece(held.reshape(-1), 0, tuple(held.shape), replica=not self.is_first_of_stage)

    def _boxes(self, tensor: Tensor, split: Split) -> list[Box]:
        local, first = _rows(tensor)
        found, at, replica = [], 0, self.replica or dtensors.is_replica(tensor)
        for box in split.boxes(self.rank, self.ranks, first, len(local)):
            length = box[split.dimension].stop - box[split.dimension].start
            values = local.narrow(split.dimension, at, length)
            found.append(Box(values, tuple(s.start for s in box), split.shape, replica=replica))
            at += length
        return found


def _parameter_of(name: str) -> str:
    """Return the parameter that an entry of the state belongs to, or the buffer."""
    kind, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the rows that this rank holds of a tensor that may be a DTensor, and the number of the first."""
    local, start = dtensors.local_part(tensor)
    return local, start // prod(tensor.shape[1:])
