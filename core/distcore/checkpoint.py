"""Checkpoints: named tensors as safetensors, the rest as JSON, committed by one rename.

``step-NNNNNNNN/`` holds ``model.safetensors``, ``optimizer.safetensors`` and ``state.json``. No pickle, no strategy,
no world size: hooks deliver and take tensors by name, and random state is a function of seed, step and rank.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from distcore.contract import Progress, Run
from distcore.errors import CheckpointError
from distcore.hooks import Hooks

FORMAT = 1
PARTS = ("model", "optimizer")
JOB = ("task", "data", "eval_data", "eval_fraction", "global_batch_size", "seed", "model", "max_seq_len")
"""What must be the same for a run to go on exactly."""


def save(run: Run, hooks: Hooks, progress: Progress, folder: Path, facts: dict[str, Any]) -> Path:
    """Write ``folder/step-NNNNNNNN`` whole or not at all; every rank calls, the main rank writes. Returns the path."""
    state = hooks.save_checkpoint(run)
    final = folder / f"step-{progress.step:08d}"
    if run.world.is_main and not final.exists():
        aside = folder / f".writing-{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for part in PARTS:
            tensors = {
                name.removeprefix(f"{part}/"): tensor.cpu().contiguous()
                for name, tensor in state.items()
                if name.startswith(f"{part}/") and isinstance(tensor, Tensor)
            }
            save_file(tensors, aside / f"{part}.safetensors")
        (aside / "state.json").write_text(json.dumps(_small_state(run, progress) | facts, indent=1))
        for file in aside.iterdir():
            _sync(file)
        _sync(aside)
        aside.rename(final)
        _sync(folder)
    return final


def _small_state(run: Run, progress: Progress) -> dict[str, Any]:
    scheduler = run.scheduler.state_dict() if run.scheduler else {}
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "scheduler": {key: value for key, value in scheduler.items() if not key.startswith("lr_lambdas")},
        "learning_rates": [group["lr"] for group in run.optimizer.param_groups] if run.optimizer else [],
        "scaler": run.scaler.state_dict() if run.scaler else {},
        "job": job_of(run),
    }


def job_of(run: Run) -> dict[str, Any]:
    """The part of the config that a resumed run must share with the one that was interrupted."""
    return {key: getattr(run.config, key) for key in JOB} | {"total_steps": run.total_steps}


def find(resume: str, out: Path) -> Path | None:
    """Return the checkpoint that ``--resume`` means; ``None`` if ``auto`` finds none, so that a run starts afresh."""
    if resume == "auto":
        found = sorted((out / "checkpoints").glob("step-*/state.json"))
        return found[-1].parent if found else None
    path = Path(resume)
    if not (path / "state.json").is_file():
        raise CheckpointError(f"resume = {resume!r}: no checkpoint there (a folder step-NNNNNNNN with state.json)")
    return path


def load(run: Run, hooks: Hooks, path: Path) -> tuple[Progress, dict[str, Any]]:
    """Put the checkpoint at ``path`` into the run; return its progress and the small state beside it."""
    small = read_small_state(path)
    differing = [key for key, value in job_of(run).items() if small["job"].get(key) != value]
    if differing:
        key = differing[0]
        raise CheckpointError(
            f"resume = {str(path)!r}: {key} was {small['job'].get(key)!r} and is {job_of(run)[key]!r}; "
            "the run would not go on exactly"
        )
    hooks.load_checkpoint(run, read_tensors(path, PARTS))
    if run.scheduler is not None:
        run.scheduler.load_state_dict(small["scheduler"])
    if run.optimizer is not None:
        for group, rate in zip(run.optimizer.param_groups, small["learning_rates"], strict=True):
            group["lr"] = rate
    if run.scaler is not None:
        run.scaler.load_state_dict(small["scaler"])
    return Progress(**small["progress"]), small


def read_small_state(path: Path) -> dict[str, Any]:
    """Read ``state.json``; raises CheckpointError where it is damaged or of another format."""
    try:
        small: dict[str, Any] = json.loads((path / "state.json").read_text())
        version = small["format"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / 'state.json'}: damaged: {error}") from None
    if version != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {version}, this distcore reads {FORMAT}")
    return small


class Tensors(dict[str, Tensor]):
    """A checkpoint that is read as a whole."""

    def piece(self, name: str, start: int, count: int) -> Tensor:
        return self[name].reshape(-1)[start : start + count]


def read_tensors(path: Path, parts: tuple[str, ...]) -> Tensors:
    """Read the named tensors of ``path``, on the CPU; raises CheckpointError with the file's name if damaged."""
    state = Tensors()
    for part in parts:
        file = path / f"{part}.safetensors"
        try:
            state.update({f"{part}/{name}": tensor for name, tensor in load_file(file).items()})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
    return state


def prune(folder: Path, keep: set[str]) -> None:
    """Remove the checkpoints whose names are not in ``keep``, each renamed first so that it is never half there."""
    for path in folder.glob("step-*"):
        if path.name not in keep:
            gone = path.rename(folder / f".removing-{path.name}")
            shutil.rmtree(gone)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
