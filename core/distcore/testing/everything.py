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
        cases = [
            finding for finding in self.findings if finding.law == law and _is_half(finding) == half
        ]
        if broken := [finding.case for finding in cases if finding.held is False]:
            return f"**{', '.join(broken)}**"
        errors = [finding.error for finding in cases if finding.error is not None]
        return "" if not errors else f"{max(errors):.1e}" if max(errors) else "0"


def _is_half(finding: Finding) -> bool:
    return finding.law == "gradient" and (finding.bound or 0.0) >= HALF


def layouts(name: str) -> Iterator[dict[str, Any]]:
    """Yield options of a strategy: its defaults, and those that it says
    are worth trying (``tunes``).
    """
    known: list[dict[str, Any]] = []
    for options in ({}, *getattr(type(strategies.load(name, {}).plugin), "tunes", ())):
        if options not in known:
            known.append(options)
            yield options


def of_strategies(nproc: int, settings: Mapping[str, Any]) -> Iterator[Measurement]:
    """Measure each installed strategy in each layout, on ``nproc`` ranks."""
    for name in offers("strategies"):
        try:
            every = list(layouts(name))
        except DistcoreError as error:
            yield Measurement(name=name, refused=str(error))
            continue
        for options in every:
            title = f"{name}:{','.join(f'{key}={value}' for key, value in options.items())}".rstrip(
                ":"
            )
            layout = {f"strategy_options.{key}": value for key, value in options.items()}
            try:
                findings = STRATEGIES.measure(name, {**layout, **settings, "nproc": nproc})
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
    measured: dict[str, list[Measurement]] = {"strategy": [], "task": []}
    for kind, rows in (("strategy", of_strategies(nproc, settings)), ("task", of_tasks(settings))):
        for row in rows:
            measured[kind].append(row)
            print(f"{kind} {row.name}: {row.refused or _counts(row)}", flush=True)
    text = page_of(measured, (monotonic() - began) / 60, nproc)
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
            "A cell is the largest error of a law's cases; nothing stands where no case applies;"
            " broken cases are bold. An error of agreement is the seconds until all ranks end after"
            " one has failed."
        ),
    ]
    for kind, rows in measured.items():
        used = [column for column in laws if any(row.cell(*column[:2]) for row in rows)]
        lines += [
            "",
            f"| {kind} | {' | '.join(title for *_, title in used)} | cases |",
            "|---" * (len(used) + 2) + "|",
        ]
        lines += [
            f"| `{row.name}` | {' | '.join(row.cell(law, half) for law, half, _ in used)} |"
            f" {_counts(row)} |"
            for row in rows
            if not row.refused
        ]
    lines += ["", *_reasons([row for rows in measured.values() for row in rows])]
    return "\n".join(lines) + "\n"


def _reasons(rows: Sequence[Measurement]) -> Iterator[str]:
    for row in rows:
        if row.refused:
            yield f"- `{row.name}` was not measured: {row.refused}"
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for finding in row.findings:
            if finding.held is not True:
                reasons.setdefault(
                    (f"{finding.case} is {finding.verdict}", finding.note), []
                ).append(row.name)
    for (case, note), names in reasons.items():
        yield f"- {case} ({', '.join(names)}): {note}"


def _counts(row: Measurement) -> str:
    counts = {
        verdict: sum(it.verdict == verdict for it in row.findings)
        for verdict in ("held", "skipped", "broken")
    }
    return (
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or row.refused
    )


def _versions() -> str:
    entries = [
        entry
        for group in ("strategies", "tasks")
        for offered in offers(group).values()
        for entry in offered
    ]
    ours = sorted({distribution(entry) for entry in entries})
    return ", ".join([f"Python {platform.python_version()}", f"torch {version('torch')}", *ours])
