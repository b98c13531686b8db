"""Fully sharded training for distcore; the strategy is ``distcore_fsdp.strategy.FSDPStrategy``.

The modules in ``__all__`` are public, for other plugins that shard: they are imported when
they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore_fsdp import memory as memory
    from distcore_fsdp import options as options
    from distcore_fsdp import units as units

__version__ = "0.1.0"
__all__ = ["memory", "options", "units"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
