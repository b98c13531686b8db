"""DeepSpeed as a distcore strategy, and code for other plugins that drive DeepSpeed's engine.

The names in ``__all__`` are public; see "For other plugins" in the README. They are imported
when they are first
used: DeepSpeed itself takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore_deepspeed import checkpoint as checkpoint
    from distcore_deepspeed import engine as engine
    from distcore_deepspeed import library as library
    from distcore_deepspeed.checks import check_evaluation as check_evaluation
    from distcore_deepspeed.checks import check_training as check_training
    from distcore_deepspeed.json_config import Setting as Setting
    from distcore_deepspeed.json_config import UserConfig as UserConfig
    from distcore_deepspeed.json_config import read_config as read_config
    from distcore_deepspeed.memory import zero_memory as zero_memory
    from distcore_deepspeed.open_keys import open_values as open_values
    from distcore_deepspeed.optimizers import own_values as own_values
    from distcore_deepspeed.resolve_config import resolve as resolve
    from distcore_deepspeed.tracing import traced_engine as traced_engine

__version__ = "0.1.0"

_HOME = {
    "Setting": "json_config",
    "UserConfig": "json_config",
    "check_evaluation": "checks",
    "check_training": "checks",
    "engine": "engine",
    "library": "library",
    "checkpoint": "checkpoint",
    "zero_memory": "memory",
    "open_values": "open_keys",
    "own_values": "optimizers",
    "read_config": "json_config",
    "resolve": "resolve_config",
    "traced_engine": "tracing",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)
