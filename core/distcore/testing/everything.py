"""``distcore check --all``: the laws of every installed strategy, in its layouts, and of every
task, on one page.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

from distcore.errors import ConfigError, DistcoreError
from distcore.registry import distribution, offers
from distcore.resolve import strategies
from distcore.testing.findings import LAWS, Finding
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.task_suite import TASKS

HALF = 1e-2
"""Bounds from here on are those of half precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One row of the page: what was measured, and its findings or why there are none."""

    name: str
    """A strategy with its options, or a task."""
    findings: Sequence[Finding] = ()
    """A finding per case."""
    refused: str = ""
    """The reason, if nothing was measured."""

    @property
    def is_broken(self) -> bool:
        """True if a case is."""
        return any(finding.held is False for finding in self.findings)

    def cell(self, law: str, half: bool = False) -> str:
        """Return the largest error of a law's cases, in fp32 or in half precision; a broken
        case by its name.
        """
        findings = [finding for finding in self.findings if finding.law == law]
        findings = [finding for finding in findings if _is_half(finding) == half]
        broken = [finding.case for finding in findings if finding.held is False]
        if broken:
            return f"**{', '.join(broken)}**"
        errors = [finding.error for finding in findings if finding.error is not None]
        if not errors:
            return ""
        largest_error = max(errors)
        return f"{largest_error:.1e}" if largest_error else "0"


def _is_half(finding: Finding) -> bool:
    """Return True for a gradient that was measured in half precision, as its bound shows."""
    return finding.law == "gradient" and (finding.bound or 0.0) >= HALF


def layouts(name: str) -> Iterator[dict[str, Any]]:
    """Yield options of a strategy: its defaults, and those that it says
    are worth trying (``tunes``).
    """
    plugin = strategies.load(name, {}).plugin
    worth_trying = getattr(type(plugin), "tunes", ())
    yielded: list[dict[str, Any]] = []
    for options in ({}, *worth_trying):
        if options not in yielded:
            yielded.append(options)
            yield options


def of_strategies(nproc: int, settings: Mapping[str, Any]) -> Iterator[Measurement]:
    """Measure each installed strategy in each layout, on ``nproc`` ranks."""
    for name in offers("strategies"):
        try:
            layouts_of_strategy = list(layouts(name))
        except DistcoreError as error:
            yield Measurement(name=name, refused=str(error))
            continue
        for options in layouts_of_strategy:
            words = [f"{key}={value}" for key, value in options.items()]
            title = f"{name}:{','.join(words)}" if words else name
            layout = {f"strategy_options.{key}": value for key, value in options.items()}
            all_settings = {**layout, **settings, "nproc": nproc}
            try:
                findings = STRATEGIES.measure(name, all_settings)
                yield Measurement(name=title, findings=findings)
            except DistcoreError as error:
                yield Measurement(name=title, refused=str(error))


def of_tasks(settings: Mapping[str, Any]) -> Iterator[Measurement]:
    """Measure each installed task, with its own data and model, in this process."""
    for name in offers("tasks"):
        try:
            yield Measurement(name=name, findings=TASKS.measure(name, settings))
        except DistcoreError as error:
            yield Measurement(name=name, refused=str(error))


def check_all(nproc: int, settings: Mapping[str, Any], page: Path | None) -> int:
    """Measure everything, a line as each row ends; write ``page``, Markdown. Return 1 if a case
    is broken, else 0.
    """
    if page and page.suffix != ".md":
        raise ConfigError(f"--out {page}: the page is Markdown; name a file that ends in .md")
    began = monotonic()
    rows_by_kind = {"strategy": of_strategies(nproc, settings), "task": of_tasks(settings)}
    measured: dict[str, list[Measurement]] = {}
    for kind, rows in rows_by_kind.items():
        measured[kind] = []
        for row in rows:
            measured[kind].append(row)
            print(f"{kind} {row.name}: {row.refused or _counts(row)}", flush=True)
    minutes = (monotonic() - began) / 60
    text = page_of(measured, minutes, nproc)
    if page:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        print(f"page: {page}")
    return int(any(row.is_broken for rows in measured.values() for row in rows))


def page_of(measured: Mapping[str, Sequence[Measurement]], minutes: float, nproc: int) -> str:
    """Return the page: a table per kind, with a column per law, and below the reason of each case
    that did not hold.
    """
    laws = [(law, False, f"{number} {law}") for law, number in LAWS.items()]
    laws.insert(2, ("gradient", True, "2 in half precision"))
    lines = [
        "# Laws of everything that is installed",
        "",
        (
            f"Measured on {date.today()} in {minutes:.0f} minutes, on {nproc} ranks"
            f" ({platform.machine()}): {_versions()}."
        ),
        (
            "A cell is the largest error of a law's cases; it is empty where no case applies;"
            " broken cases are bold. An error of agreement is the seconds until all ranks end after"
            " one has failed."
        ),
    ]
    for kind, rows in measured.items():
        # A column that is empty in all rows is left out.
        columns = [
            (law, half, title)
            for law, half, title in laws
            if any(row.cell(law, half) for row in rows)
        ]
        titles = [title for *_, title in columns]
        lines += [
            "",
            f"| {kind} | {' | '.join(titles)} | cases |",
            "|---" * (len(columns) + 2) + "|",
        ]
        for row in rows:
            if not row.refused:
                cells = [row.cell(law, half) for law, half, _ in columns]
                lines.append(f"| `{row.name}` | {' | '.join(cells)} | {_counts(row)} |")
    all_rows = [row for rows in measured.values() for row in rows]
    lines += ["", *_reasons(all_rows)]
    return "\n".join(lines) + "\n"


def _reasons(rows: Sequence[Measurement]) -> Iterator[str]:
    """Yield a line for each row that was not measured, and for each reason why cases did not hold,
    with all rows that have it.
    """
    for row in rows:
        if row.refused:
            yield f"- `{row.name}` was not measured: {row.refused}"
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for finding in row.findings:
            if finding.held is not True:
                reason = (f"{finding.case} is {finding.verdict}", finding.note)
                names_by_reason.setdefault(reason, []).append(row.name)
    for (case, note), names in names_by_reason.items():
        yield f"- {case} ({', '.join(names)}): {note}"


def _counts(row: Measurement) -> str:
    """Return how many cases held, were skipped and are broken; the refusal if there are none."""
    counts = []
    for verdict in ("held", "skipped", "broken"):
        count = sum(finding.verdict == verdict for finding in row.findings)
        if count:
            counts.append(f"{count} {verdict}")
    return ", ".join(counts) or row.refused


def _versions() -> str:
    """Return the versions of Python, torch and the distributions that were measured."""
    distributions: set[str] = set()
    for group in ("strategies", "tasks"):
        for entries in offers(group).values():
            distributions.update(distribution(entry) for entry in entries)
    python_version = platform.python_version()
    versions = [f"Python {python_version}", f"torch {version('torch')}", *sorted(distributions)]
    return ", ".join(versions)
