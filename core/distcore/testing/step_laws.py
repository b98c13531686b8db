"""The laws for tasks that are measured in short runs of one process: steps of their
own, states, and resumes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from distcore import checkpoint
from distcore.config import RunConfig, with_changes
from distcore.engine.training import Training
from distcore.plugin.strategy.contract import Progress, World
from distcore.plugin.strategy.extra_state import extra_state, tensors_of_state
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve import tasks
from distcore.strategies.single import SingleStrategy
from distcore.testing.findings import EXACT, FP32, Measured, needs
from distcore.testing.kept_aside import kept_aside, lost_names
from distcore.testing.random_state import change_random_state
from distcore.testing.reference import largest_difference
from distcore.testing.task_lab import FirstRows, TaskLab, disable_dropout
from distcore.testing.task_suite import TASKS

ROWS, STEPS, CUT = 6, 6, 3
"""Rows of a global batch, steps of a run, and the step at which a run is cut."""
ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
"""The world of a run of one process."""


@TASKS.law("gradient")
def own_steps_are_cut_anywhere(lab: TaskLab) -> Measured:
    """A step that the task makes itself ends alike for every number of micro-batches."""
    whole, _ = _train(lab, "train_step", micro_batch_size=ROWS)
    differences = []
    for size in (1, 4):
        cut, _ = _train(lab, "train_step", micro_batch_size=size)
        differences.append(largest_difference(cut, whole))
    worst, where = max(differences)
    return Measured(error=worst, bound=FP32, note=f"worst tensor {where}")


@TASKS.law("resume")
def own_steps_continue(lab: TaskLab) -> Measured:
    """A run with steps that the task makes itself resumes bit for bit, with another task object."""
    resumed, _ = _train(lab, "train_step", cut=True)
    whole, _ = _train(lab, "train_step")
    worst, where = largest_difference(resumed, whole)
    return Measured(error=worst, bound=EXACT, note=f"worst tensor {where}")


@TASKS.law("resume")
def state_continues(lab: TaskLab) -> Measured:
    """A state that the task keeps is the same after a run in two parts,
    with another task object.
    """
    _, states = _train(lab, "state")
    _, states_of_parts = _train(lab, "state", cut=True)
    note = f"{states_of_parts} for {states}"
    return Measured(error=states_of_parts != states, bound=EXACT, note=note[:200])


@TASKS.law("resume")
def own_steps_repeat(lab: TaskLab) -> Measured:
    """Two runs with steps that the task makes itself are equal bit for bit, whatever
    the random state before.
    """
    with change_random_state(1):
        first, _ = _train(lab, "train_step")
    with change_random_state(2):
        second, _ = _train(lab, "train_step")
    worst, where = largest_difference(second, first)
    return Measured(error=worst, bound=EXACT, note=f"worst tensor {where}")


@TASKS.law("resume")
def steps_continue(lab: TaskLab) -> Measured:
    """Steps after a resume equal those of an uninterrupted run bit for bit: nothing that they
    need is kept aside.
    """
    whole = _begin(lab)
    resumed = _begin(lab)
    _take_steps(whole, CUT)
    folder = Path(mkdtemp(prefix="cut-", dir=lab.folder))
    path = checkpoint.save(whole.run, whole.hooks, whole.progress, folder, {"best": None})
    states = whole.hooks.states()
    aside_at_cut = _kept_aside(whole)
    resumed.progress, _ = checkpoint.load(resumed.run, resumed.hooks, path)
    # Through JSON, as in a checkpoint's file.
    resumed.hooks.load_states(json.loads(json.dumps(states)))
    lost = lost_names(aside_at_cut, _kept_aside(resumed))
    expected = _take_steps(whole, STEPS - CUT)
    losses = _take_steps(resumed, STEPS - CUT)
    worst, where = largest_difference(_saved_state(resumed), _saved_state(whole))
    first_wrong_step = _first_difference(losses, expected)
    if not worst and first_wrong_step is None:
        return Measured(error=0.0, bound=EXACT, note=f"worst tensor {where}")
    symptom = f"{where} differs"
    if first_wrong_step is not None:
        symptom = f"the loss of step {first_wrong_step} after it differs"
    reason = "no attribute of model, task or rows shows why"
    if lost:
        reason = f"a checkpoint lacks {', '.join(lost[:3])}"
    remedy = "keep it in a persistent buffer, in get_extra_state, or in the task's state()"
    note = f"{symptom}; {reason}; {remedy}"
    return Measured(error=worst or float("inf"), bound=EXACT, note=note)


def _first_difference(losses: list[float], expected: list[float]) -> int | None:
    """Return the number of the first step whose loss differs, from 1 on; ``None`` if none does."""
    pairs = zip(losses, expected, strict=True)
    for number, (loss, expected_loss) in enumerate(pairs, start=1):
        if loss != expected_loss:
            return number
    return None


def _begin(lab: TaskLab) -> Training:
    """Build a training of a new task object, with rows that it has prepared itself, as
    in a new process.
    """
    config = _config(lab)
    task = tasks.load_task(lab.config)
    data = task.prepare(config)
    hooks = Hooks("single", SingleStrategy(), task.listener())
    return Training.build(config, hooks, ALONE, task, data)


def _saved_state(training: Training) -> dict[str, Tensor]:
    """Return parameters, persistent buffers and extra state by name: what a checkpoint
    has of the model.
    """
    module = training.run.module
    return {**tensors_of_state(module), **extra_state(module)}


def _kept_aside(training: Training) -> dict[str, object]:
    """Return what no checkpoint has."""
    return kept_aside(training.run.module, task=training.task.task, rows=training.data.train)


def _take_steps(training: Training, number: int) -> list[float]:
    """Train for ``number`` steps; return the loss of each."""
    return [float(step.loss) for step in islice(training.steps(), number)]


def _train(
    lab: TaskLab, method: str, micro_batch_size: int = 2, cut: bool = False
) -> tuple[checkpoint.Tensors, str]:
    """Train without dropout, with ``cut`` in two parts; return tensors and listeners' states then.

    A task without ``method`` is skipped. The states are JSON text, as in a checkpoint.
    """
    listeners = lab.task.listener().values()
    is_defined = lab.task.has(method) or any(hasattr(each, method) for each in listeners)
    needs(is_defined, f"the task has no {method}()")
    config = _config(lab, micro_batch_size)
    # An epoch whose last batch is incomplete, and which ends before the run.
    rows = FirstRows(lab.data.train, 3 * ROWS + 1)
    data = replace(lab.data, train=rows)
    progress = Progress()
    path = lab.folder
    states = "{}"
    ends_of_parts = (CUT, STEPS) if cut else (STEPS,)
    for end in ends_of_parts:
        # A new object each time, so that what a task keeps on itself is lost.
        task = tasks.load_task(lab.config)
        hooks = Hooks("single", SingleStrategy(), task.listener())
        training = Training.build(config, hooks, ALONE, task, data)
        run = training.run
        disable_dropout(run.module)
        if progress.step:
            progress, _ = checkpoint.load(run, hooks, path)
        training.progress = progress
        hooks.load_states(json.loads(states))
        for step in islice(training.steps(), end - progress.step):
            progress = step.progress
        folder = Path(mkdtemp(prefix="own-", dir=lab.folder))
        path = checkpoint.save(run, hooks, progress, folder, {"best": None})
        states = json.dumps(hooks.states())
    return checkpoint.read_tensors(path), states


def _config(lab: TaskLab, micro_batch_size: int = 2) -> RunConfig:
    """Return the config of a run of a few steps, each of ``ROWS`` rows."""
    changes: dict[str, Any] = {
        "global_batch_size": ROWS,
        "micro_batch_size": micro_batch_size,
        "micro_batch_tokens": None,
        "max_steps": STEPS,
        "data_guard_steps": 0,
        "dropout_masks": "rank",
    }
    if "eps" in lab.config.optimizer.options:
        # With a small eps the first steps hardly depend on the gradient's scale.
        changes["optimizer.eps"] = 1e-2
    return with_changes(lab.config, changes)
