"""LoRA for distcore, by the library peft; ``distcore_lora.adapter`` is the adapter ``lora``.

``take_out`` is public, for exporters.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["take_out"]


def take_out(module: Any, merge: bool) -> Any:
    """Remove the adapter from ``module``, in place, or merge it into plain
    layers; return the module.
    """
    from distcore_lora import adapter  # with torch, which reading the version does not need

    return adapter.take_out(module, merge)
