"""What a person asks of checkpoints: which are there, are they whole, do two differ; and as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distcore.checkpoint.distance import differing
from distcore.checkpoint.manifest import MANIFEST
from distcore.checkpoint.reader import Checkpoint
from distcore.checkpoint.retention import checkpoints_in, problem_of
from distcore.errors import CheckpointError, ConfigError
from distcore.jobs.export import export

DAMAGED = 2
"""Exit status where a checkpoint is damaged; 1 where two differ, as ``diff`` and ``cmp`` have it."""


def run(action: str, paths: list[Path], to: Path | None) -> int:
    """Do one action of ``distcore checkpoint``; return the exit status."""
    wanted = 2 if action == "diff" else 1
    if len(paths) != wanted:
        raise ConfigError(f"checkpoint {action}: expected {wanted} path(s), found {len(paths)}")
    if (action == "export") != (to is not None):
        raise ConfigError("checkpoint: --to DIR belongs to export, and export needs it")
    if to is not None:
        export(_one(paths[0]), to)
        print(f"exported to {to}")
        return 0
    actions: dict[str, Callable[..., int]] = {"ls": ls, "verify": verify, "diff": diff}
    return actions[action](*paths)


def ls(path: Path) -> int:
    """Print a line for each checkpoint of a run, the newest last."""
    found = [path] if (path / MANIFEST).is_file() else checkpoints_in(path / "checkpoints")[::-1]
    if not found:
        raise CheckpointError(f"{path}: no checkpoints there")
    for one in found:
        print(f"{one.name}  damaged: {problem}" if (problem := problem_of(one)) else _line(Checkpoint(one)))
    return 0


def verify(path: Path) -> int:
    """Read every byte of a checkpoint, or of all of a run; say which are whole."""
    found = [path] if (path / MANIFEST).is_file() else checkpoints_in(path / "checkpoints")[::-1]
    if not found:
        raise CheckpointError(f"{path}: no checkpoints there")
    worst = 0
    for one in found:
        try:
            Checkpoint(one).verify()
            print(f"{one.name}  whole")
        except CheckpointError as error:
            print(f"{one.name}  {error}")
            worst = DAMAGED
    return worst


def diff(first: Path, second: Path) -> int:
    """Print the tensors in which two checkpoints differ, the most different first."""
    one, other = Checkpoint(_one(first)), Checkpoint(_one(second))
    lines = sorted(differing(one, other), reverse=True)
    for _, line in lines:
        print(line)
    print(f"{len(lines)} of {len(set(one) | set(other))} tensors differ")
    return 1 if lines else 0


def _line(checkpoint: Checkpoint) -> str:
    job_state, files = checkpoint.job_state(), checkpoint.manifest.files.values()
    progress, best = job_state.get("progress", {}), job_state.get("best")
    mark = f"  best {best['metric']} {best['value']:.4f}" if best and best["step"] == progress.get("step") else ""
    size = sum(file.size for file in files) / 2**20
    return (
        f"{checkpoint.path.name}  epoch {progress.get('epoch')}  samples {progress.get('samples')}  "
        f"{len(checkpoint.manifest.tensors)} tensors  {size:.1f} MiB{mark}"
    )


def _one(path: Path) -> Path:
    """A checkpoint, or the newest of a run folder."""
    if (path / MANIFEST).is_file():
        return path
    found = checkpoints_in(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path}: no checkpoint there")
    return found[0]
