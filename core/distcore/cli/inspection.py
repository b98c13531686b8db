"""``distcore checkpoint``: list checkpoints, verify them, compare two, export
one for other programs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from distcore.checkpoint.choice import choose
from distcore.checkpoint.distance import difference
from distcore.checkpoint.job_state import saved_judgment, saved_progress
from distcore.checkpoint.manifest import MANIFEST
from distcore.checkpoint.reader import Checkpoint
from distcore.checkpoint.retention import checkpoints_in
from distcore.errors import CheckpointError, ConfigError
from distcore.jobs.export import export_checkpoint

DAMAGED = 2
"""Exit code if a checkpoint is damaged. It is 1 if two checkpoints differ, as
with ``diff`` and ``cmp``.
"""
WORST = 5
"""Tensors that ``diff`` names where more differ."""


def run(given: argparse.Namespace) -> int:
    """Run one action of ``distcore checkpoint`` and return the exit code;
    raises ConfigError or CheckpointError.
    """
    action = given.action
    paths = given.paths
    wanted = 2 if given.action == "diff" else 1
    if len(paths) != wanted:
        raise ConfigError(f"checkpoint {action}: expected {wanted} path(s), found {len(paths)}")
    if (action == "export") != (given.to is not None):
        raise ConfigError(
            f"checkpoint {action}: {'needs' if action == 'export' else 'takes no'} --to DIR"
        )
    for flag in ("task", "step", "best", "merged", "format", "dtype", "all"):
        belongs = "diff" if flag == "all" else "export"
        if getattr(given, flag) not in (None, False) and action != belongs:
            raise ConfigError(f"checkpoint {action}: --{flag} belongs to {belongs}")
    if action == "export":
        path, chosen = choose(paths[0], given.step, given.best)
        print(f"exporting {chosen}", file=sys.stderr)
        export_checkpoint(
            path,
            given.to,
            given.task,
            given.merged,
            given.format or "huggingface",
            given.dtype or "fp32",
        )
        print(f"exported to {given.to}")
        return 0
    actions: dict[str, Callable[..., int]] = {
        "ls": ls,
        "verify": verify,
        "diff": partial(diff, every=given.all),
    }
    return actions[action](*paths)


def ls(path: Path) -> int:
    """Print one line per checkpoint of a run, the newest last. ``path``: a run
    folder or a checkpoint.
    """
    for checkpoint in _checkpoints(path):
        print(_line(checkpoint))
    return 0


def verify(path: Path) -> int:
    """Read every byte of a checkpoint, or of all checkpoints of a run; print for each
    whether it is whole.
    """
    code = 0
    for checkpoint in _checkpoints(path):
        try:
            Checkpoint(checkpoint).verify()
            print(f"{checkpoint.name}  whole")
        except CheckpointError as error:
            print(f"{checkpoint.name}  {error}")
            code = DAMAGED
    return code


def diff(first: Path, second: Path, every: bool = False) -> int:
    """Print how many tensors of two checkpoints differ, and those that differ most; all
    of them with ``every``.
    """
    one, other = (Checkpoint(choose(target)[0]) for target in (first, second))
    lines = [line for _, line in sorted(differing(one, other), reverse=True)]
    shown = lines if every else lines[:WORST]
    print("".join(f"{line}\n" for line in shown), end="")
    more = (
        f"; the {len(shown)} that differ most are above, --all shows each"
        if len(shown) < len(lines)
        else ""
    )
    print(f"{len(lines)} of {len(set(one) | set(other))} tensors differ{more}")
    return 1 if lines else 0


def differing(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[float, str]]:
    """Yield, for each tensor that differs, the largest difference and a line of text about it."""
    for name in sorted(set(one) | set(other)):
        if name not in one or name not in other:
            yield math.inf, f"{name}  only in {(one if name in one else other).path}"
            continue
        a, b = one[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield math.inf, f"{name}  {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"
        elif not torch.equal(a, b):
            error = difference(b, a)
            yield (
                error.largest,
                f"{name}  largest difference {error.largest:.3g}, relative {error.relative:.3g}",
            )


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint ``path``, or those of a run folder, the oldest first."""
    if (path / MANIFEST).is_file():
        return [path]
    newest_first = checkpoints_in(path / "checkpoints")
    if not newest_first:
        raise CheckpointError(f"{path}: no checkpoints there")
    return newest_first[::-1]


def _line(path: Path) -> str:
    """Return a checkpoint's line in a list: its position, its size, and its metric if the best."""
    try:
        checkpoint = Checkpoint(path)
        job_state = checkpoint.job_state()
        progress = saved_progress(job_state, path)
        judgment = saved_judgment(job_state, path)
    except CheckpointError as error:
        return f"{path.name}  damaged: {error}"
    mark = ""
    if judgment:
        best_step, metric, value = judgment
        if best_step == progress.step:
            mark = f"  best {metric} {value:.4f}"
    size = sum(file.size for file in checkpoint.manifest.files.values())
    return (
        f"{path.name}  epoch {progress.epoch}  samples {progress.samples}  "
        f"{len(checkpoint.manifest.tensors)} tensors  {size / 2**20:.1f} MiB{mark}"
    )
