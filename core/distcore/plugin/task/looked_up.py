"""The lookup of a task's optional methods, and what its attributes declare."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self, TypeVar

from distcore.errors import TaskError
from distcore.plugin.task.causal import Causal
from distcore.plugin.task.spec import TaskSpec
from distcore.plugin.task.task import Direction, OnResume, Task
from distcore.plugin.task.task import declared_metrics as metrics_of

METHODS = frozenset(name for name, value in vars(TaskSpec).items() if callable(value) and not name.startswith("_"))
"""Names of all methods that a task may have."""
T = TypeVar("T")


class LookedUp:
    """A task with the optional methods that it has."""

    def __init__(self, task: Task) -> None:
        """Look up the methods of ``TaskSpec`` that the task has; raises TaskError for a class, a model or a value."""
        is_model = hasattr(task, "state_dict") and not hasattr(task, "build_model")
        if isinstance(task, type) or is_model or type(task).__module__ == "builtins":
            how = f"a name; set task={task!r}" if isinstance(task, str) else type(task).__name__
            how = f"the class; give {task.__name__}()" if isinstance(task, type) else how
            raise TaskError(f"task: expected an object with prepare() and build_model(), and was given {how}")
        self.task = task
        """The task itself, for its options."""
        self.name = type(task).__name__
        """Name of its class, for messages."""
        self._own: dict[str, Any] = {name: method for name in METHODS if callable(method := getattr(task, name, None))}

    @classmethod
    def of(cls, task: Task) -> Self:
        """Return the face of a task; ``task`` itself if it is one."""
        return task if isinstance(task, cls) else cls(task)

    def has(self, *names: str) -> bool:
        """Return True if the task has all of these methods."""
        return self._own.keys() >= {*names}

    def _call(self, name: str, default: T, *arguments: object) -> T:
        if name not in self._own:
            return default
        result: T = self._own[name](*arguments)
        return result

    @property
    def declared_metrics(self) -> Mapping[str, Direction]:
        """The task's declared metrics, with their better direction; raises TaskError for another direction."""
        return metrics_of(self.task)

    @property
    def on_resume(self) -> Mapping[str, OnResume]:
        """Rules of a resume for the task's options; default: none may change."""
        declared: Mapping[str, OnResume] = getattr(self.task, "on_resume", {})
        return declared

    @property
    def from_scratch(self) -> bool:
        """True if the task declares, by an attribute of this name, that its model starts from random weights."""
        return bool(getattr(self.task, "from_scratch", False))

    @property
    def laws_hold(self) -> bool:
        """True if the task declares that the laws are measured for it: ``prove: auto`` then leaves it out.

        A subclass, which may do anything, does not inherit this.
        """
        return bool(vars(type(self.task)).get("laws_hold", False))

    @property
    def causal(self) -> Causal | None:
        """What a task declares whose model must not see later tokens; ``None`` for others."""
        declared: object = getattr(self.task, "causal", None)
        if declared is not None and not isinstance(declared, Causal):
            raise TaskError(f"task {self.name}: causal is {declared!r}; expected a distcore.Causal")
        return declared

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases of the laws that the task does not satisfy, with the reason; default: none."""
        declared: Mapping[str, str] = getattr(self.task, "exempt", {})
        return declared

    @property
    def logs(self) -> tuple[str, ...]:
        """Names of the task's logged values, further loss terms included; default: none."""
        return tuple(getattr(self.task, "logs", ()))

    @property
    def whole_batch(self) -> bool:
        """True if the loss is over the global batch. A task switches this off by ``whole_batch = False``."""
        return self.has("embed", "batch_loss") and bool(getattr(self.task, "whole_batch", True))

    def missing_metrics(self, metrics: Mapping[str, object]) -> list[str]:
        """Return the metrics that the task declares and ``metrics`` lacks; none if it declares none."""
        declared = getattr(self.task, "metrics", None)
        return sorted(declared.keys() - metrics.keys()) if isinstance(declared, Mapping) else []

    def written_as(self, method: str, of_simple: str) -> str:
        """Return the name of ``method`` in the task's source: ``of_simple`` where ``Simple`` has the method."""
        is_simple = hasattr(self.task, of_simple) and method not in vars(type(self.task))
        return of_simple if is_simple else method

    def listener(self) -> dict[str, object]:
        """Return the task as an extension, by name, if it hears events or has a state; otherwise nothing."""
        names = [name for name in dir(type(self.task)) if name in ("state", "load_state") or name.startswith("on_")]
        methods = {name: method for name in names if callable(method := getattr(self.task, name))}
        return {"task": SimpleNamespace(**methods)} if methods else {}
