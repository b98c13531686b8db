from distcore.testing.contracts import StrategyContract as StrategyContract
from distcore.testing.contracts import TaskContract as TaskContract

__all__: list[str]
