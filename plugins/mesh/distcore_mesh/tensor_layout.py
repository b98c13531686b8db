"""The part of each tensor that this rank holds, as boxes of the whole: to save, load and fill."""

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
    """Equal parts along that dimension, such as query, key and value.

    Each rank has its share of each part.
    """
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    def part_of(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of the part of ``rank``."""
        parts = whole.chunk(self.parts, self.dimension)
        shares = [part.chunk(ranks, self.dimension)[rank] for part in parts]
        return torch.cat(shares, self.dimension).contiguous()

    def shape_of_part(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of each rank's part."""
        shape = list(self.shape)
        shape[self.dimension] //= ranks
        return tuple(shape)

    def boxes(self, rank: int, ranks: int, first: int, rows: int) -> Iterator[tuple[slice, ...]]:
        """Yield the boxes of the whole tensor that make up some rows of a rank's part.

        These are ``rows`` rows from the rank's row ``first`` on; a row is an element of the first
        dimension. Concatenated in this order along the split dimension, the boxes are those rows.
        """
        part_length = self.shape[self.dimension] // self.parts
        share_length = part_length // ranks
        for part in range(self.parts):
            # Along the split dimension: the share's limits in the rank's part, and the distance
            # to its position in the whole tensor.
            start = part * share_length
            stop = start + share_length
            offset = part * part_length + rank * share_length - start
            if self.dimension == 0:
                start = max(start, first)
                stop = min(stop, first + rows)
            if start < stop:
                limits = [slice(first, first + rows)]
                limits += [slice(0, length) for length in self.shape[1:]]
                limits[self.dimension] = slice(start + offset, stop + offset)
                yield tuple(limits)


@dataclass(frozen=True)
class TensorLayout:
    """The splits of a model's tensors, and this rank's part of them."""

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
    experts: frozenset[str] = frozenset()
    """Parameters in ``splits`` that are split over the ranks that share experts."""
    place_of_experts: tuple[int, int] = (0, 1)
    """This rank's number among these ranks, and how many they are."""

    def with_experts(self, splits: dict[str, TensorSplit], place: tuple[int, int]) -> TensorLayout:
        """Return the layout with the splits of experts, and this rank's place among their ranks."""
        return replace(
            self,
            splits=self.splits | splits,
            experts=frozenset(splits),
            place_of_experts=place,
        )

    def place(self, parameter: str) -> tuple[int, int]:
        """Return this rank's number in the group that a parameter is split over, and its size."""
        if parameter in self.experts:
            return self.place_of_experts
        return self.rank, self.ranks

    def split_of(self, name: str, tensor: Tensor) -> TensorSplit | None:
        """Return the split of an entry of the state; ``None``: it is not split.

        The entry is a parameter, or a moment; a moment of another shape than its parameter's is
        not split.
        """
        parameter = _parameter_of(name)
        split = self.splits.get(parameter)
        if split is None or name.startswith("model/"):
            return split
        _, ranks = self.place(parameter)
        return split if tuple(tensor.shape) == split.shape_of_part(ranks) else None

    def save(self, run: Run) -> State:
        """Return this rank's part of the model and of the optimizer's state, by neutral name."""
        state: State = {}
        tensors = defaults.model_state(run) | defaults.optimizer_state(run)
        for name, tensor in tensors.items():
            if dtensors.is_empty(tensor):
                continue
            split = self.split_of(name, tensor)
            if split is None:
                state[name] = self._unsplit_entry(name, tensor.detach())
            else:
                state[name] = self._boxes(name, tensor.detach(), split)
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
        parameters = dict(model.named_parameters())
        intervals = {name: self._interval(name, value) for name, value in parameters.items()}
        for name, drawn in values(lambda name: intervals.get(name, (0, 0))):
            if name in parameters:
                local, _ = dtensors.local_part(parameters[name])
                local.copy_(self._select(name, parameters[name], drawn).view_as(local))
            # Before the next one is drawn: two would be in memory.
            del drawn

    def _interval(self, name: str, parameter: Tensor) -> tuple[int, int]:
        """Return start and length of an interval of the flattened whole with this rank's part."""
        if name not in self.splits:
            local, start = dtensors.local_part(parameter)
            return start, local.numel()
        boxes = self._boxes_of(name, parameter)
        row_size = prod(self.splits[name].shape[1:])
        first = min((box[0].start for box in boxes), default=0)
        stop = max((box[0].stop for box in boxes), default=0)
        return first * row_size, (stop - first) * row_size

    def _select(self, name: str, parameter: Tensor, interval: Tensor) -> Tensor:
        """Return this rank's part of the elements of its interval."""
        split = self.splits.get(name)
        boxes = self._boxes_of(name, parameter)
        if split is None or not boxes:
            return interval
        rows = interval.view(-1, *split.shape[1:])
        first = min(box[0].start for box in boxes)
        parts = []
        for box in boxes:
            rows_of_box = rows[box[0].start - first : box[0].stop - first]
            parts.append(rows_of_box[:, *box[1:]])
        if len(parts) == 1:
            # Not joined, which would copy it.
            return parts[0]
        return torch.cat(parts, split.dimension)

    def _boxes_of(self, name: str, parameter: Tensor) -> list[tuple[slice, ...]]:
        """Return the boxes of this rank's part of a split parameter; none of another one."""
        if name not in self.splits:
            return []
        local, first = _rows(parameter)
        boxes = self.splits[name].boxes(*self.place(name), first, len(local))
        return list(boxes)

    def _optimizer_tensor(self, parameter: Tensor, name: str, state: SavedState) -> Tensor:
        """Return this rank's part of a moment of ``parameter``, or the whole of another tensor."""
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
        """Read this rank's part of an entry of the state into ``target``."""
        if split is not None:
            local, first = _rows(target)
            place = self.place(_parameter_of(name))
            parts = []
            for box in split.boxes(*place, first, len(local)):
                starts = [limits.start for limits in box]
                lengths = [limits.stop - limits.start for limits in box]
                parts.append(state.box(name, starts, lengths))
            if parts:
                local.copy_(torch.cat(parts, split.dimension))
        elif isinstance(target, DTensor):
            dtensors.fill(target, lambda start, count: state.piece(name, start, count))
        elif _parameter_of(name) in self.of_stage:
            _fill_from_piece(target, name, state)
        else:
            defaults.load_whole(target, name, state)

    def _unsplit_entry(self, name: str, tensor: Tensor) -> Tensor | Piece:
        """Return a tensor that is the same on every rank of the group as an entry of the state."""
        local = dtensors.local_piece(tensor)
        if isinstance(local, Piece):
            return replace(local, replica=local.replica or self.rank > 0 or self.replica)
        if _parameter_of(name) not in self.of_stage:
            return local
        # The same on all ranks of a stage: one of them writes it.
        is_replica = not self.is_first_of_stage
        return Piece(local.reshape(-1), 0, tuple(local.shape), replica=is_replica)

    def _boxes(self, name: str, tensor: Tensor, split: TensorSplit) -> list[Box]:
        """Return this rank's part of a split tensor as an entry of the state."""
        local, first = _rows(tensor)
        place = self.place(_parameter_of(name))
        is_replica = self.replica or dtensors.is_replica(tensor)
        boxes = []
        position = 0
        for box in split.boxes(*place, first, len(local)):
            length = box[split.dimension].stop - box[split.dimension].start
            values = local.narrow(split.dimension, position, length)
            starts = tuple(limits.start for limits in box)
            boxes.append(Box(values, starts, split.shape, replica=is_replica))
            position += length
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
