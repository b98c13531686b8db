"""A save proves itself: what is written is what the model computes with, and the files return
it bit for bit.

A strategy tells the core which numbers belong to which name. One that is wrong about it, such as a
backend that orders a buffer otherwise than it says, would write whole and valid checkpoints of
other weights. The module itself has the weights by name, too: the first save of a run, and of a
resumed one, compares both before it commits anything.
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
    """Raise CheckpointError if ``state`` has another weight than the model under the same name.

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
    """Raise CheckpointError if a file, just written, does not return ``tensors`` bit for bit."""
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


def _pairs(
    saved: Sequence[Part], in_model: Part | Sequence[Box]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements of a tensor that this rank both saves and computes with, each from both.

    ``saved`` are the parts that it saves, ``in_model`` is what it computes with.
    """
    if isinstance(in_model, Tensor):
        local = _local(in_model)
        joined = _joined(saved, local)
        if joined is not None:
            yield joined, local
            return
    for computed in parts_of(in_model):
        for part in saved:
            pair = _same_elements(part, computed)
            if pair is not None:
                yield pair


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _joined(saved: Sequence[Part], local: Tensor) -> Tensor | None:
    """Return the boxes of a tensor that is split over ranks, side by side as in ``local``.

    ``None`` where the parts are no such boxes. Where a rank's share belongs in the whole,
    only the strategy knows.
    """
    boxes = [part.values for part in saved if isinstance(part, Box)]
    has_other_parts = len(boxes) != len(saved)
    if not boxes or has_other_parts or tuple(saved[0].shape) == tuple(local.shape):
        return None
    for dimension in range(local.dim()):
        other_sizes = _sizes_without(local, dimension)
        fit = all(_sizes_without(box, dimension) == other_sizes for box in boxes)
        if fit and sum(box.shape[dimension] for box in boxes) == local.shape[dimension]:
            return boxes[0] if len(boxes) == 1 else torch.cat(boxes, dimension)
    return None


def _sizes_without(tensor: Tensor, dimension: int) -> list[int]:
    """Return the sizes of all dimensions but one."""
    return [size for axis, size in enumerate(tensor.shape) if axis != dimension]


def _same_elements(saved: Part, computed: Part) -> tuple[Tensor, Tensor] | None:
    """Return the elements that both parts of one tensor have, as each has them; ``None``: none."""
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
        end = saved.start + saved.values.numel()
        return saved.values, computed.reshape(-1)[saved.start : end]
    return saved.values, computed[_slices(saved)]


def _piece_of(tensor: Any) -> Piece | None:
    """Return this rank's shard of a DTensor; ``None`` unless the first dimension is cut."""
    from distcore.distributed.dtensors import local_part

    try:
        local, start = local_part(tensor)
    except ValueError:
        return None
    return Piece(local.reshape(-1), start, tuple(tensor.shape))


def _overlap(saved: Piece, computed: Piece) -> tuple[Tensor, Tensor] | None:
    """Return the elements that both pieces of a flattened tensor have; ``None``: there are none."""
    start = max(saved.start, computed.start)
    saved_end = saved.start + saved.values.numel()
    computed_end = computed.start + computed.values.numel()
    count = min(saved_end, computed_end) - start
    if count <= 0:
        return None
    from_saved = saved.values.reshape(-1).narrow(0, start - saved.start, count)
    from_computed = computed.values.reshape(-1).narrow(0, start - computed.start, count)
    return from_saved, from_computed


def _slices(box: Box) -> tuple[slice, ...]:
    """Return the indices of a box in the whole tensor."""
    ranges = zip(box.offset, box.values.shape, strict=True)
    return tuple(slice(first, first + size) for first, size in ranges)


def _is_same(saved: Tensor, computed: Tensor) -> bool:
    """Return True if ``saved``, rounded to the dtype of ``computed``, has the same bits.

    Shapes may differ.
    """
    saved = saved.detach()
    if saved.data_ptr() == computed.data_ptr() and saved.dtype == computed.dtype:
        return saved.numel() == computed.numel()  # the module's own memory
    rounded = saved.to(device=computed.device, dtype=computed.dtype)
    # As bytes: a NaN is not equal to itself, and -0.0 is equal to 0.0.
    return torch.equal(_bytes(rounded), _bytes(computed))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first_difference(saved: Tensor, computed: Tensor) -> str:
    """Return the numbers of the first difference, for an error line; empty if there is none.

    If only one of both has fractions or is complex, return both dtypes instead.
    """
    saved_kind = saved.is_floating_point(), saved.is_complex()
    computed_kind = computed.is_floating_point(), computed.is_complex()
    if saved_kind != computed_kind:
        return f" (of {saved.dtype}, where the model has {computed.dtype})"
    wide = torch.complex128 if computed.is_complex() else torch.float64
    # Rounded to the dtype of the model first, as a load rounds it.
    rounded = saved.detach().to(computed.dtype)
    saved_values = rounded.to(wide).cpu().reshape(-1)
    computed_values = computed.detach().to(wide).cpu().reshape(-1)
    total = len(saved_values)
    if total != len(computed_values):
        return ""
    differing = (saved_values != computed_values).nonzero()
    if not len(differing):
        return ""
    at = int(differing[0])
    number, other = saved_values[at].item(), computed_values[at].item()
    return f" ({len(differing)} of {total} numbers, such as {number:.6g} in place of {other:.6g})"
