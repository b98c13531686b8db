"""The laws as a kit: the proof of a strategy, or of a task, as ``distcore check`` and as pytest tests.

``from distcore.testing import StrategyContract`` and ``TaskContract`` import pytest; nothing else here does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore.testing.strategy_contract import StrategyContract as StrategyContract
    from distcore.testing.task_contract import TaskContract as TaskContract

_HOME = {
    "StrategyContract": "distcore.testing.strategy_contract",
    "TaskContract": "distcore.testing.task_contract",
}
__all__ = ["StrategyContract", "TaskContract"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distcore.testing' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
