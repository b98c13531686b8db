"""``lm_eval``: the tasks of EleutherAI's evaluation harness, at the end of a run
and every N steps.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from distcore import ConfigError, Datasets, Progress, Report, Run, Task, hookimpl
from distcore.model import use_average
from distcore.registry import is_installed

if TYPE_CHECKING:
    from distcore_tasks.lm_evaluation.model import RunModel

log = logging.getLogger("distcore")
INSTALL = "pip install 'distcore-tasks[lm-eval]'"


@dataclass
class LmEval:
    """Measure tasks of lm-eval with the run's model, each row on one rank;
    ``lm_eval.jsonl`` has the results.
    """

    exempt: ClassVar = {
        "no-collective": "ranks share out the rows of lm-eval's tasks, and gather the answers"
    }

    tasks: list[str] = field(default_factory=list)
    """Names of lm-eval's tasks and groups, or of those in ``folder``."""
    folder: Path | None = None
    """Folder with YAML files of your own tasks."""
    every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between measurements; 0: only at the end."""
    fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples before each question; default: what the task says."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Most rows of each task; default: all."""

    def __post_init__(self) -> None:
        self._measured = -1
        # Here, so that it fails before any rank starts. The package is not imported.
        if not is_installed("lm_eval"):
            raise ConfigError(
                "extension lm_eval: the package lm-eval is not installed. Install it with:"
                f" {INSTALL}"
            )
        if not self.tasks:
            raise ConfigError(
                "extension lm_eval: extensions.lm_eval.tasks is empty; name some, such as"
                " [hellaswag]"
            )

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress, task: Task, data: Datasets) -> None:
        """Prepare the tasks, so that what cannot be measured ends the run before its first step."""
        try:
            from distcore_tasks.lm_evaluation.model import RunModel, task_manager
        except ImportError as error:
            raise ConfigError(
                f"extension lm_eval: lm-eval does not import ({error}); install it: {INSTALL}"
            ) from None
        self._model: RunModel = RunModel(run, task, data)
        self._manager = task_manager(self.folder)
        if unknown := [name for name in self.tasks if name not in self._manager.all_tasks]:
            raise ConfigError(
                f"extension lm_eval: no task {unknown[0]!r} in lm-eval, or in folder ="
                f" {self.folder}"
            )
        self._forget_after(run, progress.step)

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress) -> None:
        """Measure every N steps; all ranks do."""
        if self.every and progress.step % self.every == 0:
            self._measure(run, progress.step)

    @hookimpl
    def on_run_end(self, run: Run, report: Report) -> None:
        """Measure the last step, unless that was done."""
        if report["steps"] != self._measured:
            self._measure(run, report["steps"])

    def _measure(self, run: Run, step: int) -> None:
        """Measure all tasks on every rank; the main one logs and records the results."""
        import lm_eval

        from distcore.testing import change_random_state

        self._measured = step
        with use_average(run, self._model.hooks), change_random_state(0), _silence():
            measured = lm_eval.simple_evaluate(
                model=self._model,
                tasks=self.tasks,
                task_manager=self._manager,
                num_fewshot=self.fewshot,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        if not run.world.is_main:
            return
        for name, metrics in measured["results"].items():
            numbers = {}
            for key, value in metrics.items():
                if _is_number(value):
                    # lm-eval's name of a metric without a filter.
                    numbers[key.removesuffix(",none")] = value
            listed = ", ".join(f"{metric} {value:.4g}" for metric, value in numbers.items())
            log.info("lm-eval at step %d: %s: %s", step, name, listed)
            line = json.dumps({"step": step, "task": name, **numbers})
            with _file(run).open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def _forget_after(self, run: Run, step: int) -> None:
        """Drop the lines of an earlier attempt that this run measures again."""
        file = _file(run)
        if run.world.is_main and file.exists():
            lines = file.read_text(encoding="utf-8").splitlines()
            lines_before = [line for line in lines if json.loads(line)["step"] <= step]
            file.write_text("".join(f"{line}\n" for line in lines_before), encoding="utf-8")


@contextmanager
def _silence() -> Iterator[None]:
    """Inside, the library's bars and tables go nowhere."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _file(run: Run) -> Path:
    return Path(str(run.config.out), "lm_eval.jsonl")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
