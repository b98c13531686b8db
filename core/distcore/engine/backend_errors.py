"""Tell, in a run's first steps, an error of a strategy's backend from one of the task.

A backend may fail on a module that plain PyTorch trains, each in words of its own. Which of both
is at fault is measured: the rank that fails builds the model again and computes the same rows in
plain PyTorch. If that goes well, the strategy cannot take the model, and the run ends as it does
for any config that cannot work; if it fails, too, the error is the task's, and is raised as it is.
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
"""Functions around what a backend computes. An error from elsewhere, such as a listener, is none
of its own.
"""
SHORT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


@contextmanager
def explain_backend_errors(training: Training, is_over: Callable[[], bool]) -> Iterator[None]:
    """Raise TaskError, one line, for an error of a backend inside the ``with`` block, until
    ``is_over()``.
    """
    trained = trained_names(training.run.module)
    try:
        yield
    except DistcoreError:
        raise
    except Exception as error:
        if not is_over() and _is_of_passes(error):
            refuse_grown(training.run.module, trained)
            _refuse_what_plain_takes(training, error)
        raise


def _refuse_what_plain_takes(training: Training, error: Exception) -> None:
    """Raise TaskError if one plain process computes the rows on which the strategy failed."""
    run, hooks = training.run, training.hooks
    is_measured = run.config.prove != "off" and not training.task.has("train_step")
    if not is_measured or hooks.changers or is_lost_peer(error):
        return
    if isinstance(error, SHORT_OF_MEMORY) or _is_large(training) or not _trains_plainly(training):
        return
    folder = Path(str(run.config.out)) / "errors"
    file = write_traceback(error, folder, f"rank-{run.world.rank}.txt")
    raise TaskError(
        f"strategy {hooks.name!r} cannot train this model as it is: {_words(error)}, where one "
        "plain process computes the same rows; another strategy may train it, such as --strategy "
        f"single; traceback in {file}{_users_line(error)}"
    ) from error


def _words(error: Exception) -> str:
    """Return what the error says or, if it says nothing, as a bare assertion, where it is from."""
    kind = type(error).__name__
    if str(error):
        return one_line(f"{kind}: {error}", limit=200)
    *_, (frame, line) = walk_tb(error.__traceback__)
    code = frame.f_code
    return f"{kind} in {code.co_name}(), {Path(code.co_filename).name}:{line}"


def _users_line(error: Exception) -> str:
    """Return where the user's code raised it, or nothing: a line of a plugin does not help."""
    return raised_at(TaskError().with_traceback(error.__traceback__))


def _is_of_passes(error: Exception) -> bool:
    """Return True if a pass or the optimizer's step raised the error."""
    codes = {_code_of(function) for function in PASSES}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _code_of(function: Any) -> CodeType:
    code: CodeType = getattr(function, "__wrapped__", function).__code__
    return code


def _is_large(training: Training) -> bool:
    """Return True if a second model would take too much memory, beside those of other ranks."""
    run = training.run
    needed = COPIES * 4 * int(run.facts["model"]["parameters"])
    return needed > PART_OF_MEMORY * free_memory(run.world.device) / run.world.size


def _trains_plainly(training: Training) -> bool:
    """Return True if plain PyTorch computes this rank's rows of the evaluation and of its step."""
    run, data = training.run, training.data
    plain = PlainCopy(run.config, training.task, data)
    try:
        plain.build(nn.Module())  # its values are those of the seed, or of files
        if len(data.evaluation):
            rows = first_micro_batch(run, training.hooks, data.evaluation).indices
            with torch.no_grad():
                plain_outputs(plain, run, rows)
        for rows in _rows_of_step(training):
            plain_step(plain, run, rows, training.progress.epoch)
    except Exception:  # any class: code of the task that may be wrong in any way
        return False
    return True


def _rows_of_step(training: Training) -> list[np.ndarray]:
    """Return the rows of each micro-batch of this rank in the step that is under way."""
    run, progress = training.run, training.progress
    plan = training_plan(run.config, training.data.train)
    micros = plan.split(progress.epoch, progress.step_in_epoch, run.world.shard, run.world.shards)
    return [micro.indices for micro in micros if not micro.is_padding]
