"""A task as the core calls it: optional methods are looked up once, and results are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from torch import nn

from distcore.config import RunConfig
from distcore.errors import TaskError
from distcore.plugin.task.causal import Causal
from distcore.plugin.task.datasets import check_indexed
from distcore.plugin.task.frozen import INITIAL, FrozenModel, Initial
from distcore.plugin.task.losses import TaskLosses
from distcore.plugin.task.methods import TaskMethods
from distcore.plugin.task.step import Step
from distcore.plugin.task.task import Batch, Datasets, Direction, OnResume, Task
from distcore.plugin.task.task import declared_metrics as metrics_of
from distcore.plugin.task.task_evaluation import TaskEvaluation
from distcore.plugin.task.task_predictions import TaskPredictions


class BoundTask:
    """A task's typed face, as ``Hooks`` is a strategy's; implements ``distcore.Task``."""

    def __init__(self, task: Task) -> None:
        """Look up what the task has; raises TaskError for a class, a model or a value."""
        self._methods = TaskMethods(task)
        self.task = task
        """The task itself, for its options."""
        self.name = self._methods.name
        """Name of its class, for messages."""
        self.losses = TaskLosses(self._methods)
        """The loss in each of its forms."""
        self.evaluation = TaskEvaluation(self._methods, self.losses)
        """Outputs, sums and metrics."""
        self.predictions = TaskPredictions(self._methods)
        """Lines about rows."""

    @classmethod
    def wrap(cls, task: Task) -> Self:
        """Return the face of a task; ``task`` itself if it is one."""
        return task if isinstance(task, cls) else cls(task)

    def has(self, *names: str) -> bool:
        """Return True if the task has all of these methods."""
        return self._methods.has(*names)

    # What its attributes declare

    @property
    def declared_metrics(self) -> Mapping[str, Direction]:
        """The task's declared metrics, by better direction; TaskError for another direction."""
        return metrics_of(self.task)

    @property
    def on_resume(self) -> Mapping[str, OnResume]:
        """Rules of a resume for the task's options; default: none may change."""
        declared: Mapping[str, OnResume] = self._methods.declared("on_resume", {})
        return declared

    @property
    def from_scratch(self) -> bool:
        """True if the task declares ``from_scratch``: its model starts from random weights."""
        return bool(self._methods.declared("from_scratch", False))

    @property
    def laws_hold(self) -> bool:
        """True if the task declares that the laws are measured for it.

        ``prove: auto`` then leaves it out. A subclass, which may do anything, does not inherit it.
        """
        return bool(self._methods.declared_by_class("laws_hold"))

    @property
    def causal(self) -> Causal | None:
        """The declaration of a task whose model must not see later tokens; ``None`` for others."""
        declared: object = self._methods.declared("causal", None)
        if declared is not None and not isinstance(declared, Causal):
            raise TaskError(f"task {self.name}: causal is {declared!r}; expected a distcore.Causal")
        return declared

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases of the laws that the task does not satisfy, with the reason; default: none."""
        declared: Mapping[str, str] = self._methods.declared("exempt", {})
        return declared

    @property
    def logs(self) -> tuple[str, ...]:
        """Names of the task's logged values, further loss terms included; default: none."""
        return tuple(self._methods.declared("logs", ()))

    def listener(self) -> dict[str, object]:
        """Return the task as an extension, by name, if it hears events or has a state."""
        methods = self._methods.heard()
        return {"task": SimpleNamespace(**methods)} if methods else {}

    # Before and for the model

    def suggest(self, config: RunConfig) -> Mapping[str, object]:
        """Return values for keys that the user left at 'auto'; empty without suggestions."""
        return self._methods.call("suggest", {}, config)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the datasets; TaskError if the task lacks a method, or one is only an iterator."""
        _ = self.losses.unlogged  # raises if the task has no loss
        if self.has("train_step") and (self.has("phases") or self.losses.whole_batch):
            other = "phases" if self.has("phases") else "batch_loss"
            raise TaskError(
                f"task {self.name}: has both train_step() and {other}(); make the steps in one of"
                " them"
            )
        self.evaluation.check()
        folder_before = Path.cwd()
        data = self.task.prepare(config)
        folder = Path.cwd()
        if folder != folder_before:
            raise TaskError(
                f"task {self.name}: its code changed the folder to {folder} (os.chdir); paths are"
                f" of {folder_before}"
            )
        if not isinstance(data, Datasets):
            raise TaskError(
                f"task: prepare() returned {type(data).__name__}; expected distcore.Datasets"
            )
        for name in ("train", "evaluation", "test"):
            check_indexed(name, getattr(data, name))
        for name, rows in data.evaluations.items():
            check_indexed(f"evaluations[{name!r}]", rows)
        first_set = next(iter(data.evaluations.values()), data.evaluation)
        if data.evaluation is not first_set:
            raise TaskError(
                f"task {self.name}: prepare() returned as 'evaluation' other rows than the first of"
                " its sets"
            )
        return data

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the folder with the model's weights; ``None`` if the task has no such folder."""
        return self._methods.call("weights_folder", None, config)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; TaskError for anything else."""
        model: object = self.task.build_model(config, data)
        if not isinstance(model, nn.Module):
            method = self._methods.written_as("build_model", "model")
            answer = type(model).__name__
            if isinstance(model, type):
                answer = f"the class {model.__name__}, not {model.__name__}()"
            raise TaskError(
                f"task {self.name}: {method}() returned {answer}; expected a torch.nn.Module"
            )
        return model

    # Frozen models

    def frozen(self, config: RunConfig, data: Datasets) -> Mapping[str, FrozenModel | Initial]:
        """Return the frozen models by name, possibly none. Raises TaskError for another type."""
        models: Mapping[str, FrozenModel | Initial]
        models = self._methods.call("frozen", {}, config, data)
        for name, model in models.items():
            if model != INITIAL and not isinstance(model, FrozenModel):
                kind = type(model).__name__
                raise TaskError(
                    f"task: frozen() returned {kind} as {name!r}; expected a FrozenModel or INITIAL"
                )
        if models and not self.has("consult"):
            raise TaskError(
                f"task {self.name}: has frozen() but no consult(), which asks the frozen models"
            )
        return models

    def consult(self, models: Mapping[str, Callable[..., Any]], batch: Batch) -> Batch:
        """Return ``batch`` with the outputs of the frozen models."""
        return self._methods["consult"](models, batch)

    # A step of its own

    def train_step(self, step: Step) -> object:
        """Have the task make a step."""
        return self._methods["train_step"](step)

    # Padding-free computation

    @property
    def computes_padding_free(self) -> bool:
        """True if the task has models that can compute rows without padding."""
        return self.has("why_not_padding_free", "enable_padding_free")

    def why_not_padding_free(self) -> str | None:
        """Return why the model cannot compute rows without padding; ``None`` if it can."""
        if not self.computes_padding_free:
            return "it has no form without padding"
        if self.has("frozen"):
            return "its frozen models compute padded rows"
        reason: str | None = self._methods["why_not_padding_free"]()
        return reason

    def skipped_fraction(self) -> float:
        """Return the fraction of per-token compute that the padding-free model skips: 0 to 1."""
        return self._methods.call("skipped_fraction", 0.0)

    def enable_padding_free(self, module: nn.Module) -> Callable[[], None]:
        """Let ``module`` skip padding; return a function that undoes it."""
        undo: Callable[[], None] = self._methods.call("enable_padding_free", lambda: None, module)
        return undo

    def select_logits(self, module: nn.Module, data: Datasets) -> Datasets:
        """Let ``module`` compute logits at target positions only, if the task can.

        Returns datasets to go with it.
        """
        return self._methods.call("select_logits", data, module, data)

    # Files of a run

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Have the task write its files, if it has any."""
        self._methods.call("save", None, folder, config, data)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows from the files of ``save``; ``None`` if it wrote none.

        Raises TaskError if the task returns anything else.
        """
        data: object = self._methods.call("reopen", None, folder, config)
        if data is not None and not isinstance(data, Datasets):
            raise TaskError(
                f"task: reopen() returned {type(data).__name__}; expected distcore.Datasets or None"
            )
        return data

    def data_of(self, checkpoint: Path, config: RunConfig) -> Datasets:
        """Return datasets for building the model of a checkpoint.

        They have no rows and come from the task's files in the run folder. For a checkpoint outside
        of its run folder, the data of ``config`` are prepared.
        """
        return self.reopen(checkpoint.resolve().parent.parent, config) or self.prepare(config)
