"""Packages that others import for a function or two: each is imported when something else of it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from threading import Lock
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any


class Deferred(ModuleType):
    """Stands for a package, and has some of its functions. Any other name imports the package in its place."""

    lock: Any
    marks: list[Callable[[], object]]
    """What to call once it is imported."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.imported(), name)

    def imported(self) -> ModuleType:
        """Return the package itself."""
        with self.lock:
            if is_first := sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        package = import_module(self.__name__)
        if is_first:
            for name in FUNCTIONS[self.__name__]:
                delattr(self, name)
            for mark in self.marks:
                mark()
        return package


def _call(module: Deferred, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(module.imported(), name)(*args, **kwargs)


def _mark(module: Deferred, name: str, fn: Any) -> Any:
    module.marks.append(lambda: getattr(module, name)(fn))
    return fn


def _disable(module: Any, name: str, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Return ``fn``, exempt from compilation as soon as there is any; without it, a decorator."""
    if fn is None:
        return partial(_disable, module, name, recursive=recursive, **options)
    if not isinstance(fn, FunctionType):  # a module, or a class, which is changed in place
        return _call(module, name, fn, recursive, **options)
    now = [fn]
    module.marks.append(lambda: now.insert(0, module.disable(fn, recursive, **options)))

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return now[0](*args, **kwargs)

    return call


FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "scipy.optimize": {"linear_sum_assignment": _call},
    "torch._dynamo": {
        "allow_in_graph": _mark, "assume_constant_result": _mark, "disable": _disable, "graph_break": lambda *_: None,
    },
    "transformers.models": {},
}  # fmt: skip
"""The functions that packages have until they are imported, by package."""
ALONE = ("torch._dynamo._trace_wrapped_higher_order_op", "transformers.models.")
"""Beginnings of the names of modules that need nothing of their package."""


class Deferring(Loader):
    """Finds each package of ``FUNCTIONS`` as one that is deferred."""

    def __init__(self) -> None:
        self._left, self._deferred = set(FUNCTIONS), dict[str, Deferred]()

    def find_spec(self, name: str, path: Any = None, _: object = None) -> ModuleSpec | None:
        """Return how to defer a package, or how to take a part that came with its package; ``None``: any other."""
        if name in self._left and (spec := PathFinder.find_spec(name, path)):
            self._left.remove(name)
            spec.loader = self
            return spec
        package = self._deferred.get(name.rpartition(".")[0])
        if package is None or name.startswith(ALONE):
            return None
        package.imported()  # before a part of it, as Python would
        part: Any = sys.modules.get(name)
        if part is None:
            return None
        spec = copy(getattr(part, "__spec__", None)) or ModuleSpec(name, None)
        restore = partial(setattr, spec, "loader", vars(part).get("__loader__"))
        spec.loader = SimpleNamespace(create_module=lambda _: part, exec_module=lambda _: restore())
        with suppress(AttributeError):  # torch._dynamo.config has none
            part.__spec__ = spec  # Python prefers it to the one returned
        return spec

    def exec_module(self, module: Any) -> None:
        """Make the package one that is deferred."""
        module.__class__, module.lock, module.marks = Deferred, Lock(), []
        vars(module).update({name: partial(how, module, name) for name, how in FUNCTIONS[module.__name__].items()})
        self._deferred[module.__name__] = module


def defer_imports() -> None:
    """Defer the packages in this process, unless they are imported."""
    sys.meta_path.insert(0, Deferring())
