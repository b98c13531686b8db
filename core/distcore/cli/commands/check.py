"""``distcore check``: measure whether a plugin keeps the laws of its kind."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from distcore.cli.flags import ranks
from distcore.config.values import parse_settings
from distcore.errors import ConfigError
from distcore.testing.suites import kinds, suite_of

if TYPE_CHECKING:
    from distcore.testing import Finding

SUMMARY = "measure the laws against a strategy, a task or another plugin"

LAW_6 = "distcore's own tests and benchmarks/kill_resume.py measure it, by killing runs"
COLORS = {"held": "green", "broken": "red", "skipped": "yellow"}
"""Of the verdicts."""
KIND_HELP = {
    "strategy": "an installed strategy",
    "task": "an installed task, or file.py:Class; measured in one process",
}
"""Help of kinds that are not like the others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore check --KIND NAME | --all [FLAGS]"
    what = parser.add_mutually_exclusive_group(required=True)
    for kind in kinds():
        text = KIND_HELP.get(kind, f"an installed {kind}, or file.py:Class")
        what.add_argument(f"--{kind}", metavar="NAME", help=text)
    what.add_argument(
        "--all",
        action="store_true",
        help="all installed strategies, in their layouts, and all tasks",
    )
    parser.add_argument(
        "--nproc",
        type=ranks,
        default=2,
        metavar="N",
        help="ranks to start for a strategy (default: 2)",
    )
    parser.add_argument(
        "--set", dest="set", action="append", default=[], metavar="KEY=VALUE",
        help="set a config key, such as strategy_options.NAME=VALUE or device=cpu; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="of --all: the page to write, Markdown"
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="only this case; repeatable"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON instead of a table, a line as each case ends",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Exit code 0 if no case is broken, else 1."""
    if arguments.all:
        return _check_all(arguments)
    if arguments.out:
        raise ConfigError(
            f"--out {arguments.out}: is the page of --all; for one plugin redirect the output"
        )
    # The parser requires just one of them.
    [kind] = [kind for kind in kinds() if getattr(arguments, kind)]
    name = getattr(arguments, kind)
    settings = parse_settings(arguments.set)
    if kind == "strategy":  # others start the ranks that their cases need
        settings["nproc"] = arguments.nproc
    suite = suite_of(kind)
    facts = suite.facts(name, settings)
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        if arguments.json:
            # Before each but the first a comma: output that was cut off is valid with ``]``.
            content = {**asdict(finding), "verdict": finding.verdict, **facts}
            print("," if findings else "[", json.dumps(content), flush=True)
        findings.append(finding)

    try:
        # The report came in the order in which cases ended; this is the order of the suite.
        findings[:] = suite.measure(name, settings, arguments.case, report)
    finally:
        # An error does not lose what was measured before it.
        if findings and arguments.json:
            print("]")
        elif findings:
            show(findings)
    if not arguments.json:
        for version in facts.values():
            print(f"law 6, commit, is the core's alone: {LAW_6}")
            print(f"written for hook-spec version {version}")
    is_broken = any(finding.held is False for finding in findings)
    return 1 if is_broken else 0


def _check_all(arguments: argparse.Namespace) -> int:
    """Measure everything that is installed; return the exit code, as ``run`` does."""
    from distcore.testing.everything import check_all

    if arguments.case or arguments.json:
        raise ConfigError("--all: measures every case; leave out --case and --json")
    return check_all(arguments.nproc, parse_settings(arguments.set), arguments.out)


def show(findings: list[Finding]) -> None:
    """Print a table of the findings, below it why cases were skipped or are
    broken, and a summary.
    """
    from rich.text import Text

    from distcore.cli.tables import print_cells, say, stdout_console
    from distcore.testing import LAWS, SCALE

    console = stdout_console()
    rows = [
        (
            f"{LAWS[finding.law]} {finding.law}",
            finding.case,
            Text(finding.verdict, COLORS[finding.verdict]),
            _number(finding.error),
            _number(finding.bound),
        )
        for finding in findings
    ]
    print_cells(console, ("law", "case", "", "error", "bound"), rows)

    def explanation_first(item: tuple[str, list[str]]) -> tuple[bool, int]:
        reason, cases = item
        return SCALE not in reason, -len(cases)

    for verdict in ("skipped", "broken"):
        cases_by_reason = _cases_by_reason(findings, verdict)
        for reason, cases in sorted(cases_by_reason.items(), key=explanation_first):
            say(console, f"{verdict}: {', '.join(cases)}: {reason}")
    counts = []
    for verdict in COLORS:
        count = sum(finding.verdict == verdict for finding in findings)
        counts.append(f"{count} {verdict}")
    say(console, ", ".join(counts))


def _cases_by_reason(findings: list[Finding], verdict: str) -> dict[str, list[str]]:
    """Return the names of the cases with ``verdict``, by the reason in their note.

    If gradients have a wrong scale, that explains the errors of all laws about their results.
    """
    from distcore.testing import LAWS, SCALE

    has_wrong_scale = any(SCALE in finding.note for finding in findings if finding.held is False)
    cases_by_reason: dict[str, list[str]] = {}
    for finding in findings:
        if finding.verdict != verdict:
            continue
        is_about_results = LAWS[finding.law] in (2, 3, 5, 7)
        is_explained = has_wrong_scale and is_about_results and SCALE not in finding.note
        reason = finding.note
        if is_explained and finding.error:
            reason = "likely for the same reason"
        cases_by_reason.setdefault(reason, []).append(finding.case)
    return cases_by_reason


def _number(value: float | None) -> str:
    """Return the cell of an error or a bound; empty without one."""
    return "" if value is None else f"{value:.2g}"
