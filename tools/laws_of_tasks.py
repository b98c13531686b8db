"""The laws from the side of tasks: measured under the settings of their contract
tests, as a sentence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distcore.testing import TASKS, TaskContract

ROOT = Path(__file__).parents[1]
Settings = dict[str, dict[str, float | str]]
"""By setting, such as ``causal-lm: Documents``: by case the measured error, or why
the task is exempt.
"""


def contracts() -> Iterator[tuple[str, type[TaskContract]]]:
    """Yield the contracts of the tasks that come with distcore, named by task and class."""
    for path in sorted(ROOT.glob("plugins/tasks/tests/*/test_contract*.py")):
        spec = importlib.util.spec_from_file_location(f"contract_of_{path.parent.name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, contract in vars(module).items():
            if (
                isinstance(contract, type)
                and issubclass(contract, TaskContract)
                and contract is not TaskContract
            ):
                yield f"{contract.task}: {name.removeprefix('Test')}", contract


def measure() -> Settings:
    """Measure all; raises SystemExit if a law is broken."""
    settings: Settings = {}
    for name, contract in contracts():
        print(f"measure {name}", flush=True)
        findings = TASKS.measure(contract.task, contract.settings)
        if broken := [str(finding) for finding in findings if finding.held is False]:
            raise SystemExit("\n".join([name, *broken]))
        settings[name] = {
            each.case: each.note if each.error is None else each.error for each in findings
        }
    return settings


def sentence(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which tasks were measured, under how many settings, and how many
    of their cases held.
    """
    tasks = ", ".join(
        f"`{task}`" for task in dict.fromkeys(name.partition(":")[0] for name in settings)
    )
    held = sum(
        not isinstance(error, str) for errors in settings.values() for error in errors.values()
    )
    return f"Tasks, in one process over {len(settings)} settings: {held} cases held, of {tasks}.\n"
