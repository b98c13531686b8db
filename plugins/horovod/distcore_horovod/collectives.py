"""Send tensors between ranks with Horovod, as raw bytes: no pickles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from distcore_horovod.library import hvd


@contextmanager
def lost_peers() -> Iterator[None]:
    """Turn Horovod's error for a lost peer into ConnectionError.

    The launcher then blames the rank that was lost.
    """
    try:
        yield
    except hvd.HorovodInternalError as error:
        raise ConnectionError(f"Horovod: {' '.join(str(error).split())}") from error


def broadcast(tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors on every rank by those of the main rank.

    Names and shapes are the same on all ranks.
    """
    with lost_peers():
        nonempty = {}
        for name, value in tensors.items():
            if value.numel():
                nonempty[name] = _bytes(value)
        hvd.broadcast_parameters(nonempty, root_rank=0)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over ranks, with its shape and dtype, on every rank."""
    with lost_peers():
        reduced: Tensor = hvd.allreduce(values, name="total", op=hvd.Sum)
    return reduced


def gather_rows(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the rows of all ranks in rank order, ``(n_r, …)``, to ``(sum of n_r, …)``.

    Every rank gets them. Dtypes are kept; ranks may have different numbers of rows.
    """
    with lost_peers():
        handles: dict[str, Any] = {}
        for name in sorted(outputs):
            handles[name] = hvd.allgather_async(_bytes(outputs[name]), name=f"rows.{name}")
        gathered = {name: hvd.synchronize(handle) for name, handle in handles.items()}
    rows: dict[str, Tensor] = {}
    for name, value in outputs.items():
        shape_of_row = value.shape[1:]
        rows[name] = gathered[name].view(value.dtype).view(-1, *shape_of_row)
    return rows


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8, shape ``(bytes,)``; a view if it is contiguous.

    Horovod cannot send bfloat16, and its operations differ in the other dtypes that they
    accept; uint8 always works.
    """
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
