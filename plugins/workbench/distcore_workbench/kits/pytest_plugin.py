"""``pytest --distcore KIND=NAME``: each law of a plugin is a test,
measured by ``distcore check``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags."""
    group = parser.getgroup("distcore")
    group.addoption(
        "--distcore", action="append", default=[], metavar="KIND=NAME",
        help="also test the laws of a plugin, such as strategy=mine; repeatable",
    )  # fmt: skip
    group.addoption(
        "--distcore-set", action="append", default=[], metavar="KEY=VALUE",
        help="a config key for them, as --set of distcore check; repeatable",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # so that -k and -m choose among the laws, too
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add one test per law of each plugin that was named."""
    for given in config.getoption("distcore"):
        laws = PluginLaws.from_parent(session, name=given, nodeid=f"distcore::{given}").collect()
        report = pytest.CollectReport(nodeid=given, outcome="passed", longrepr=None, result=[*laws])
        # else the terminal counts them as not collected
        config.hook.pytest_collectreport(report=report)
        items += laws


class PluginLaws(pytest.Collector):
    """The laws of one plugin, measured at the first test of them."""

    def collect(self) -> list[pytest.Item]:
        """Return a test per case."""
        kind, equals, _ = self.name.partition("=")
        if not equals or (cases := _cases(kind)) is None:
            kinds = ", ".join(
                ("strategy", "task", *sorted(entry_points(group="distcore.kits").names))
            )
            raise pytest.UsageError(f"--distcore {self.name}: expected KIND=NAME; kinds: {kinds}")
        return [PluginLaw.from_parent(self, name=case) for case in cases]

    @cached_property
    def findings(self) -> dict[str, dict[str, Any]] | str:
        """The findings of the chosen cases by name, or the line that says why there are none."""
        kind, _, name = self.name.partition("=")
        command = [sys.executable, "-m", "distcore", "check", f"--{kind}", name, "--json"]
        for item in self.session.items:
            command += ["--case", item.name] * (item.parent is self)
        for setting in self.config.getoption("distcore_set"):
            command += ["--set", setting]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            return (
                done.stderr.strip().splitlines() or [f"distcore check ended with {done.returncode}"]
            )[-1]
        return {finding["case"]: finding for finding in json.loads(done.stdout)}


class PluginLaw(pytest.Item):
    """One case."""

    def runtest(self) -> None:
        """Fail where the law is broken, with the line of ``distcore check``; skip
        what was not measured.
        """
        assert isinstance(self.parent, PluginLaws)
        findings = self.parent.findings
        if isinstance(findings, str):
            pytest.fail(findings, pytrace=False)
        finding = findings[self.name]
        if finding["verdict"] == "skipped":
            pytest.skip(finding["note"])
        if finding["verdict"] == "broken":
            error = (
                ""
                if finding["error"] is None
                else f"error {finding['error']:.2g}, bound {finding['bound']:.2g}; "
            )
            pytest.fail(f"{error}{finding['note']}", pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        """Say what the test is, for its headline."""
        return self.nodeid, None, self.nodeid


def _cases(kind: str) -> Iterable[str] | None:
    """Return the names of the cases of a kind; ``None`` if nothing measures it."""
    if kind in ("strategy", "task"):
        from distcore.testing import strategy_cases, task_cases  # imports torch

        return strategy_cases() if kind == "strategy" else task_cases()
    kits = entry_points(group="distcore.kits")
    return list(kits[kind].load().cases) if kind in kits.names else None
