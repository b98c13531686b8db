"""The laws as suites: the proof of a strategy, or of a task, as ``distcore check``
and as pytest tests.

``from distcore.testing import StrategyContract`` and ``TaskContract`` import pytest;
nothing else here does.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
