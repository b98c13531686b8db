"""Checkpoints of other trainers.

A plugin reads one, and the run continues from a checkpoint of its own that is made of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from distcore import registry
from distcore.checkpoint import write_checkpoint
from distcore.config import RunConfig
from distcore.distributed.agreement import broadcast_from_main, on_all_ranks
from distcore.errors import CheckpointError, ConfigError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks

log = logging.getLogger("distcore")


class Reader(Protocol):
    """An entry point of ``distcore.checkpoints``: a module or object with these two functions."""

    def knows(self, path: Path) -> bool:
        """Return True if this reads the file or folder, as far as names of files tell."""

    def read(
        self, path: Path, config: RunConfig, model: nn.Module, rows: int
    ) -> tuple[dict[str, Tensor], dict[str, Any], str]:
        """Return whole tensors by neutral name, the values of state.json, and a line about both.

        ``config`` is the resumed run's, ``model`` is on the meta device, ``rows`` counts the
        training rows. Raises DistcoreError, one line, if the run would not go on as the other one.
        """


def reader_of(resume: str | None) -> Reader | None:
    """Return the reader of the checkpoint that ``--resume`` names.

    ``None`` for a checkpoint of distcore, and for one that no reader knows.
    """
    if resume and resume != "auto":
        for name in registry.entries("checkpoints"):
            reader: Reader = registry.load("checkpoints", name)
            if reader.knows(Path(resume)):
                return reader
    return None


def adopt(run: Run, hooks: Hooks, meta_model: Callable[[], nn.Module]) -> str | None:
    """Return the path that the run resumes from, or ``auto``.

    The checkpoint of another trainer is first written anew, as a checkpoint of this run. Every rank
    calls. Raises CheckpointError on all ranks.
    """
    if not run.config.resume or run.config.resume == "auto":
        return run.config.resume

    def write() -> Path | None:
        source = Path(str(run.config.resume))
        try:
            reader = reader_of(run.config.resume)
            if reader is None:
                return None
            tensors, job_state, line = reader.read(source, run.config, meta_model(), run.rows)
        except ConfigError as error:
            # This rank alone reads, and only a CheckpointError reaches the others.
            raise CheckpointError(str(error)) from error
        step = job_state["progress"]["step"]
        path = Path(str(run.config.out)) / "checkpoints" / f"step-{step:08d}"
        write_checkpoint(path, tensors, job_state)
        log.info("%s: %s", path, line)
        return path

    written = on_all_ranks(run, hooks, "resume", write if run.world.is_main else None)
    return broadcast_from_main(run, hooks, str(written or run.config.resume))
