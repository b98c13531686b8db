"""A save proves itself: what is written is what the model computes with, and the files return
it bit for bit.

A strategy tells the core which numbers belong to which name. One that is wrong about it, such
as a backend that orders a buffer otherwise than it says, would write whole and valid checkpoints of
other weights. The module itself has the
weights by name, too: the first save of a run, and of a resumed one, compares both
before it commits anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distcore.distributed.local_state import Part, parts_of
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.defaults import model_state
from distcore.plugin.strategy.state import Box, Piece, State


def check_is_model(run: Run, state: State, computed_weights: Callable[[Run], State]) -> None:
    """Raise CheckpointError if this rank's part of ``state`` has another weight than the model
    has under its name.

    Compared is what this rank holds, with the module's own tensors or, where an engine computes
    with others, with those that ``computed_weights`` returns. Nothing is gathered.
    """
    elsewhere = computed_weights(run)
    for name, tensor in model_state(run).items():
        if name not in state:
            continue
        held = elsewhere.get(name, tensor.detach())
        for saved, computed in _pairs(parts_of(state[name]), held):
            if not _is_same(saved, computed):
                raise CheckpointError(
                    f"{name.partition('/')[2]!r}: the weight that strategy {run.config.strategy!r}"
                    " saves is not the one that the model computes"
                    f" with{_first_difference(saved, computed)}; nothing is committed. Another"
                    " --strategy can save this model; please report it with the strategy's options"
                )


def check_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the file at ``path``, just written, does not return ``tensors``, by
    key, bit for bit.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for key, written in tensors.items():
                stored = file.get_tensor(key)
                if stored.shape != written.shape or not _is_same(written, stored):
                    raise CheckpointError(
                        f"{path.name}: {key!r} is read back with other values than were written"
                    )
    except SafetensorError as error:
        raise CheckpointError(f"{path.name}: cannot be read back: {error}") from None


def _pairs(saved: Sequence[Part], held: Part | Sequence[Box]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield elements that this rank saves, and the same ones as it computes with them,
    where it holds both.
    """
    if isinstance(held, Tensor) and (joined := _joined(saved, _local(held))) is not None:
        yield joined, _local(held)
        return
    for computed in parts_of(held):
        for part in saved:
            pair = _same_elements(part, computed)
            if pair is not None:
                yield pair


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _joined(saved: Sequence[Part], local: Tensor) -> Tensor | None:
    """Return the boxes of a tensor that is split over ranks, side by side as a rank
    holds them in ``local``.

    ``None`` where the parts are no such boxes. Where a rank's share belongs in the whole,
    only the strategy knows.
    """
    boxes = [part.values for part in saved if isinstance(part, Box)]
    if not boxes or len(boxes) != len(saved) or tuple(saved[0].shape) == tuple(local.shape):
        return None
    for dimension in range(local.dim()):
        others = [size for axis, size in enumerate(local.shape) if axis != dimension]
        fit = all(
            [size for axis, size in enumerate(box.shape) if axis != dimension] == others
            for box in boxes
        )
        if fit and sum(box.shape[dimension] for box in boxes) == local.shape[dimension]:
            return boxes[0] if len(boxes) == 1 else torch.cat(boxes, dimension)
    return None


def _same_elements(saved: Part, computed: Part) -> tuple[Tensor, Tensor] | None:
    """Return the elements that both parts of one tensor have, as each has them; ``None`` if there
    are none to tell.
    """
    if tuple(computed.shape) != tuple(saved.shape):
        return None
    if hasattr(computed, "to_local"):
        computed = _piece_of(computed)  # type: ignore[assignment]
    if isinstance(computed, Piece):
        return _overlap(saved, computed) if isinstance(saved, Piece) else None
    if not isinstance(computed, Tensor):
        return None
    if isinstance(saved, Tensor):
        return saved, computed
    if isinstance(saved, Piece):
        return saved.values, computed.reshape(-1)[saved.start : saved.start + saved.values.numel()]
    return saved.values, computed[_slices(saved)]


def _piece_of(tensor: Any) -> Piece | None:
    """Return this rank's shard of a DTensor; ``None`` if it is not sharded
    along the first dimension.
    """
    from distcore.distributed.dtensors import local_part

    try:
        local, start = local_part(tensor)
    except ValueError:
        return None
    return Piece(local.reshape(-1), start, tuple(tensor.shape))


def _overlap(saved: Piece, computed: Piece) -> tuple[Tensor, Tensor] | None:
    start = max(saved.start, computed.start)
    count = (
        min(saved.start + saved.values.numel(), computed.start + computed.values.numel()) - start
    )
    if count <= 0:
        return None
    first, second = (
        each.values.reshape(-1).narrow(0, start - each.start, count) for each in (saved, computed)
    )
    return first, second


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(first, first + size) for first, size in zip(box.offset, box.values.shape, strict=True)
    )


def _is_same(saved: Tensor, computed: Tensor) -> bool:
    """Return True if ``saved``, rounded to the dtype of ``computed``, has the same
    bits; shapes may differ.
    """
    saved = saved.detach()
    if saved.data_ptr() == computed.data_ptr() and saved.dtype == computed.dtype:
        return saved.numel() == computed.numel()  # the module's own memory
    return torch.equal(
        _bytes(saved.to(device=computed.device, dtype=computed.dtype)), _bytes(computed)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first_difference(saved: Tensor, computed: Tensor) -> str:
    """Return the dtypes if only one has fractions or is complex, else both numbers of the
    first difference, if any.
    """
    if (saved.is_floating_point(), saved.is_complex()) != (
        computed.is_floating_point(),
        computed.is_complex(),
    ):
        return f" (of {saved.dtype}, where the model has {computed.dtype})"
    wide = torch.complex128 if computed.is_complex() else torch.float64
    ours, theirs = (
        each.detach().to(wide).cpu().reshape(-1) for each in (saved.to(computed.dtype), computed)
    )
    if len(ours) != len(theirs) or not len(differing := (ours != theirs).nonzero()):
        return ""
    at = int(differing[0])
    mine, other = ours[at].item(), theirs[at].item()
    return f" ({len(differing)} of {len(ours)} numbers, such as {mine:.6g} in place of {other:.6g})"
