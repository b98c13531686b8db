"""A save proves itself: what is written is what the model computes with, and the files return it bit for bit.

A strategy tells the core which numbers belong to which name. One that is wrong about it, such as a backend that orders
a buffer otherwise than it says, would write whole and valid checkpoints of other weights. The module itself has the
weights by name, too: the first save of a run, and of a resumed one, compares both before it commits anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distcore.distributed.local_state import Part, parts_of
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.defaults import model_state
from distcore.plugin.strategy.state import Box, Piece, State


def check_is_model(run: Run, state: State) -> None:
    """Raise CheckpointError if this rank's part of ``state`` has another weight than the module has under its name.

    Compared are the weights of which the module has the whole, or a shard along the first dimension. A strategy that
    holds others keeps them in tensors of its own, which only it can name.
    """
    for name, tensor in model_state(run).items():
        for part in parts_of(state[name]) if name in state else ():
            computed = _same_part(tensor.detach(), part)
            if computed is not None and not _is_same(_values(part), computed):
                raise CheckpointError(
                    f"{name.partition('/')[2]!r}: the weight that strategy {run.config.strategy!r} saves is not the "
                    f"one that the model computes with{_first_difference(_values(part), computed)}; nothing is "
                    "committed. Another --strategy can save this model; please report it with the strategy's options"
                )


def check_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the file at ``path``, just written, does not return ``tensors``, by key, bit for bit."""
    try:
        with safe_open(path, framework="pt") as file:
            for key, written in tensors.items():
                stored = file.get_tensor(key)
                if stored.shape != written.shape or not _is_same(written, stored):
                    raise CheckpointError(f"{path.name}: {key!r} is read back with other values than were written")
    except SafetensorError as error:
        raise CheckpointError(f"{path.name}: cannot be read back: {error}") from None


def _values(part: Part) -> Tensor:
    return part if isinstance(part, Tensor) else part.values


def _same_part(tensor: Tensor, part: Part) -> Tensor | None:
    """Return the elements of ``part`` as the module has them in ``tensor``; ``None`` if it does not have them here."""
    shape = tuple(part.shape)
    if tuple(tensor.shape) != shape:
        return None
    if hasattr(tensor, "to_local"):
        return _same_part_of_shard(tensor, part)
    if isinstance(part, Tensor):
        return tensor
    if isinstance(part, Piece):
        return tensor.reshape(-1)[part.start : part.start + part.values.numel()]
    return tensor[_slices(part)]


def _same_part_of_shard(tensor: Tensor, part: Part) -> Tensor | None:
    from distcore.distributed.dtensors import local_part

    try:
        local, start = local_part(tensor)
    except ValueError:  # not sharded along the first dimension
        return None
    if not isinstance(part, Piece) or part.start < start or part.start + part.values.numel() > start + local.numel():
        return None
    return local.reshape(-1)[part.start - start :][: part.values.numel()]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(box.offset, box.values.shape, strict=True))


def _is_same(saved: Tensor, computed: Tensor) -> bool:
    """Return True if ``saved``, rounded to the dtype of ``computed``, has the same bits; shapes may differ."""
    saved = saved.detach()
    if saved.data_ptr() == computed.data_ptr() and saved.dtype == computed.dtype:
        return saved.numel() == computed.numel()  # the module's own memory
    return torch.equal(_bytes(saved.to(device=computed.device, dtype=computed.dtype)), _bytes(computed))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first_difference(saved: Tensor, computed: Tensor) -> str:
    """Return the dtypes if only one has fractions, else both numbers of the first difference, if there is one."""
    if saved.is_floating_point() != computed.is_floating_point():
        return f" (of {saved.dtype}, where the model has {computed.dtype})"
    ours, theirs = (each.detach().double().cpu().reshape(-1) for each in (saved.to(computed.dtype), computed))
    if len(ours) != len(theirs) or not len(differing := (ours != theirs).nonzero()):
        return ""
    at = int(differing[0])
    return (
        f" ({len(differing)} of {len(ours)} numbers, such as {float(ours[at]):.6g} in place of {float(theirs[at]):.6g})"
    )
