"""Doing a thing on every rank that all ranks must know the end of: through the strategy's own gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from distcore.checkpoint.manifest import DamagedError
from distcore.contract import Run
from distcore.errors import CheckpointError
from distcore.hooks import Hooks

T = TypeVar("T")


def together(run: Run, hooks: Hooks, what: str, action: Callable[[], T]) -> T:
    """Run ``action`` on this rank and wait for the others; what fails on any rank is raised on all.

    Raises CheckpointError (DamagedError if it was one) with the words of the first rank that failed.
    """
    result, failure = None, None
    try:
        result = action()
    except (OSError, CheckpointError) as error:
        failure = error
    words = _describe(what, failure).encode()
    device = run.world.device
    gathered = hooks.gather_outputs(
        run,
        {
            "size": torch.tensor([len(words)], device=device),
            "damaged": torch.tensor([isinstance(failure, DamagedError)], device=device).long(),
            "words": torch.tensor(list(words), dtype=torch.long, device=device),
        },
    )
    sizes = gathered["size"].tolist()
    if any(sizes):
        first = next(rank for rank, size in enumerate(sizes) if size)
        kind = DamagedError if gathered["damaged"].tolist()[first] else CheckpointError
        raise kind(bytes(gathered["words"].tolist()[: sizes[first]]).decode()) from failure
    return result  # type: ignore[return-value]  # no failure: it is what action returned


def _describe(what: str, failure: OSError | CheckpointError | None) -> str:
    if isinstance(failure, OSError):
        where = f"{failure.filename}: " if failure.filename else ""
        return f"{what}: {where}{failure.strerror or failure}"
    return str(failure or "")
