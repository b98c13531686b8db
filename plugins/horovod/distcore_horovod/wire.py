"""Tensors between ranks over Horovod. No pickle: what travels is the tensors' own bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from distcore_horovod.library import hvd


@contextmanager
def lost_peers() -> Iterator[None]:
    """Say that a peer is gone as Python says it, so that the launcher blames the one who went."""
    try:
        yield
    except hvd.HorovodInternalError as error:
        raise ConnectionError(f"Horovod: {' '.join(str(error).split())}") from error


def broadcast(tensors: Mapping[str, Tensor]) -> None:
    """Give every rank the main rank's tensors, in place; names and shapes are the same on all ranks."""
    with lost_peers():
        hvd.broadcast_parameters({name: _bytes(value) for name, value in tensors.items() if value.numel()}, root_rank=0)


def total(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over ranks, on every rank."""
    with lost_peers():
        reduced: Tensor = hvd.allreduce(values, name="total", op=hvd.Sum)
    return reduced


def gather_rows(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the rows of all ranks in rank order, on every rank: ``(n_r, …)`` to ``(sum of n_r, …)``, dtypes kept."""
    with lost_peers():
        handles = {name: hvd.allgather_async(_bytes(outputs[name]), name=f"rows.{name}") for name in sorted(outputs)}
        gathered = {name: hvd.synchronize(handle) for name, handle in handles.items()}
    return {name: gathered[name].view(value.dtype).view(-1, *value.shape[1:]) for name, value in outputs.items()}


def _bytes(tensor: Tensor) -> Tensor:
    """The storage of a tensor as uint8, shape ``(bytes,)``; shared with it where it is contiguous.

    Horovod cannot send bfloat16 at all, and each operation takes its own set of the other dtypes; bytes always pass.
    """
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
