"""The table of `make gpu`: what was measured on the accelerator of this machine, to paste into docs/devices.md."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest
import torch

ROWS = pytest.StashKey[list[tuple[str, str, str, str]]]()
Row = Callable[[str, str, str], None]


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """``row(what, measured, bound)`` adds a row to the table."""
    rows = request.config.stash.setdefault(ROWS, [])

    def add(what: str, measured: str, bound: str) -> None:
        rows.append((request.node.name, what, measured, bound))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, with a row for each test that was skipped or failed."""
    reports = terminalreporter.stats
    failed = {report.nodeid.rpartition("::")[2] for report in reports.get("failed", []) if "gpu/" in report.nodeid}
    rows = [
        (what, measured, bound, "BROKEN" if name in failed else "held")
        for name, what, measured, bound in _measurements(config)
    ]
    told = {name for name, *_ in _measurements(config)}
    rows += [(name, "", "", "failed") for name in sorted(failed - told)]
    for report in reports.get("skipped", []):
        if "gpu/" in report.nodeid and isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
            rows.append((report.nodeid.rpartition("::")[2], "", "", f"never run: {why}"))
    if not rows or not torch.accelerator.is_available():
        return
    terminalreporter.write_line(f"\n{_machine()}\n\n| what | measured | bound | state |\n|---|---|---|---|")
    for cells in rows:
        terminalreporter.write_line(f"| {' | '.join(cells)} |")


def _measurements(config: pytest.Config) -> list[tuple[str, str, str, str]]:
    return config.stash.get(ROWS, [])


def _machine() -> str:
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else str(kind)
    versions = {"torch": str(torch.__version__)}
    for package in ("deepspeed", "accelerate"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    told = ", ".join(f"{package} {version}" for package, version in versions.items())
    return f"Measured on {torch.accelerator.device_count()} × {name}; {told}:"
