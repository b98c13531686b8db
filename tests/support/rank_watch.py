"""A pytest plugin: a test that starts ranks, itself or in a process of its own, must
carry the mark ``ranks``.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Generator
from pathlib import Path

import pytest

AT_START = Path(__file__).parent / "at_start"
CONTRACT_SECONDS = 3600
"""The kit ends its own ranks, case by case; this is for a kit that does not."""
QUICK_WITH_OWN_MODULES = "plugins/ddp/tests/test_ddp_contract.py::TestDDP::"
"""The contract whose own modules are measured with each change; others take minutes together."""
TOLD = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Have this process and every Python process that a test starts tell when it starts ranks."""
    told = Path(config.rootpath / ".pytest_cache" / f"ranks-{os.getpid()}.txt")
    told.parent.mkdir(exist_ok=True)
    config.stash[TOLD] = told
    os.environ["DISTCORE_TEST_RANKS"] = str(told)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in folders if folder not in ("", str(AT_START))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(AT_START), *others])  # workers inherit it
    runpy.run_path(str(AT_START / "sitecustomize.py"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no file behind."""
    config.stash[TOLD].unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a contract: all of them start ranks, and the first of several
    classes measures for all. Modules of a user's own are slow under all strategies but one.
    """
    from distcore.testing import StrategyContract  # imports torch

    for item in items:
        if not issubclass(getattr(item, "cls", None) or object, StrategyContract):
            continue
        item.add_marker("ranks")
        item.add_marker(pytest.mark.timeout(CONTRACT_SECONDS))
        is_of_own_module = item.name.startswith("test_own_module")
        is_quick = item.nodeid.startswith(QUICK_WITH_OWN_MODULES)
        # A second mark would give the tests of a slow class ranks of their own.
        if is_of_own_module and not is_quick and item.get_closest_marker("slow") is None:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Forget what the tests before have told."""
    item.config.stash[TOLD].unlink(missing_ok=True)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail the test that started ranks without the mark, fixtures included."""
    report = yield
    told = item.config.stash[TOLD]
    if report.passed and told.exists() and item.get_closest_marker("ranks") is None:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} starts ranks: mark it with @pytest.mark.ranks\n{told.read_text()}"
        )
    return report
