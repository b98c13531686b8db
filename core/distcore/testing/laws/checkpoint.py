"""Law 5: a checkpoint has no strategy and no world size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distcore import checkpoint
from distcore.contract import Progress
from distcore.testing.cases import EXACT, FP32, Measured, law
from distcore.testing.lab import Job, Lab
from distcore.testing.laws.gradient import distance
from distcore.testing.problem import Problem
from distcore.testing.reference import apart, solve

STEPS, HALF = 10, 5
LINEAR = {"name": "linear", "warmup_steps": 2}
PROBLEM = Problem(tied=True)


@law("checkpoint")
def neutral_names(lab: Lab) -> Measured:
    """Parameters, moments and step counts by the names of the task's model, whole, equal to plain PyTorch's."""
    job = lab.job(PROBLEM)
    trained = job.train(STEPS)
    return distance(trained, solve(PROBLEM, job.run.config, job.data, STEPS), FP32, job)


@law("checkpoint")
def round_trip(lab: Lab) -> Measured:
    """What is loaded and saved again is the same, bit for bit, buffers too."""
    first = lab.job(PROBLEM)
    first.train(3)
    path = _save(lab, first, Progress(step=3, step_in_epoch=3))
    state = checkpoint.read_tensors(path, checkpoint.PARTS)
    state["model/scale"] = torch.tensor(2.0)
    second = lab.job(PROBLEM)
    lab.hooks.load_checkpoint(second.run, dict(state))
    again = lab.hooks.save_checkpoint(second.run)
    error, where = apart(again, state) if lab.world.is_main else (0.0, "")
    return Measured(error=error, bound=EXACT, note=f"{len(state)} tensors, worst {where}")


@law("checkpoint")
def loads_into_every_rank(lab: Lab) -> Measured:
    """After loading, rows forwarded on any rank see the loaded parameters and buffers."""
    problem = replace(PROBLEM, evaluation_rows=4 * lab.world.size)
    trained = lab.job(problem)
    trained.train(3)
    path = _save(lab, trained, Progress(step=3, step_in_epoch=3))
    state = checkpoint.read_tensors(path, checkpoint.PARTS) | {"model/scale": torch.tensor(2.0)}
    fresh, alone = lab.job(problem), lab.alone(problem)
    lab.hooks.load_checkpoint(fresh.run, dict(state))
    alone.hooks.load_checkpoint(alone.run, dict(state))
    found, expected = fresh.evaluate().outputs["loss"], alone.evaluate().outputs["loss"]
    return Measured(error=float((found - expected).abs().max()), bound=FP32, note="largest difference of a row's loss")


@law("checkpoint")
def into_single(lab: Lab) -> Measured:
    """Saved under the strategy, continued in one process: as if one process had done it all."""
    first = lab.job(PROBLEM, schedule=LINEAR)
    half = first.train(HALF)
    path = _save(lab, first, half.progress)
    return _continued(lab, lab.alone(PROBLEM, schedule=LINEAR), path)


@law("checkpoint")
def from_single(lab: Lab) -> Measured:
    """Saved in one process, continued under the strategy."""
    alone = lab.alone(PROBLEM, schedule=LINEAR)
    half = alone.train(HALF)
    folder = lab.folder / "single"
    if lab.world.is_main:
        checkpoint.save(alone.run, alone.hooks, half.progress, folder, {"best": None})
    lab.share("saved")
    return _continued(lab, lab.job(PROBLEM, schedule=LINEAR), folder / f"step-{HALF:08d}")


def _save(lab: Lab, job: Job, progress: Progress) -> Path:
    """Commit a checkpoint and wait until every rank can read it."""
    path = checkpoint.save(job.run, job.hooks, progress, lab.folder, {"best": None})
    lab.share("saved")
    return path


def _continued(lab: Lab, job: Job, path: Path) -> Measured:
    """Load ``path`` into ``job``, train to the end, and compare with one uninterrupted process."""
    progress, _ = checkpoint.load(job.run, job.hooks, path)
    rest = job.train(STEPS - HALF, progress)
    whole = solve(PROBLEM, job.run.config, job.data, STEPS)
    tail = replace(whole, losses=whole.losses[HALF:], norms=whole.norms[HALF:])
    return distance(rest, tail, FP32, job)
