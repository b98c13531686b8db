"""torch's compiler, ``torch._dynamo``, imported when it is first used: in a run that compiles nothing, never.

torch's optimizers and transformers import it, for 0.6 CPU seconds, only to mark functions for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from threading import Lock
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


class Deferred(ModuleType):
    """Stands for the package, and has only what marks functions. Any other name imports the package in its place."""

    lock: Any
    marks: list[Callable[[], object]]
    """What to call once it is imported."""
    functions: dict[str, Callable[..., Any]]
    """What it has of the package until then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.imported(), name)

    def imported(self) -> ModuleType:
        """Return the package itself."""
        with self.lock:
            if is_first := sys.modules.get(NAME) is self:
                del sys.modules[NAME], vars(sys.modules["torch"])["_dynamo"]
        package = import_module(NAME)
        if is_first:
            for name in self.functions:
                delattr(self, name)
            for mark in self.marks:
                mark()
        return package


def defer_compiler() -> None:
    """Have this process import the package when it is first used, unless it has."""
    if NAME in sys.modules or (spec := find_spec(NAME)) is None:
        return
    module: Any = module_from_spec(spec)
    vars(sys.modules["torch"])["_dynamo"] = sys.modules[NAME] = module
    import_module(f"{NAME}._trace_wrapped_higher_order_op")  # for transformers; it needs nothing else of the package
    module.__class__, module.lock, module.marks = Deferred, Lock(), []
    module.functions = {name: partial(_mark, module, name) for name in ("allow_in_graph", "assume_constant_result")}
    module.functions |= {"disable": partial(_disable, module), "graph_break": lambda: None}
    vars(module).update(module.functions)
    finder: Any = SimpleNamespace()
    finder.find_spec = partial(_find_part, module, finder)
    sys.meta_path.insert(0, finder)


def _find_part(module: Deferred, finder: Any, name: str, *_: object) -> ModuleSpec | None:
    """Import the package before another part of it, as Python would; return how to take a part that came with it."""
    if not name.startswith(f"{NAME}."):
        return None
    with suppress(ValueError):  # another thread has removed it
        sys.meta_path.remove(finder)
    module.imported()
    part: Any = sys.modules.get(name)
    if part is None:
        return None
    spec = copy(getattr(part, "__spec__", None)) or ModuleSpec(name, None)
    restore = partial(setattr, spec, "loader", vars(part).get("__loader__"))
    spec.loader = SimpleNamespace(create_module=lambda _: part, exec_module=lambda _: restore())
    with suppress(AttributeError):  # torch._dynamo.config has none
        part.__spec__ = spec  # Python prefers it to the one returned
    return spec


def _mark(module: Deferred, name: str, fn: Any) -> Any:
    module.marks.append(lambda: getattr(module, name)(fn))
    return fn


def _disable(module: Any, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Return ``fn``, exempt from compilation as soon as there is any; without it, a decorator."""
    if fn is None:
        return partial(_disable, module, recursive=recursive, **options)
    if not isinstance(fn, FunctionType):  # a module, or a class, which is changed in place
        return module.imported().disable(fn, recursive, **options)
    now = [fn]
    module.marks.append(lambda: now.insert(0, module.disable(fn, recursive, **options)))

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return now[0](*args, **kwargs)

    return call
