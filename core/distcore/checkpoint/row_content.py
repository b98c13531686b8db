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
"""Seconds that a run waits for the digest before its first step. Afterward a process
reads the remaining rows.
"""


class RowContent:
    """The digest of all rows of a dataset, computed at the start of a run, or in another
    process if that is slow.
    """

    def __init__(self, dataset: Dataset, seconds: float = SECONDS) -> None:
        """Read rows for at most ``seconds``."""
        self._rows, self._digest = row_bytes_of(dataset), hashlib.sha256()
        self._answer: Connection | None = None
        self._known: str | None = None
        self._read(time.monotonic() + seconds)

    @property
    def known(self) -> str | None:
        """The digest; ``None`` if rows are still to be read, or for a dataset that has a
        digest of its own.
        """
        if self._answer is not None and self._answer.poll():
            try:
                self._known = self._answer.recv()
            except EOFError:  # the process failed, such as at rows on an accelerator
                self._known = None
            self._answer = None
        return self._known

    def gather(self, run: Run, hooks: Hooks) -> str | None:
        """Return the digest if every rank has one already, as machines differ in
        speed. Every rank calls.
        """
        if self._rows is None:
            return None
        known = torch.tensor([self._known is not None], device=run.world.device)
        return self._known if hooks.gather_outputs(run, {"known": known})["known"].all() else None

    def matches(self, job_state: Mapping[str, Any]) -> bool:
        """Return False if a checkpoint was saved with other rows; reads all rows if
        it has their digest.
        """
        saved = job_state.get("rows")
        if saved is not None:
            self._read(float("inf"))
        return saved is None or self._known in (saved, None)

    def continue_in_background(self) -> None:
        """Read the remaining rows in a process of its own: a thread would share
        the dataset's open files.
        """
        if self._known is None and self._rows is not None:
            self._answer, sender = get_context("fork").Pipe(duplex=False)
            get_context("fork").Process(
                target=self._serve, args=(sender, os.getpid()), daemon=True
            ).start()
            sender.close()

    def _serve(self, sender: Connection, parent: int) -> None:
        # an inherited process group that is freed here would wait for threads that a fork
        # does not copy
        gc.freeze()
        os.nice(19)
        torch.set_num_threads(1)
        # a rank that was killed leaves no reader behind
        while self._known is None and os.getppid() == parent:
            self._read(time.monotonic() + 1)
        sender.send(self._known)

    def _read(self, deadline: float) -> None:
        for part in self._rows or ():
            self._digest.update(part)
            if time.monotonic() > deadline:
                return
        if self._rows is not None:
            self._known = self._digest.hexdigest()
