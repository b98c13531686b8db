"""Rescue: a rank whose peers are gone saves the last whole step from memory, if it holds all of the state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore.checkpoint.commit import commit, discard, staging_of
from distcore.checkpoint.files import Files
from distcore.checkpoint.writer import blocks_to_write, write_share
from distcore.distributed.devices import backend_of
from distcore.errors import CheckpointError
from distcore.launchers.processes.failures import is_lost_peer
from distcore.launchers.processes.rank import have_failed_by_themselves, outliving_peers
from distcore.plugin.strategy.contract import Progress, Run
from distcore.plugin.strategy.state import State


class Rescue:
    """Calls ``save`` with the last whole step where peers that are gone end the ``with`` block.

    A step is whole from ``is_whole`` until the optimizer steps again. Nothing is saved if a peer failed by an error of
    its own, which a resume would meet again.
    """

    def __init__(self, run: Run, save: Callable[[Progress], object], can: bool = True) -> None:
        self._save, self._has_stepped = save, False
        self._whole: Progress | None = None
        self._optimizer = run.optimizer if can else None

    def is_whole(self, progress: Progress) -> None:
        """Say that the state in memory is that of ``progress``, and that nothing is left to do after it."""
        self._whole = progress if self._has_stepped else None  # an optimizer that calls no hook is not trusted

    def _begins_to_change(self, *_: object) -> None:
        self._whole, self._has_stepped = None, True

    def __enter__(self) -> Rescue:
        self._open = ExitStack()
        if self._optimizer:
            self._open.callback(self._optimizer.register_step_pre_hook(self._begins_to_change).remove)
            self._open.enter_context(outliving_peers())
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._open:
            if self._whole and is_lost_peer(error) and not have_failed_by_themselves():
                self._save(self._whole)


def can_save_alone(run: Run, makes_own_steps: bool) -> bool:
    """Return True where a rank holds all, changes it by its optimizer alone, and notices that its peers are gone."""
    is_possible = run.capabilities.saves_alone and run.world.size > 1 and not makes_own_steps
    return is_possible and backend_of(run.world.device) == "gloo"


def save_alone(run: Run, state: State, final: Path, files: Files, job_state: dict[str, Any]) -> bool:
    """Commit the checkpoint ``final`` from this rank alone; return False if another one does, or if that is not safe.

    It is not for parts of tensors, values that are not finite, and buffers: the forward pass that failed may have
    changed those. ``job_state`` becomes state.json.
    """
    parameters = {f"model/{name}" for name, _ in run.module.named_parameters()}
    for name, value in state.items():
        is_buffer = name.startswith("model/") and name not in parameters
        if is_buffer or not isinstance(value, Tensor) or not bool(torch.isfinite(value).all()):
            return False
    try:
        staging_of(final).mkdir(parents=True)  # of several ranks one succeeds
    except FileExistsError:
        return False
    try:
        write_share(files, final, blocks_to_write(state, rank=0, size=1), rank=0)
        commit(files, final, 1, job_state)
    except (OSError, CheckpointError):
        discard(files, final)
        return False
    return True
