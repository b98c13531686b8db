"""Rescue: a rank whose peers are gone saves the last whole step from memory, if it holds all of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore.checkpoint.commit import commit, discard, staging_of
from distcore.checkpoint.files import Files
from distcore.checkpoint.writer import blocks_to_write, write_share
from distcore.errors import CheckpointError
from distcore.launchers.processes.failures import is_lost_peer
from distcore.launchers.processes.rank import have_failed_by_themselves, outliving_peers
from distcore.plugin.strategy.contract import Progress, Run, StepResult
from distcore.plugin.strategy.state import State

Step = tuple[Progress, StepResult, Tensor]


def rescued(run: Run, steps: Iterable[Step], save: Callable[[Progress], object]) -> Iterator[Step]:
    """Yield from ``steps``; if the peers of this rank are gone, ``save`` is called with the last whole step.

    Only while the state in memory is that step's: the next one has not reached the optimizer, and what the caller does
    after a step is over. Not if a peer failed by an error of its own, which a resume would meet again.
    """
    whole: Progress | None = None
    has_stepped = False  # an optimizer that does not call the hook is not trusted

    def begins_to_change(*_: object) -> None:
        nonlocal whole, has_stepped
        whole, has_stepped = None, True

    assert run.optimizer is not None  # a run that trains has one
    hook = run.optimizer.register_step_pre_hook(begins_to_change)
    with outliving_peers():
        try:
            for step in steps:
                yield step
                whole = step[0] if has_stepped else None
        except Exception as error:
            if whole and is_lost_peer(error) and not have_failed_by_themselves():
                save(whole)
            raise
        finally:
            hook.remove()


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
