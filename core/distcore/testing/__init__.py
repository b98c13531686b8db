"""The laws as a kit: a strategy's own proof, as ``distcore check`` and as pytest tests.

``from distcore.testing import StrategyContract`` imports pytest; nothing else here does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore.testing.strategy_contract import StrategyContract as StrategyContract

__all__ = ["StrategyContract"]


def __getattr__(name: str) -> Any:
    if name != "StrategyContract":
        raise AttributeError(f"module 'distcore.testing' has no attribute {name!r}")
    from distcore.testing.strategy_contract import StrategyContract

    return StrategyContract
