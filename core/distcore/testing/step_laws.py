"""The laws for tasks that make their own steps, or keep a state: they are measured in short runs of one process."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch

from distcore import checkpoint
from distcore.config import with_changes
from distcore.engine.training import Training
from distcore.plugin.strategy.contract import Progress, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve import tasks
from distcore.strategies.single import SingleStrategy
from distcore.testing.findings import EXACT, FP32, Measured, needs
from distcore.testing.reference import largest_difference
from distcore.testing.register import task_law
from distcore.testing.task_lab import FirstRows, TaskLab, change_random_state, disable_dropout

ROWS, STEPS, CUT = 6, 6, 3
"""Rows of a global batch, steps of a run, and the step at which a run is cut."""
_numbers = count()


@task_law("gradient")
def own_steps_are_cut_anywhere(lab: TaskLab) -> Measured:
    """A step that the task makes itself ends alike for every number of micro-batches."""
    whole, *others = (_train(lab, "train_step", size)[0] for size in (ROWS, 1, 4))
    worst, where = max(largest_difference(other, whole) for other in others)
    return Measured(error=worst, bound=FP32, note=f"worst tensor {where}")


@task_law("resume")
def own_steps_continue(lab: TaskLab) -> Measured:
    """A run with steps that the task makes itself resumes bit for bit, with another task object."""
    worst, where = largest_difference(_train(lab, "train_step", cut=True)[0], _train(lab, "train_step")[0])
    return Measured(error=worst, bound=EXACT, note=f"worst tensor {where}")


@task_law("resume")
def state_continues(lab: TaskLab) -> Measured:
    """A state that the task keeps is the same after a run in two parts, with another task object."""
    whole, cut = _train(lab, "state")[1], _train(lab, "state", cut=True)[1]
    return Measured(error=cut != whole, bound=EXACT, note=f"{cut} for {whole}"[:200])


@task_law("resume")
def own_steps_repeat(lab: TaskLab) -> Measured:
    """Two runs with steps that the task makes itself are equal bit for bit, whatever the random state before."""
    with change_random_state(1):
        first = _train(lab, "train_step")[0]
    with change_random_state(2):
        worst, where = largest_difference(_train(lab, "train_step")[0], first)
    return Measured(error=worst, bound=EXACT, note=f"worst tensor {where}")


def _train(lab: TaskLab, method: str, micro_batch_size: int = 2, cut: bool = False) -> tuple[checkpoint.Tensors, str]:
    heard = lab.task.listener().values()
    needs(lab.task.has(method) or any(hasattr(each, method) for each in heard), f"the task has no {method}()")
    changes: dict[str, Any] = {
        "global_batch_size": ROWS,
        "micro_batch_size": micro_batch_size,
        "micro_batch_tokens": None,
        "max_steps": STEPS,
        "data_guard_steps": 0,
        "dropout_masks": "rank",
    }
    if "eps" in lab.config.optimizer.options:
        changes["optimizer.eps"] = 1e-2  # with a small one the first steps hardly depend on the gradient's scale
    config = with_changes(lab.config, changes)
    data = replace(lab.data, train=FirstRows(lab.data.train, 3 * ROWS + 1))
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    progress, path, states = Progress(), lab.folder, "{}"
    for end in (CUT, STEPS) if cut else (STEPS,):
        task = tasks.of(lab.config)  # a new one, so that what it keeps on itself is lost
        hooks = Hooks("single", SingleStrategy(), task.listener())
        training = Training.build(config, hooks, world, task, data)
        run = training.run
        disable_dropout(run.module)
        if progress.step:
            training.progress, _ = checkpoint.load(run, hooks, path)
        hooks.load_states(json.loads(states))
        for step in islice(training.steps(), end - progress.step):
            progress = step.progress
        path = checkpoint.save(run, hooks, progress, lab.folder / f"own-{next(_numbers)}", {"best": None})
        states = json.dumps(hooks.states())
    return checkpoint.read_tensors(path), states
