"""Rescue: ranks whose peers are gone save the last whole step from memory, if they hold
all of the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore.checkpoint.commit import STAGING, commit, discard, published, staging_of
from distcore.checkpoint.files import Files
from distcore.checkpoint.manifest import RankManifest, merge_tensors
from distcore.checkpoint.writer import blocks_to_write, write_share
from distcore.distributed.devices import backend_of
from distcore.distributed.local_state import values_of
from distcore.errors import CheckpointError
from distcore.launchers.processes.failures import is_lost_peer
from distcore.launchers.processes.rank import have_failed_by_themselves, outliving_peers
from distcore.plugin.strategy.contract import Progress, Run
from distcore.plugin.strategy.defaults import model_state, optimizer_state
from distcore.plugin.strategy.state import Box, Piece, State

LONGEST_TURN = 30.0
"""Seconds that a rank waits for another one to write."""


class Rescue:
    """Calls ``save`` with the last whole step where peers that are gone end the ``with`` block.

    A step is whole from ``is_whole`` until the optimizer steps again. Nothing is saved if a peer
    failed by an error of its own, which a resume would meet again.
    """

    def __init__(self, run: Run, save: Callable[[Progress], object], can: bool = True) -> None:
        self._save, self._has_stepped = save, False
        self._whole: Progress | None = None
        self._optimizer = run.optimizer if can else None

    def is_whole(self, progress: Progress) -> None:
        """Record that memory holds a complete step: ``progress``."""
        # an optimizer that calls no hook is not trusted
        self._whole = progress if self._has_stepped else None

    def _begins_to_change(self, *_: object) -> None:
        self._whole, self._has_stepped = None, True

    def __enter__(self) -> Rescue:
        self._open = ExitStack()
        if self._optimizer:
            self._open.callback(
                self._optimizer.register_step_pre_hook(self._begins_to_change).remove
            )
            self._open.enter_context(outliving_peers())
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._open:
            if self._whole and is_lost_peer(error) and not have_failed_by_themselves():
                self._save(self._whole)


def can_save_alone(run: Run, makes_own_steps: bool) -> bool:
    """Return True where a rank holds all, changes it by its optimizer alone, and notices that
    its peers are gone.
    """
    is_possible = run.capabilities.saves_alone and run.world.size > 1 and not makes_own_steps
    return is_possible and backend_of(run.world.device) == "gloo"


def save_alone(
    run: Run, state: State, final: Path, files: Files, job_state: dict[str, Any]
) -> bool:
    """Write what this rank holds and no other one has written; return True if that
    completes the checkpoint ``final``.

    Ranks that are left come one after the other: each that ends shows the next one that it is gone.
    Nothing is written of a state that may not be that of the whole step. ``job_state`` becomes
    state.json.
    """
    if not _is_as_it_was(run, state):
        return False
    beside = final.with_name(f"{STAGING}rescued-{final.name}")  # a save of all ranks may have begun
    try:
        with _turn(final.with_name(f"{STAGING}turn-{final.name}")):
            if final.exists():
                return False
            staging_of(beside).mkdir(parents=True, exist_ok=True)
            written = {
                (name, part.key)
                for share in published(beside).values()
                for name, entry in share.tensors.items()
                for part in (*entry.pieces, *(entry.boxes or ()))
            }
            blocks = blocks_to_write(
                {name: _as_own(held) for name, held in state.items()}, rank=0, size=1
            )
            mine = [block for block in blocks if (block.name, block.key) not in written]
            write_share(files, beside, mine, run.world.rank)
            shares = published(beside)
            if not _is_whole(run, shares.values()):
                return False
            commit(files, beside, shares, job_state)
            files.rename(beside, final)
            files.sync(final.parent)
    except (OSError, CheckpointError):
        discard(files, beside)
        return False
    return True


def _is_as_it_was(run: Run, state: State) -> bool:
    """Return False if the step that failed may have changed the state, or left it
    gathered in another dtype.
    """
    parameters = {f"model/{name}" for name, _ in run.module.named_parameters()}
    model = [held for name, held in state.items() if name in parameters]
    are_whole = [isinstance(held, Tensor) for held in model]
    groups = run.optimizer.param_groups if run.optimizer else []
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    return (
        # buffers change in a forward pass
        not any(name.startswith("model/") for name in state.keys() - parameters)
        and all(are_whole) is any(are_whole)
        # whose names are not known where a rank's part is empty
        and (all(are_whole) or not run.ema)
        and all(
            id(parameter) in stepped
            for parameter in run.module.parameters()
            if parameter.requires_grad
        )
        and all(
            bool(torch.isfinite(values).all())
            for held in state.values()
            for values in values_of(held)
        )
    )


def _is_whole(run: Run, shares: Iterable[RankManifest]) -> bool:
    """Return True if ranks have written all elements of all tensors; a rank's empty part of one is
    not in its share.
    """
    tensors = merge_tensors(shares)
    stored = {
        name: (
            sum(piece.count for piece in entry.pieces)
            + sum(box.region.elements for box in entry.boxes_in(name, entry.region))
        )
        for name, entry in tensors.items()
    }
    names = model_state(run).keys() | optimizer_state(run).keys()
    return names <= tensors.keys() and all(
        stored[name] == entry.count for name, entry in tensors.items()
    )


def _as_own(held: Tensor | Piece | Box | Sequence[Box]) -> Tensor | Piece | Box | Sequence[Box]:
    if isinstance(held, Piece | Box):
        return replace(held, replica=False)
    return held if isinstance(held, Tensor) else [replace(box, replica=False) for box in held]


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold ``folder`` inside the ``with`` block; raises CheckpointError if another rank does
    not give it back.
    """
    deadline = time.monotonic() + LONGEST_TURN
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{folder}: another rank has not ended") from None
            time.sleep(0.02)
    try:
        yield
    finally:
        folder.rmdir()
