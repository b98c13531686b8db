"""The laboratory of an extension's cases: small runs in processes of their own, with the
extension and without it.
"""

from __future__ import annotations

import io
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from distcore import DistcoreError, RunConfig, launch, load_config, train
from distcore.checkpoint import Checkpoint, find
from distcore.launchers.processes import close_stderr
from distcore.registry import load
from distcore.testing import change_random_state
from distcore_workbench.kits.plugin_checks import drawn
from distcore_workbench.kits.points import Points

T = TypeVar("T")
STEPS, HALF, LIMIT = 6, 3, 60.0
"""Steps of a run, a step with a checkpoint, and the seconds that runs may take."""


@dataclass(kw_only=True)
class Trained:
    """A run, as its process saw it."""

    tensors: dict[str, Tensor]
    """Of the last checkpoint."""
    state: Any
    """What the extension saved there; ``None`` without it."""
    evaluation: dict[str, Any]
    """Of the report."""
    numbers: list[str]
    """The next random numbers after the run."""
    left: set[str] = field(default_factory=set)
    """Threads, processes, files and settings of the process after the run."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Calls of c10d, by name."""


@dataclass
class ExtensionLab:
    """The extension, by its name, and the config of a small run."""

    name: str
    """As in the config: of an entry point, or ``file.py:Class``."""
    settings: Mapping[str, Any]
    """Config keys by dotted name."""
    folder: Path
    """For run folders."""

    @cached_property
    def cls(self) -> Any:
        """The class of the extension."""
        return load("extensions", self.name)

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases that the extension declares not to keep, with reasons."""
        declared: Mapping[str, str] = getattr(self.cls, "exempt", {})
        return declared

    def config(
        self,
        run: str,
        on: bool,
        changes: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """Return the config of a run with or without the extension; all others are off."""
        prefix = f"extensions.{self.name}."
        own_options: dict[str, Any] = {}
        other_settings: dict[str, Any] = {}
        for key, value in self.settings.items():
            if key.startswith(prefix):
                own_options[key.removeprefix(prefix)] = value
            else:
                other_settings[key] = value
        own_options |= options or {}
        switch: bool | dict[str, Any] = False
        if on:
            switch = own_options or True
        keys: dict[str, Any] = {
            "device": "cpu",
            "nproc": 1,
            "max_steps": STEPS,
            "save_every": HALF,
            "eval_every": HALF,
            "log_every": 2,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "checkpoints.keep_last": STEPS,
            "out": str(self.folder / run),
            "extensions": dict.fromkeys(RunConfig().extensions, False) | {self.name: switch},
        }
        return load_config(None, keys | other_settings | dict(changes or {}))

    @property
    def pair(self) -> tuple[Trained, Trained]:
        """A run without the extension, and then one with it in the same process.

        Raises DistcoreError if it fails.
        """
        # Kept as a value: each law that asks raises it, and no law runs it again.
        if isinstance(self._pair, DistcoreError):
            raise self._pair
        return self._pair

    @cached_property
    def _pair(self) -> tuple[Trained, Trained] | DistcoreError:
        try:
            return self.elsewhere(self._pair_here)
        except DistcoreError as error:
            return error

    def _pair_here(self) -> tuple[Trained, Trained]:
        """Return the two runs, after all that a first run of this process does alone."""
        # Libraries draw numbers at their import, and start threads at their first use.
        _ = self.cls
        self.train("warm", on=False)
        return self.train("off", on=False), self.train("on", on=True)

    @cached_property
    def two_ranks(self) -> tuple[Trained, Trained]:
        """A run of two ranks without the extension, and one with it.

        Where it keeps a state the other run has one, too: ranks compare states before each save.
        """
        train_without = partial(self._count, "two-off", False)
        train_with = partial(self._count, "two-on", True)
        return self.elsewhere(train_without, nproc=2), self.elsewhere(train_with, nproc=2)

    def elsewhere(self, work: Callable[[], T], nproc: int = 1) -> T:
        """Run a function in new ranks; return the answer of the first one."""
        return launch(work, nproc=nproc, timeout=LIMIT)[0]

    def train(
        self,
        run: str,
        on: bool,
        changes: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Trained:
        """Train in this process, in an empty folder as the current one."""
        here = self.folder / f"{run}-cwd-{os.environ.get('RANK', 0)}"
        here.mkdir()
        config = self.config(run, on, changes, options)
        with (
            chdir(here),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            change_random_state(0),
        ):
            report = train(config, Points())
            numbers = drawn()
        path = find("auto", self.folder / run)
        assert path is not None  # every run ends with a checkpoint
        checkpoint = Checkpoint(path)
        states = checkpoint.job_state().get("states", {})
        left = _surroundings()
        # Only the run folder is for files.
        left.update(f"{path.name} in the current folder" for path in here.iterdir())
        return Trained(
            tensors={name: checkpoint[name] for name in checkpoint},
            state=states.get(self.name),
            evaluation=dict(report["evaluation"]),
            numbers=numbers,
            left=left,
        )

    def _count(self, run: str, on: bool) -> Trained:
        """Train with each collective counted; every rank calls."""
        changes: dict[str, Any] = {"strategy": "ddp", "nproc": 2}
        if not on and hasattr(self.cls, "state"):
            changes["extensions"] = {f"{__file__}:Keeper": True}
        with close_stderr(), torch.autograd.profiler.profile(use_kineto=False) as profile:
            trained = self.train(run, on, changes)
        trained.collectives = Counter()
        for event in profile.function_events or []:
            if event.name.startswith("c10d::"):
                # In place or not, it is one collective.
                trained.collectives[event.name.removeprefix("c10d::").rstrip("_")] += 1
        return trained

    def error(self, run: str, on: bool) -> str:
        """Return the error of a run whose task fails, in this process."""
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                train(self.config(run, on), Points(fails=True))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


class Keeper:
    """An extension that does nothing but keep a state."""

    def state(self) -> int:
        """Return it."""
        return 0

    def load_state(self, state: int) -> None:
        """Forget it."""


def extension_lab(name: str, settings: Mapping[str, Any], folder: Path) -> ExtensionLab:
    """Return the lab of an extension, by its name or as ``file.py:Class``.

    Raises DistcoreError if it is not there.
    """
    file, colon, class_name = name.rpartition(":")
    if colon:
        # Absolute: runs have another current folder.
        name = f"{Path(file).absolute()}:{class_name}"
    lab = ExtensionLab(name, settings, folder)
    _ = lab.cls
    return lab


def _surroundings() -> set[str]:
    """Return what a run may leave behind in its process, as text."""
    process = psutil.Process()
    left = {f"thread {thread.name}" for thread in threading.enumerate() if thread.is_alive()}
    left |= {f"process {child.name()}" for child in process.children(recursive=True)}
    left |= {f"open file {file.path}" for file in process.open_files()}
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            left.add(f"handler of signal {number}")
    return left
