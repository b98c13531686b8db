"""Law 5: a checkpoint has no strategy and no world size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distcore import checkpoint
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
    return distance(job.train(STEPS), solve(PROBLEM, job.run.config, STEPS))


@law("checkpoint")
def round_trip(lab: Lab) -> Measured:
    """What is loaded and saved again is the same, bit for bit, buffers too."""
    trained = lab.job(PROBLEM).train(3)
    state = checkpoint.Tensors(trained.state | {"model/scale": torch.tensor(2.0)})
    fresh = lab.job(PROBLEM)
    lab.hooks.load_checkpoint(fresh.run, state, trained.progress)
    error, where = apart(checkpoint.read_tensors(fresh.save(trained.progress)), state)
    return Measured(error=error, bound=EXACT, note=f"{len(state)} tensors, worst {where}")


@law("checkpoint")
def loads_into_every_rank(lab: Lab) -> Measured:
    """After loading, rows forwarded on any rank see the loaded parameters and buffers."""
    problem = replace(PROBLEM, evaluation_rows=4 * lab.world.size)
    trained = lab.job(problem).train(3)
    state = checkpoint.Tensors(trained.state | {"model/scale": torch.tensor(2.0)})
    fresh, alone = lab.job(problem), lab.alone(problem)
    for job in (fresh, alone):
        job.hooks.load_checkpoint(job.run, state, trained.progress)
    error = float((fresh.evaluate().outputs["loss"] - alone.evaluate().outputs["loss"]).abs().max())
    return Measured(error=error, bound=FP32, note="largest difference of a row's loss")


@law("checkpoint")
def into_single(lab: Lab) -> Measured:
    """Saved under the strategy, continued in one process: as if one process had done it all."""
    first = lab.job(PROBLEM, schedule=LINEAR)
    path = first.save(first.train(HALF).progress)
    return _continued(lab.alone(PROBLEM, schedule=LINEAR), path)


@law("checkpoint")
def from_single(lab: Lab) -> Measured:
    """Saved in one process, continued under the strategy."""
    alone = lab.alone(PROBLEM, schedule=LINEAR)
    path = alone.save(alone.train(HALF).progress)
    paths = lab.share(str(path))
    return _continued(lab.job(PROBLEM, schedule=LINEAR), Path(paths[0]))


def _continued(job: Job, path: Path) -> Measured:
    """Load ``path`` into ``job``, train to the end, and compare with one uninterrupted process."""
    progress, _ = checkpoint.load(job.run, job.hooks, path)
    rest = job.train(STEPS - HALF, progress)
    whole = solve(PROBLEM, job.run.config, STEPS)
    return distance(rest, replace(whole, losses=whole.losses[HALF:], norms=whole.norms[HALF:]))
