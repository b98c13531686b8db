"""The small state of a checkpoint: progress, schedule, scaler, and the job that it belongs to.

Random state needs no saving: the order of the data and every dropout mask are functions of seed, step, rank and
micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch.optim.lr_scheduler import LambdaLR

from distcore.config import RunConfig
from distcore.errors import CheckpointError, nearest
from distcore.plugin.contract import Progress, Run
from distcore.plugin.task import Dataset, Identified

FIXED = (
    "task", "eval_fraction", "columns", "global_batch_size", "seed", "loader.length_grouping", "loader.window",
    "optimizer.name",
)  # fmt: skip
"""Without these the saved position in the data, or the saved tensors, would mean something else."""
CHANGEABLE = (
    "model", "max_seq_len", "dropout", "lr", "optimizer", "schedule", "clip", "precision", "gradient_checkpointing",
)  # fmt: skip
"""With another value the run goes on, but not as the uninterrupted one would have."""


def fingerprint(dataset: Dataset) -> str:
    """Tell one set of training rows from another, wherever its file lies.

    By length and items of every row and, where the data set can tell, by what the rows say. Reads no row.
    """
    digest = hashlib.sha256()
    for column in (dataset.lengths, dataset.items):
        digest.update(np.ascontiguousarray(column, dtype="<i8").data)
    if isinstance(dataset, Identified):
        digest.update(dataset.content.encode())
    return digest.hexdigest()


def small_state(run: Run, progress: Progress) -> dict[str, Any]:
    """What goes into state.json, as JSON values."""
    return {
        "progress": asdict(progress),
        "learning_rates": [group["lr"] for group in run.optimizer.param_groups] if run.optimizer else [],
        "scaler": run.loss_scale.state_dict() if run.loss_scale else {},
        "total_steps": run.total_steps,
        "config": run.config.model_dump(mode="json"),
    }


def config_in(small: dict[str, Any], path: Path) -> RunConfig:
    """The config of the run that wrote the checkpoint at ``path``."""
    try:
        return RunConfig.model_validate(small.get("config"))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(f"{path / 'state.json'}: config.{where}: not one that this distcore knows") from None


def job_of(config: RunConfig, total_steps: object) -> dict[str, Any]:
    """What a resumed run must share with the one that was interrupted."""
    tree = config.model_dump(mode="json")
    return {key: _at(tree, key) for key in (*FIXED, *CHANGEABLE)} | {"total_steps": total_steps}


def check_job(run: Run, small: dict[str, Any], path: Path, data: str | None) -> None:
    """Raise CheckpointError, naming the difference, if the checkpoint is of another job than ``run``."""
    saved, mine = job_of(config_in(small, path), small.get("total_steps")), job_of(run.config, run.total_steps)
    accepted = set(run.config.resume_changed or ())
    possible = [key for key in mine if key not in FIXED]
    for key in sorted(accepted.difference(possible)):
        hint = f"{nearest(key, possible)} (these are: {', '.join(possible)})"
        raise CheckpointError(f"--resume-changed {key}: nothing that a resumed run may change{hint}")
    for key, value in mine.items():
        if saved[key] != value and key not in accepted:
            then = "resume with the same" if key in FIXED else f"accept that with --resume-changed {key}"
            raise CheckpointError(
                f"resume = {str(path)!r}: {key} was {saved[key]!r} and is {value!r}: "
                f"the run would not go on exactly; {then}"
            )
    # Another vocabulary or maximum length tells the same rows in other tokens.
    if data is not None and not accepted & {"model", "max_seq_len"} and small.get("data") not in (data, None):
        raise CheckpointError(f"resume = {str(path)!r}: it was saved with other training data; resume with the same")


def progress_in(small: dict[str, Any], path: Path) -> Progress:
    """How far the run was that wrote the checkpoint at ``path``."""
    with _explained(path):
        return Progress(**{field.name: _count(small["progress"][field.name]) for field in fields(Progress)})


def restore(run: Run, small: dict[str, Any], progress: Progress, path: Path) -> None:
    """Put schedule and scaler where they were. Parameter groups may be other ones."""
    with _explained(path):
        rates = [float(rate) for rate in small["learning_rates"]]
        _restore_scale(run, small["scaler"])
    if isinstance(run.scheduler, LambdaLR):
        rates = _wind(run.scheduler, progress.step)
    constant = run.scheduler is None and "lr" in (run.config.resume_changed or ())
    if run.optimizer is not None and rates and not constant and "schedule" not in run.capabilities.owns:
        for index, group in enumerate(run.optimizer.param_groups):
            group["lr"] = rates[min(index, len(rates) - 1)]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what a state.json of another form raises into one line with its name."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / 'state.json'}: damaged: {type(error).__name__}: {error}") from None


def _wind(scheduler: LambdaLR, step: int) -> list[float]:
    """Set a schedule, which is a function of the step, to ``step``; return the learning rates there."""
    rates = [float(base) * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    position = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | position)
    return rates


def _restore_scale(run: Run, saved: dict[str, Any]) -> None:
    """Set the loss scale to what is saved of it, maybe by another's scaler; nothing is saved of a run without fp16."""
    if run.loss_scale is not None and saved:
        kept = run.loss_scale.state_dict()
        run.loss_scale.load_state_dict({key: type(kept[key])(saved[key]) for key in kept if key in saved})


def _at(tree: dict[str, Any], dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree[key]
    return tree


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a count, found {value!r}")
    return value
