"""Rescue: ranks whose peers are gone save the last whole step, if they hold all of the state."""

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
        self._save = save
        self._optimizer = run.optimizer if can else None
        self._has_stepped = False
        self._whole: Progress | None = None

    def is_whole(self, progress: Progress) -> None:
        """Record that memory holds a complete step: ``progress``."""
        # An optimizer that calls no hook is not trusted: nobody would see it change the weights.
        self._whole = progress if self._has_stepped else None

    def _begins_to_change(self, *_: object) -> None:
        self._whole = None
        self._has_stepped = True

    def __enter__(self) -> Rescue:
        self._open = ExitStack()
        if self._optimizer:
            handle = self._optimizer.register_step_pre_hook(self._begins_to_change)
            self._open.callback(handle.remove)
            self._open.enter_context(outliving_peers())
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._open:
            if self._whole and is_lost_peer(error) and not have_failed_by_themselves():
                self._save(self._whole)


def can_save_alone(run: Run, makes_own_steps: bool) -> bool:
    """Return True where a rank can save the whole state, and notices that its peers are gone.

    It must hold all of it, and change it by its optimizer alone.
    """
    is_possible = run.capabilities.saves_alone and run.world.size > 1 and not makes_own_steps
    return is_possible and backend_of(run.world.device) == "gloo"


def save_alone(
    run: Run, state: State, final: Path, files: Files, job_state: dict[str, Any]
) -> bool:
    """Write what this rank holds and no other one has written.

    Returns True if that completes the checkpoint ``final``.

    Ranks that are left come one after the other: each that ends shows the next one that it is gone.
    Nothing is written of a state that may not be that of the whole step. ``job_state`` becomes
    state.json.
    """
    if not _is_as_it_was(run, state):
        return False
    # Not the staging folder of ``final``: a save of all ranks may have begun there.
    beside = final.with_name(f"{STAGING}rescued-{final.name}")
    try:
        with _turn(final.with_name(f"{STAGING}turn-{final.name}")):
            if final.exists():
                return False
            staging_of(beside).mkdir(parents=True, exist_ok=True)
            written: set[tuple[str, str]] = set()
            for share in published(beside).values():
                for name, entry in share.tensors.items():
                    parts = [*entry.pieces, *(entry.boxes or ())]
                    written.update((name, part.key) for part in parts)
            without_replicas = {name: _as_own(value) for name, value in state.items()}
            blocks = blocks_to_write(without_replicas, rank=0, size=1)
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
    """Return False if the step that failed may have changed the state.

    It may have changed values, or left parameters gathered in another dtype.
    """
    parameters = {f"model/{name}" for name, _ in run.module.named_parameters()}
    if any(name.startswith("model/") for name in state.keys() - parameters):
        return False  # buffers change in a forward pass
    are_whole = [isinstance(value, Tensor) for name, value in state.items() if name in parameters]
    # Either all are whole or none is; a state without parameters is neither.
    if all(are_whole) != any(are_whole):
        return False
    if run.ema and not all(are_whole):
        return False  # names of averages are not known where a rank's part is empty
    groups = run.optimizer.param_groups if run.optimizer else []
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter in run.module.parameters():
        if parameter.requires_grad and id(parameter) not in stepped:
            return False
    return all(
        bool(torch.isfinite(values).all())
        for value in state.values()
        for values in values_of(value)
    )


def _is_whole(run: Run, shares: Iterable[RankManifest]) -> bool:
    """Return True if ranks have written all elements of all tensors.

    A rank's empty part of a tensor is not in its share.
    """
    tensors = merge_tensors(shares)
    for name, entry in tensors.items():
        in_pieces = sum(piece.count for piece in entry.pieces)
        boxes = entry.boxes_in(name, entry.region)
        in_boxes = sum(box.region.elements for box in boxes)
        if in_pieces + in_boxes != entry.count:
            return False
    names = model_state(run).keys() | optimizer_state(run).keys()
    return names <= tensors.keys()


def _as_own(value: Tensor | Piece | Box | Sequence[Box]) -> Tensor | Piece | Box | Sequence[Box]:
    """Return an entry of a state that this rank writes, also where it holds a replica."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Piece | Box):
        return replace(value, replica=False)
    return [replace(box, replica=False) for box in value]


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold ``folder``, one rank at a time; raises CheckpointError if another one does not end."""
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
