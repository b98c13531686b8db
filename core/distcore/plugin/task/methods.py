"""The optional methods and the attributes of a task: nobody else asks a task what it has."""

from __future__ import annotations

from typing import Any, TypeVar

from distcore.errors import TaskError
from distcore.plugin.task.spec import TaskSpec
from distcore.plugin.task.task import Task

METHODS = frozenset(
    name for name, value in vars(TaskSpec).items() if callable(value) and not name.startswith("_")
)
"""Names of all methods that a task may have."""
T = TypeVar("T")


class TaskMethods:
    """A task with the optional methods that it has."""

    def __init__(self, task: Task) -> None:
        """Look up the methods of ``TaskSpec`` that the task has.

        Raises TaskError for a class, a model or a value.
        """
        is_model = hasattr(task, "state_dict") and not hasattr(task, "build_model")
        if isinstance(task, type) or is_model or type(task).__module__ == "builtins":
            kind = type(task).__name__
            if isinstance(task, str):
                kind = f"a name; set task={task!r}"
            elif isinstance(task, type):
                kind = f"the class; give {task.__name__}()"
            raise TaskError(
                f"task: expected an object with prepare() and build_model(), and was given {kind}"
            )
        self.task = task
        """The task itself, for its options."""
        self.name = type(task).__name__
        """Name of its class, for messages."""
        self._methods: dict[str, Any] = {}
        for name in METHODS:
            method = getattr(task, name, None)
            if callable(method):
                self._methods[name] = method

    def has(self, *names: str) -> bool:
        """Return True if the task has all of these methods."""
        return self._methods.keys() >= {*names}

    def __getitem__(self, name: str) -> Any:
        """Return a method that the task has."""
        return self._methods[name]

    def find(self, name: str) -> Any:
        """Return a method; ``None`` if the task does not have it."""
        return self._methods.get(name)

    def call(self, name: str, default: T, *arguments: object) -> T:
        """Call a method of the task; return ``default`` if it has none of this name."""
        if name not in self._methods:
            return default
        result: T = self._methods[name](*arguments)
        return result

    def declared(self, name: str, default: T) -> T:
        """Return an attribute of the task; ``default`` if it has none of this name."""
        value: T = getattr(self.task, name, default)
        return value

    def declared_by_class(self, name: str) -> object:
        """Return an attribute of the task's own class, not an inherited one; default: None."""
        return vars(type(self.task)).get(name)

    def heard(self) -> dict[str, Any]:
        """Return the methods by which the task hears events, or has a state."""
        methods = {}
        for name in dir(type(self.task)):
            if name in ("state", "load_state") or name.startswith("on_"):
                method = getattr(self.task, name)
                if callable(method):
                    methods[name] = method
        return methods

    def written_as(self, method: str, of_simple: str) -> str:
        """Return how the task's source names ``method``: ``of_simple`` if ``Simple`` has it."""
        is_simple = hasattr(self.task, of_simple) and method not in vars(type(self.task))
        return of_simple if is_simple else method
