"""A suite: the laws of one kind of plugin, each a function of a laboratory with the plugin
in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from distcore.errors import ConfigError, StrategyError
from distcore.hints import nearest
from distcore.testing.findings import LAWS, Case, Finding, Measured, Report, needless
from distcore.testing.random_state import change_random_state

SEED = 0
"""The random state in which each case begins, so that alone it measures what it does
among others.
"""
Law = Callable[[Any], Measured]
MakeLab = Callable[[str, Mapping[str, Any], Path], Any]


class Suite:
    """The laws of a kind of plugin; an entry point of the group ``distcore.suites`` by the name
    of the kind.

    ``make_lab(name, settings, folder)`` returns the laboratory of a plugin: ``settings`` are config
    keys by dotted name, ``folder`` is empty. Its attribute ``exempt`` has the cases or laws that
    the plugin declares not to keep, with reasons.

    ``modules`` are those whose import registers the cases, where that is not the suite's own.
    ``skips_by_plugin`` is true where a case is skipped only for what the plugin is, never for what
    is missing here: then it is an error to exempt a case that is skipped.
    """

    def __init__(
        self,
        kind: str,
        make_lab: MakeLab,
        modules: Sequence[str] = (),
        skips_by_plugin: bool = False,
    ) -> None:
        self.kind = kind
        self._make_lab = make_lab
        self._modules = modules
        self._skips_by_plugin = skips_by_plugin
        self._registered: dict[str, Case] = {}

    def law(self, name: str) -> Callable[[Law], Law]:
        """Return a decorator that registers a function of the laboratory as a case of the law
        ``name``, a key of ``LAWS``.

        The case has the function's name with ``-`` for ``_``; its title is the first paragraph of
        the docstring.
        """
        return self._registers(name)

    def _registers(self, law: str, is_job: bool = False) -> Callable[[Law], Law]:
        """Return the decorator of a law; ``is_job`` goes to the case."""

        def register(function: Law) -> Law:
            name = function.__name__.replace("_", "-")
            paragraph = (function.__doc__ or "").strip().partition("\n\n")[0]
            title = " ".join(paragraph.split())
            self._registered[name] = Case(law, name, title, function, is_job)
            return function

        return register

    @property
    def cases(self) -> Mapping[str, Case]:
        """Every case by name: in the order of the one module that has them, or, of several
        modules, in the order of the laws.
        """
        for module in self._modules:
            import_module(module)
        if not self._modules:
            return dict(self._registered)

        def number_of_law(item: tuple[str, Case]) -> int:
            _, case = item
            return LAWS[case.law]

        return dict(sorted(self._registered.items(), key=number_of_law))

    @property
    def required(self) -> Mapping[str, Case]:
        """The cases without which a measurement is not whole: here all of them."""
        return self.cases

    def measure(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        only: Iterable[str] = (),
        report: Report = id,
    ) -> list[Finding]:
        """Measure the plugin ``name``, or ``file.py:Class``; return a finding per case, or of the
        cases ``only``, and ``report`` each as its case ends.

        Raises DistcoreError for a plugin that cannot be built, for a case that does not exist, and
        for an exemption that excuses nothing.
        """
        cases = self.chosen(only, f"check --{self.kind} {name}: --case")
        with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
            lab = self._make_lab(name, settings or {}, Path(folder))
            self._check_known(lab.exempt, {*self.cases, *LAWS}, f"{self.kind} {name!r}: exempt")
            return self._measure_in(lab, cases, report)

    def facts(self, name: str, settings: Mapping[str, Any]) -> Mapping[str, int]:
        """Return what ``distcore check`` says about the plugin beside its findings: nothing."""
        return {}

    def chosen(self, only: Iterable[str], where: str) -> list[Case]:
        """Return the cases ``only``, or all; raises ConfigError, which begins with ``where``, for
        one that does not exist.
        """
        wanted = set(only)
        self._check_known(wanted, self.cases, where)
        return [case for case in self.cases.values() if not wanted or case.name in wanted]

    def needless(
        self, exempt: Mapping[str, str], findings: Sequence[Finding]
    ) -> StrategyError | None:
        """Return the error of an exemption that excuses none of ``findings``; ``None`` where these
        are not a whole measurement.
        """
        measured = {finding.case for finding in findings}
        if not measured.issuperset(self.required):
            return None
        unjudged = self.cases.keys() - measured
        if not self._skips_by_plugin:
            # Elsewhere a case that is skipped here may be measured, and need its exemption.
            for finding in findings:
                if finding.held is None:
                    unjudged |= {finding.case, finding.law}
        judged = {name: reason for name, reason in exempt.items() if name not in unjudged}
        return needless(judged, findings)

    def _measure_in(self, lab: Any, cases: Sequence[Case], report: Report) -> list[Finding]:
        """Measure cases in this process, one after another."""
        findings = []
        for case in cases:
            with change_random_state(SEED):
                finding = case.measure_in(lab).excused(lab.exempt)
            findings.append(finding)
            report(finding)
        if error := self.needless(lab.exempt, findings):
            raise error
        return findings

    def _check_known(self, names: Iterable[str], known: Iterable[str], where: str) -> None:
        """Raise ConfigError for the first of ``names`` that is not ``known``."""
        for name in names:
            if name not in known:
                hint = nearest(name, known)
                listed = ", ".join(self.cases)
                raise ConfigError(f"{where}: no case {name!r}{hint} (cases: {listed})")
