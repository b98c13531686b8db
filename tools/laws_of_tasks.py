"""The laws from the side of tasks: measured under the settings of their contract tests, as a table of law by task."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distcore.testing import TaskContract, runner
from distcore.testing.findings import LAWS
from distcore.testing.register import task_cases

ROOT = Path(__file__).parents[1]
Settings = dict[str, dict[str, float | str]]
"""By setting, such as ``causal-lm: Documents``: by case the measured error, or why the task is exempt."""


def contracts() -> Iterator[tuple[str, type[TaskContract]]]:
    """Yield the contracts of the tasks that come with distcore, named by task and class."""
    for path in sorted(ROOT.glob("plugins/tasks/tests/*/test_contract.py")):
        spec = importlib.util.spec_from_file_location(f"contract_of_{path.parent.name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, contract in vars(module).items():
            if isinstance(contract, type) and issubclass(contract, TaskContract) and contract is not TaskContract:
                yield f"{contract.task}: {name.removeprefix('Test')}", contract


def measure() -> Settings:
    """Measure all; raises SystemExit if a law is broken."""
    settings: Settings = {}
    for name, contract in contracts():
        print(f"measure {name}", flush=True)
        findings = runner.check_task(contract.task, contract.settings)
        if broken := [str(finding) for finding in findings if finding.held is False]:
            raise SystemExit("\n".join([name, *broken]))
        settings[name] = {each.case: each.note if each.error is None else each.error for each in findings}
    return settings


def table(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row per task: of each law the number of cases that held, over all its settings."""
    cases = task_cases()
    laws = [law for law in LAWS if any(case.law == law for case in cases.values())]
    lines = [
        f"| task | settings | {' | '.join(f'{LAWS[law]} {law}' for law in laws)} |",
        "|---" * (len(laws) + 2) + "|",
    ]
    for task in dict.fromkeys(name.partition(":")[0] for name in settings):
        measured = [errors for name, errors in settings.items() if name.partition(":")[0] == task]
        cells = [
            sum(not isinstance(errors[name], str) for errors in measured for name in errors if cases[name].law == law)
            for law in laws
        ]
        lines.append(f"| {task} | {len(measured)} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
