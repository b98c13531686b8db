from distcore.testing.contracts import StrategyContract as StrategyContract
from distcore.testing.contracts import TaskContract as TaskContract
from distcore.testing.findings import LAWS as LAWS
from distcore.testing.findings import SCALE as SCALE
from distcore.testing.findings import Case as Case
from distcore.testing.findings import Finding as Finding
from distcore.testing.findings import Measured as Measured
from distcore.testing.findings import Skip as Skip
from distcore.testing.findings import needs as needs
from distcore.testing.register import all_cases as all_cases
from distcore.testing.register import own_module_cases as own_module_cases
from distcore.testing.register import strategy_cases as strategy_cases
from distcore.testing.register import task_cases as task_cases
from distcore.testing.runner import check_task as check_task
from distcore.testing.runner import measure as measure
from distcore.testing.runner import subject_of as subject_of
from distcore.testing.task_lab import change_random_state as change_random_state

__all__: list[str]
