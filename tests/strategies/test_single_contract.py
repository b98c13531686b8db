"""The laws on the core's own strategy."""

from distcore.testing import StrategyContract


class TestSingle(StrategyContract):
    strategy = "single"
