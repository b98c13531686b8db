"""Names of a public package, each imported when it is first used: ``import
distcore`` imports no torch.

A package lists its names once, in its stub ``__init__.pyi``, which type checkers and editors read
too (Scientific Python's SPEC 1).
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_of_stub(
    package: str, file: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of ``package``, from the stub next to its
    ``file``.
    """
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    home = {
        name: module
        for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)
    }

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home[name])
        if hasattr(module, name):
            return getattr(module, name)
        # Not an attribute yet: a module that nobody has imported.
        return import_module(f"{home[name]}.{name}")

    def __dir__() -> list[str]:
        # By default dir() and completion would show only what has been imported already.
        is_there = vars(sys.modules[package])
        return sorted({*is_there, *home})

    return sorted(home), __getattr__, __dir__
