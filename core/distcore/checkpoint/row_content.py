"""A digest of all training rows, for datasets whose ``content`` covers only a sample of them."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.datasets import row_bytes_of
from distcore.plugin.task.task import Dataset

SECONDS = 5.0
"""Seconds that a run waits for the digest before its first step; then a process reads the rest."""


class RowContent:
    """The digest of all rows of a dataset, computed at the start of a run, or beside it if slow."""

    def __init__(self, dataset: Dataset, seconds: float = SECONDS) -> None:
        """Read rows for at most ``seconds``."""
        self._rows = row_bytes_of(dataset)
        self._digest = hashlib.sha256()
        self._answer: Connection | None = None
        self._known: str | None = None
        self._read(time.monotonic() + seconds)

    @property
    def known(self) -> str | None:
        """The digest; ``None`` while rows are to be read, or if the dataset has one of its own."""
        if self._answer is not None and self._answer.poll():
            try:
                self._known = self._answer.recv()
            except EOFError:  # the process failed, such as at rows on an accelerator
                self._known = None
            self._answer = None
        return self._known

    def gather(self, run: Run, hooks: Hooks) -> str | None:
        """Return the digest if every rank has it already, as machines differ in speed.

        Every rank calls.
        """
        if self._rows is None:
            return None
        known = torch.tensor([self._known is not None], device=run.world.device)
        all_known = hooks.gather_outputs(run, {"known": known})["known"].all()
        return self._known if all_known else None

    def matches(self, job_state: Mapping[str, Any]) -> bool:
        """Return False if a checkpoint was saved with other rows.

        Reads all rows if the checkpoint has their digest.
        """
        saved = job_state.get("rows")
        if saved is not None:
            self._read(float("inf"))
        return saved is None or self._known in (saved, None)

    def continue_in_background(self) -> None:
        """Read the remaining rows in a process: a thread would share the dataset's open files."""
        if self._known is not None or self._rows is None:
            return
        fork = get_context("fork")
        self._answer, sender = fork.Pipe(duplex=False)
        arguments = (sender, os.getpid())
        fork.Process(target=self._serve, args=arguments, daemon=True).start()
        sender.close()

    def _serve(self, sender: Connection, parent: int) -> None:
        """Read the remaining rows and send the digest; runs in a process of its own."""
        # An inherited process group that is freed here would wait for threads that a fork does not
        # copy.
        gc.freeze()
        os.nice(19)
        torch.set_num_threads(1)
        # A rank that was killed leaves no reader behind.
        while self._known is None and os.getppid() == parent:
            self._read(time.monotonic() + 1)
        sender.send(self._known)

    def _read(self, deadline: float) -> None:
        """Read rows until the digest is known, or ``deadline``."""
        for part in self._rows or ():
            self._digest.update(part)
            if time.monotonic() > deadline:
                return
        if self._rows is not None:
            self._known = self._digest.hexdigest()
