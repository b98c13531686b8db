"""The suite of strategies: groups of ranks measure their laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distcore.config import load_config, with_changes
from distcore.errors import DistcoreError, StrategyError
from distcore.plugin.strategy.capabilities import ChecksModel
from distcore.resolve import strategies
from distcore.testing.findings import Case, Finding, Report
from distcore.testing.problem import meta_model
from distcore.testing.runner import LIMIT, measure_each
from distcore.testing.subject import Subject
from distcore.testing.suite import Law, Suite

MODULES = (
    "order",
    "gradient",
    "clipping",
    "evaluation",
    "checkpoint",
    "resume",
    "agreement",
    "surprise",
    "bits",
    "memory",
    "own_modules",
)
"""The modules of ``distcore.testing.laws``; importing one registers its cases."""
OWN_MODULES = "distcore.testing.laws.own_modules"
"""The module with the cases of modules of a user's own."""
RANKS = 2
"""Ranks unless ``nproc`` is set."""


class StrategySuite(Suite):
    """The laws of strategies. A case is a function of the ``Lab`` in each rank, or of a
    ``JobLab`` if it starts processes of its own.
    """

    def __init__(self) -> None:
        modules = tuple(f"distcore.testing.laws.{name}" for name in MODULES)
        super().__init__("strategy", self._whole_subject, modules, skips_by_plugin=True)

    def job_law(self, name: str) -> Callable[[Law], Law]:
        """Return the decorator of a case that starts processes of its own."""
        return self._registers(name, is_job=True)

    @property
    def cases(self) -> Mapping[str, Case]:
        """Every case by name: those of the laws' own models, then those of modules of a
        user's own.
        """
        return {**self.required, **self.own_modules}

    @property
    def required(self) -> Mapping[str, Case]:
        """The cases of the laws' own models, in the order of the laws."""
        return {
            name: case
            for name, case in super().cases.items()
            if case.measure.__module__ != OWN_MODULES
        }

    @property
    def own_modules(self) -> Mapping[str, Case]:
        """The cases of modules of a user's own: a run trains these, or is refused in one line.

        Those that start ranks of their own come last.
        """
        own = {
            name: case
            for name, case in super().cases.items()
            if case.measure.__module__ == OWN_MODULES
        }
        return dict(sorted(own.items(), key=lambda item: item[1].is_job))

    def subject(
        self,
        strategy: str,
        nproc: int = RANKS,
        options: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        only: Iterable[str] = (),
    ) -> Subject:
        """Return an installed strategy with ``nproc`` ranks as a subject; with one rank if it
        declares one process.

        ``options`` are the strategy's, ``settings`` other config keys by dotted name; ``only``
        names some of the cases. Raises DistcoreError if the strategy is not installed, an option is
        wrong, ``only`` names no case, or the strategy cannot train the model of the laws.
        """
        cases = self.chosen(only, f"check --strategy {strategy}: --case")
        given = {f"strategy_options.{name}": value for name, value in (options or {}).items()}
        changes = {"strategy": strategy, **given, **(settings or {})}
        config = strategies.expanded(load_config(None, changes))
        subject = Subject(config=config, cases=tuple(cases))
        built = subject.strategy()
        if isinstance(built.plugin, ChecksModel):
            try:
                built.plugin.check_model(config, meta_model(subject.shape))
            except DistcoreError as error:
                why = f"the model with which the laws are measured: {error}"
                raise StrategyError(why) from error
        if built.capabilities.processes == "one":
            nproc = 1
        return replace(subject, config=with_changes(config, {"nproc": nproc}))

    def measure_each(
        self, subjects: Sequence[Subject], limit: float = LIMIT, report: Report = id
    ) -> list[list[Finding] | DistcoreError]:
        """Measure subjects with the same number of ranks in the same processes, one after another.

        Returns for each the findings of its cases, or the error of its setup, of its teardown or of
        its exemptions. A case that takes the ranks down is broken; new ranks measure the others.
        """
        measured = measure_each(subjects, limit, report)
        return [
            self._judged(subject, findings)
            for subject, findings in zip(subjects, measured, strict=True)
        ]

    def measure_all(
        self, subjects: Sequence[Subject], limit: float = LIMIT, report: Report = id
    ) -> list[list[Finding]]:
        """Return the findings by subject, as ``measure_each`` does; raises the first DistcoreError
        of any.
        """
        measured = []
        for findings in self.measure_each(subjects, limit, report):
            if isinstance(findings, DistcoreError):
                raise findings
            measured.append(findings)
        return measured

    def facts(self, name: str, settings: Mapping[str, Any]) -> Mapping[str, int]:
        """Return the version of the hook specs that the strategy is written for."""
        declared = self._whole_subject(name, settings).declared
        return {"spec_version": declared.spec_version}

    def _whole_subject(
        self, name: str, settings: Mapping[str, Any], folder: Path | None = None
    ) -> Subject:
        """Return a strategy with every case, on the ranks that ``settings`` have as ``nproc``."""
        others = {key: value for key, value in settings.items() if key != "nproc"}
        return self.subject(name, settings.get("nproc", RANKS), settings=others)

    def _measure_in(self, lab: Any, cases: Sequence[Case], report: Report) -> list[Finding]:
        """Measure cases of a subject in ranks of its own."""
        subject: Subject = replace(lab, cases=tuple(cases))
        (findings,) = self.measure_all([subject], report=report)
        return findings

    def _judged(
        self, subject: Subject, findings: list[Finding] | DistcoreError
    ) -> list[Finding] | DistcoreError:
        """Return the error of an exemption that excuses nothing in place of the findings."""
        if isinstance(findings, DistcoreError):
            return findings
        exempt = subject.exempt.items()
        must_break = {name: reason for name, reason in exempt if subject.must_break(name)}
        return self.needless(must_break, findings) or findings


STRATEGIES = StrategySuite()
"""The laws of strategies."""
