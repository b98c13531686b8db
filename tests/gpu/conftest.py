"""The record of `make gpu`: each row is written when its test ends, and a test whose rows held
is not run again.

So a device that is there for minutes is used for minutes: the next call goes on where the last one
ended. Remove ``build/gpu`` to measure everything anew. ``tools/gpu_page.py`` prints the table.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

RECORD = Path(
    os.environ.get("DISTCORE_GPU_RECORD", Path(__file__).parents[2] / "build/gpu/rows.jsonl")
)
ROWS = pytest.StashKey[list[tuple[str, str, str]]]()
Row = Callable[[str, str, str], None]


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """``row(what, measured, bound)`` adds a row to the record."""
    rows = request.node.stash.setdefault(ROWS, [])

    def add(what: str, measured: str, bound: str) -> None:
        rows.append((what, measured, bound))

    return add


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what held on this machine before."""
    here = machine()
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    held = {
        line["test"]
        for line in map(json.loads, lines)
        if line["machine"] == here and line["state"] == "held"
    }
    done = [item for item in items if item.nodeid in held]
    items[:] = [item for item in items if item.nodeid not in held]
    config.hook.pytest_deselected(items=done)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the rows of a test that ended, whatever its end."""
    report = yield
    if (
        torch.accelerator.is_available()
        and item.get_closest_marker("gpu")
        and call.when != "teardown"
    ):
        rows = item.stash.get(ROWS, [])
        if report.skipped and isinstance(report.longrepr, tuple):
            write(item, rows or [(item.name, "", "")], report.longrepr[2].removeprefix("Skipped: "))
        elif report.failed:
            write(
                item,
                rows or [(item.name, "", "")],
                "BROKEN" if rows else "failed",
                str(call.excinfo)[-2000:],
            )
        elif call.when == "call":
            write(item, rows, "held")
    return report


def write(item: pytest.Item, rows: list[tuple[str, str, str]], state: str, why: str = "") -> None:
    """Append rows to the record; one call of the system each, since several workers write."""
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    with RECORD.open("ab", buffering=0) as file:
        for what, measured, bound in rows:
            line = {"test": item.nodeid, "machine": machine(), "what": what, "measured": measured}
            file.write(
                json.dumps(line | {"bound": bound, "state": state, "why": why}).encode()
                + os.linesep.encode()
            )


def machine() -> str:
    """Return the devices, and the versions of what computes on them."""
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else str(kind)
    versions = {"torch": str(torch.__version__)}
    for package in ("transformers", "deepspeed", "accelerate"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    told = ", ".join(f"{package} {version}" for package, version in versions.items())
    return f"{torch.accelerator.device_count()} × {name}; {told}"
