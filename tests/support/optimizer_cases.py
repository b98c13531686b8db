"""Each optimizer under a strategy against one process: ten steps, and checkpoints
that cross over half-way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distcore import checkpoint
from distcore.config import RunConfig
from distcore.plugin.strategy.contract import Progress
from distcore.testing.lab import Job, Lab, Trained
from distcore.testing.laws.gradient import STEPS
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.reference import largest_difference
from distcore.testing.subject import Subject

HALF = STEPS // 2
GROUPS: dict[str, Any] = {"groups": [{"match": "head", "lr_scale": 2.0}], "layer_decay": 0.8}
"""Every optimizer is tried with rates of several sizes."""
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"eps": 1e-2, "weight_decay": 0.1},
    "adamw8bit": {"eps": 1e-2, "weight_decay": 0.1},
    "adam": {"eps": 1e-2, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adafactor": {"weight_decay": 0.1},
    "muon": {"eps": 1e-2},
    "lion": {"weight_decay": 0.1},
}
"""Large eps, so that a wrong scale of the gradient shows in Adam's step."""
PROBLEM = Problem(tied=True)


def errors_of(
    strategy: str, options: dict[str, Any], names: list[str], folder: Path
) -> dict[str, dict[str, float]]:
    """In each rank: the largest errors of each optimizer under the strategy, against the same
    run in one process.
    """
    config = RunConfig(
        strategy=strategy, strategy_options=options, nproc=2, device="cpu", timeout=60
    )
    with lab_of(Subject(config=config, cases=()), folder) as lab:
        return {
            name: _errors(lab, {"optimizer": {"name": name} | OPTIONS[name] | GROUPS})
            for name in names
        }


def _errors(lab: Lab, changes: dict[str, Any]) -> dict[str, float]:
    alone = lab.build_alone(PROBLEM, **changes)
    half = alone.save(_done(alone, HALF))
    whole = lab.build_alone(PROBLEM, **changes).train(STEPS)
    mine = lab.job(PROBLEM, **changes)
    first = mine.train(HALF)
    rest = mine.train(STEPS - HALF, first.progress)
    there, back = lab.job(PROBLEM, **changes), lab.build_alone(PROBLEM, **changes)
    return {
        "losses": _worst(first.losses + rest.losses, whole.losses),
        "norms": _worst(first.norms + rest.norms, whole.norms),
        "tensors": _state(rest, whole),
        "from single": _state(_continued(there, Path(lab.share(str(half))[0])), whole),
        "into single": _state(_continued(back, mine.save(first.progress)), whole),
    }


def _done(job: Job, steps: int) -> Progress:
    return job.train(steps).progress


def _continued(job: Job, path: Path) -> Trained:
    progress, _ = checkpoint.load(job.run, job.hooks, path)
    return job.train(STEPS - HALF, progress)


def _state(actual: Trained, expected: Trained) -> float:
    """The largest relative distance of a tensor; infinite where there is one more or one less."""
    return (
        largest_difference(actual.state, expected.state)[0]
        if actual.state.keys() == expected.state.keys()
        else float("inf")
    )


def _worst(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))
