"""Choose a checkpoint of a run for a command: the newest, the best, or a given step's."""

from __future__ import annotations

from pathlib import Path

from distcore.checkpoint.job_state import saved_judgment
from distcore.checkpoint.manifest import MANIFEST
from distcore.checkpoint.reader import Checkpoint, weights_of
from distcore.checkpoint.retention import checkpoints_in, newest_whole
from distcore.errors import CheckpointError

EXPORTED = ("config.json", "adapter_config.json", "model.safetensors", ".metadata")
"""Files that show that an exporter or another library wrote a folder: no run has them."""
Judgment = tuple[int, str, float]
"""Step, metric and value of the best evaluation."""


def choose(target: Path, step: int | None = None, best: bool = False) -> tuple[Path, str]:
    """Return a checkpoint, and a description of the choice for the user.

    ``target`` is a checkpoint or a run folder. In a run folder the choice is the newest complete
    checkpoint, the ``best``, or that of ``step``. Raises CheckpointError, one line, if it is
    missing.
    """
    path, words = _chosen(target, step, best)
    averaged = weights_of(Checkpoint(path)) == "ema"
    return path, f"{words} (the EMA of its weights)" if averaged else words


def _chosen(target: Path, step: int | None, best: bool) -> tuple[Path, str]:
    """Return the checkpoint and its description, without what its weights are; see ``choose``."""
    if (target / MANIFEST).is_file():
        if best or step is not None:
            raise CheckpointError(
                f"{target}: is a checkpoint; --best and --step choose one of a run folder"
            )
        return target, target.name
    newest = newest_whole(target / "checkpoints")
    if newest is None:
        exported = next((file for file in EXPORTED if (target / file).is_file()), None)
        if exported:
            raise CheckpointError(
                f"{target}: is an exported model (it has {exported}), which its README.md says how"
                " to use; name the run folder that it was exported from"
            )
        wrong = "holds no checkpoint" if target.exists() else "no such folder"
        raise CheckpointError(f"{target}: {wrong}; expected a run folder or a folder step-NNNNNNNN")
    every = checkpoints_in(target / "checkpoints")
    judged = saved_judgment(Checkpoint(newest).job_state(), newest)
    if best:
        return _best(target, every, judged)
    path = newest if step is None else _of_step(target, every, step)
    words = path.name
    if path == newest:
        words += ", the newest" if newest == every[0] else ", the newest whole one"
    return path, words + _relation_to_best(path, every, judged)


def _of_step(target: Path, every: list[Path], step: int) -> Path:
    """Return the checkpoint of ``step``; raises CheckpointError, with those there are."""
    for path in every:
        if path.name == _name(step):
            return path
    steps = [int(path.name.removeprefix("step-")) for path in reversed(every)]
    there = ", ".join(map(str, steps))
    raise CheckpointError(f"{target}: no checkpoint of step {step} (there are: {there})")


def _best(target: Path, every: list[Path], judged: Judgment | None) -> tuple[Path, str]:
    """Return the best checkpoint, and its description with the metric that judged it."""
    if judged is None:
        raise CheckpointError(
            f"{target}: no best checkpoint: no evaluation was compared (checkpoints.best)"
        )
    step, metric, value = judged
    path = _of_step(target, every, step)
    return path, f"{path.name}, the best by {metric}: {value:.4f}"


def _relation_to_best(path: Path, every: list[Path], judged: Judgment | None) -> str:
    """Return whether ``path`` is the best checkpoint, or which one is; empty if none is left."""
    if judged is None:
        return ""
    step, metric, _ = judged
    if _name(step) not in {other.name for other in every}:
        return ""
    if path.name == _name(step):
        return f", the best by {metric}"
    return f"; the best by {metric} is {_name(step)}: --best"


def _name(step: int) -> str:
    return f"step-{step:08d}"
