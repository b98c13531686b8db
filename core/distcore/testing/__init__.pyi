from distcore.testing.strategy_contract import StrategyContract as StrategyContract
from distcore.testing.task_contract import TaskContract as TaskContract

__all__: list[str]
