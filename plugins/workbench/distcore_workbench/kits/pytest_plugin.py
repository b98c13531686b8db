"""``pytest --distcore KIND=NAME``: each law of a plugin is a test,
measured by ``distcore check``.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from distcore.testing import kinds, suite_of

if TYPE_CHECKING:
    from distcore.testing import Finding


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
    for plugin in config.getoption("distcore"):
        node = PluginLaws.from_parent(session, name=plugin, nodeid=f"distcore::{plugin}")
        laws = list(node.collect())
        report = pytest.CollectReport(
            nodeid=plugin, outcome="passed", longrepr=None, result=[*laws]
        )
        # Else the terminal counts them as not collected.
        config.hook.pytest_collectreport(report=report)
        items += laws


class PluginLaws(pytest.Collector):
    """The laws of one plugin, measured at the first test of them."""

    def collect(self) -> list[pytest.Item]:
        """Return a test per case."""
        kind, equals, _ = self.name.partition("=")
        if not equals or kind not in kinds():
            names = ", ".join(kinds())
            raise pytest.UsageError(f"--distcore {self.name}: expected KIND=NAME; kinds: {names}")
        return [PluginLaw.from_parent(self, name=case) for case in suite_of(kind).cases]

    @cached_property
    def findings(self) -> dict[str, Finding] | str:
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
        return {finding["case"]: _finding(finding) for finding in json.loads(done.stdout)}


class PluginLaw(pytest.Item):
    """One case."""

    def runtest(self) -> None:
        """Fail where the law is broken, with the line of ``distcore check``; skip
        what was not measured.
        """
        from distcore.testing import report_to_pytest  # imports torch

        assert isinstance(self.parent, PluginLaws)
        findings = self.parent.findings
        if isinstance(findings, str):
            pytest.fail(findings, pytrace=False)
        report_to_pytest(findings[self.name])

    def reportinfo(self) -> tuple[str, None, str]:
        """Say what the test is, for its headline."""
        return self.nodeid, None, self.nodeid


def _finding(printed: dict[str, Any]) -> Finding:
    """Return a finding as ``distcore check --json`` prints it."""
    from distcore.testing import Finding  # imports torch

    names = [field.name for field in dataclasses.fields(Finding)]
    return Finding(**{name: printed[name] for name in names})
