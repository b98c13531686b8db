from distcore.testing.contracts import StrategyContract as StrategyContract
from distcore.testing.contracts import TaskContract as TaskContract
from distcore.testing.contracts import report_to_pytest as report_to_pytest
from distcore.testing.findings import EXACT as EXACT
from distcore.testing.findings import FP32 as FP32
from distcore.testing.findings import LAWS as LAWS
from distcore.testing.findings import SCALE as SCALE
from distcore.testing.findings import Case as Case
from distcore.testing.findings import Finding as Finding
from distcore.testing.findings import Measured as Measured
from distcore.testing.findings import Skip as Skip
from distcore.testing.findings import needs as needs
from distcore.testing.findings import none_of as none_of
from distcore.testing.random_state import change_random_state as change_random_state
from distcore.testing.strategy_suite import STRATEGIES as STRATEGIES
from distcore.testing.suite import Suite as Suite
from distcore.testing.suites import kinds as kinds
from distcore.testing.suites import suite_of as suite_of
from distcore.testing.task_suite import TASKS as TASKS

__all__: list[str]
