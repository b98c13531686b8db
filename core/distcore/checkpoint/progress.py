"""The small state of a checkpoint: progress, schedule, scaler, and the job that it belongs to.

Random state needs no saving: the order of the data and every dropout mask are functions of seed, step, rank and
micro-batch.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from distcore.contract import Progress, Run
from distcore.errors import CheckpointError

JOB = ("task", "data", "eval_data", "eval_fraction", "global_batch_size", "seed", "model", "max_seq_len")
"""What must be the same for a run to go on exactly."""


def small_state(run: Run, progress: Progress) -> dict[str, Any]:
    """What goes into state.json, as JSON values."""
    scheduler = run.scheduler.state_dict() if run.scheduler else {}
    return {
        "progress": asdict(progress),
        "scheduler": {key: scheduler[key] for key in ("last_epoch", "_step_count") if key in scheduler},
        "learning_rates": [group["lr"] for group in run.optimizer.param_groups] if run.optimizer else [],
        "scaler": run.scaler.state_dict() if run.scaler else {},
        "job": job_of(run),
    }


def job_of(run: Run) -> dict[str, Any]:
    """The part of the config that a resumed run must share with the one that was interrupted."""
    return {key: getattr(run.config, key) for key in JOB} | {"total_steps": run.total_steps}


def check_job(run: Run, small: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError, naming the difference, if the checkpoint is of another job than ``run``."""
    saved, mine = small.get("job", {}), job_of(run)
    for key in mine:
        if saved.get(key) != mine[key]:
            raise CheckpointError(
                f"resume = {str(path)!r}: {key} was {saved.get(key)!r} and is {mine[key]!r}; "
                "the run would not go on exactly"
            )


def restore(run: Run, small: dict[str, Any], path: Path) -> Progress:
    """Put schedule and scaler where they were; return the progress. Parameter groups may be other ones."""
    try:
        progress = Progress(**{field.name: _count(small["progress"][field.name]) for field in fields(Progress)})
        rates = [float(rate) for rate in small["learning_rates"]]
        if run.scheduler is not None:
            known = run.scheduler.state_dict()
            groups = len(known["base_lrs"])
            last = {"_last_lr": [*rates, *rates[-1:] * groups][:groups]}
            run.scheduler.load_state_dict(
                known | {k: _count(v) for k, v in small["scheduler"].items() if k in known} | last
            )
        if run.optimizer is not None and rates:
            for index, group in enumerate(run.optimizer.param_groups):
                group["lr"] = rates[min(index, len(rates) - 1)]
        if run.scaler is not None and small["scaler"]:
            run.scaler.load_state_dict({key: small["scaler"][key] for key in run.scaler.state_dict()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / 'state.json'}: damaged: {type(error).__name__}: {error}") from None
    return progress


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a count, found {value!r}")
    return value
