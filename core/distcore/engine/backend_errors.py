"""Tell, in a run's first steps, an error of a strategy's backend from one of the task.

A backend may fail on a module that plain PyTorch trains, and each backend says so differently.
Whether the backend or the task is at fault is measured: the rank that fails builds the model again
and computes the same rows in plain PyTorch. If that goes well, the strategy cannot take the model,
and the run ends as it does for any config that cannot work. If it fails, too, the error is the
task's, and is raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from distcore.distributed.devices import free_memory
from distcore.engine import loop, whole_batch
from distcore.engine.evaluation import first_micro_batch, forward_all
from distcore.engine.module_checks import refuse_grown, trained_names
from distcore.engine.proof import COPIES, PART_OF_MEMORY
from distcore.engine.replay import PlainCopy, plain_outputs, plain_step
from distcore.engine.training import Training
from distcore.errors import DistcoreError, TaskError, raised_at, write_traceback
from distcore.launchers.processes.failures import is_lost_peer, one_line
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.hooks import Hooks

PASSES: tuple[Any, ...] = (
    loop.train_step,
    whole_batch.train_whole_batch,
    Hooks.train_step,
    Hooks.backward,
    Hooks.step,
    forward_all,
)
"""Functions around what a backend computes. An error from elsewhere, such as a listener, is not
the backend's.
"""
SHORT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


@contextmanager
def explain_backend_errors(training: Training, is_over: Callable[[], bool]) -> Iterator[None]:
    """Raise TaskError, one line, for an error of a backend inside the ``with`` block, until
    ``is_over()``.
    """
    # Before the first pass: a forward pass that makes parameters is the task's fault.
    trained = trained_names(training.run.module)
    try:
        yield
    except DistcoreError:
        raise
    except Exception as error:
        if not is_over() and _is_of_passes(error):
            refuse_grown(training.run.module, trained)
            _refuse_if_plain_trains(training, error)
        raise


def _refuse_if_plain_trains(training: Training, error: Exception) -> None:
    """Raise TaskError if one plain process computes the rows on which the strategy failed."""
    run, hooks = training.run, training.hooks
    if run.config.prove == "off":
        return
    # A task's own step, or one that extensions change, is not what plain PyTorch would compute.
    if training.task.has("train_step") or hooks.changers:
        return
    # Nothing is wrong on this rank: another one has ended.
    if is_lost_peer(error):
        return
    if isinstance(error, SHORT_OF_MEMORY) or _is_large(training):
        return
    # Last, because it builds the model again and computes with it.
    if not _trains_plainly(training):
        return
    folder = Path(str(run.config.out)) / "errors"
    file = write_traceback(error, folder, f"rank-{run.world.rank}.txt")
    raise TaskError(
        f"strategy {hooks.name!r} cannot train this model as it is: {_describe(error)}, where one "
        "plain process computes the same rows; another strategy may train it, such as --strategy "
        f"single; traceback in {file}{_line_of_user(error)}"
    ) from error


def _describe(error: Exception) -> str:
    """Return what the error says. A bare assertion says nothing: return where it was raised."""
    kind = type(error).__name__
    if str(error):
        return one_line(f"{kind}: {error}", limit=200)
    frames = list(walk_tb(error.__traceback__))
    frame, line = frames[-1]
    code = frame.f_code
    return f"{kind} in {code.co_name}(), {Path(code.co_filename).name}:{line}"


def _line_of_user(error: Exception) -> str:
    """Return where the user's code raised it, or nothing: a line of a plugin does not help."""
    # Of an error of distcore's own, ``raised_at`` does not name the line of a plugin.
    error_of_distcore = TaskError().with_traceback(error.__traceback__)
    return raised_at(error_of_distcore)


def _is_of_passes(error: Exception) -> bool:
    """Return True if a pass or the optimizer's step raised the error."""
    codes = {_code_of(function) for function in PASSES}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _code_of(function: Any) -> CodeType:
    """Return the code of a function, below a decorator that it may have."""
    undecorated = getattr(function, "__wrapped__", function)
    code: CodeType = undecorated.__code__
    return code


def _is_large(training: Training) -> bool:
    """Return True if a second model would take too much memory, beside those of other ranks."""
    run = training.run
    bytes_of_fp32_weights = 4 * int(run.facts["model"]["parameters"])
    needed = COPIES * bytes_of_fp32_weights
    # All ranks may be on one device, and fail at once.
    share_of_rank = PART_OF_MEMORY * free_memory(run.world.device) / run.world.size
    return needed > share_of_rank


def _trains_plainly(training: Training) -> bool:
    """Return True if plain PyTorch computes this rank's rows of the evaluation and of its step."""
    run, data = training.run, training.data
    plain = PlainCopy(run.config, training.task, data)
    try:
        # A module without values, of which none are copied: those of the seed, or of files, stay.
        plain.build(nn.Module())
        if len(data.evaluation):
            rows = first_micro_batch(run, training.hooks, data.evaluation).indices
            with torch.no_grad():
                plain_outputs(plain, run, rows)
        for rows in _rows_of_step(training):
            plain_step(plain, run, rows, training.progress.epoch)
    except Exception:
        # Of any class: code of the task may be wrong in any way.
        return False
    return True


def _rows_of_step(training: Training) -> list[np.ndarray]:
    """Return the rows of each micro-batch of this rank in the step that is under way."""
    world = training.run.world
    progress = training.progress
    plan = training_plan(training.run.config, training.data.train)
    micros = plan.split(progress.epoch, progress.step_in_epoch, world.shard, world.shards)
    return [micro.indices for micro in micros if not micro.is_padding]
