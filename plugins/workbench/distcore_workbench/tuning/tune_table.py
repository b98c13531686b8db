"""The result of a tune as JSON values, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distcore.cli import print_cells, say, stdout_console
from distcore_workbench.planning.byte_sizes import format_size
from distcore_workbench.report.side_by_side import markdown_table
from distcore_workbench.tuning.fallbacks import frontier
from distcore_workbench.tuning.racing import Finalist, choose_final, times_faster
from distcore_workbench.tuning.record import Trial
from distcore_workbench.tuning.settings import Setting, name_of

Facts = dict[str, Any]
"""JSON values by name."""
FILE_WIDTH = 200
"""Characters per line where stdout is not a terminal."""
HEADINGS = ("setting", "for", "samples/s", "peak", "s", "result")
FINAL_HEADINGS = ("setting", "samples/s", "slowest round", "rounds", "times as given")
LADDER_HEADINGS = ("setting", "samples/s", "peak")


def tune_facts(
    trials: Sequence[Trial], finals: Sequence[Finalist], chosen: Setting | None, about: Facts
) -> Facts:
    """Return everything as JSON values.

    ``chosen``: the setting in config.yaml, ``None`` if nothing ran.
    """
    as_given = next((final for final in finals if not final.setting), None)
    close = choose_final(finals)[1] if finals else []
    facts_of_finals = []
    for final in finals:
        facts_of_finals.append(
            {
                "name": name_of(final.setting),
                "setting": dict(final.setting),
                "samples_per_second": final.speed,
                "rounds": final.speeds,
                "times_as_given": times_faster(final, as_given) if as_given else None,
                "told_apart": final not in close,
            }
        )
    screened = [(trial.setting, trial.outcome) for trial in trials if trial.kind != "final"]
    ladder = []
    for setting, outcome in frontier(screened):
        ladder.append(
            {
                "name": name_of(setting),
                "setting": dict(setting),
                "samples_per_second": outcome.speed,
                "peak_bytes": outcome.peak,
            }
        )
    # A single round has no spread.
    spreads = [final.spread for final in finals if len(final.speeds) > 1]
    return {
        **about,
        "chosen": None if chosen is None else {"name": name_of(chosen), "setting": dict(chosen)},
        "finals": facts_of_finals,
        "noise": max(spreads, default=None),
        "ladder": ladder,
        "trials": [_trial_facts(trial) for trial in trials],
    }


def _trial_facts(trial: Trial) -> Facts:
    outcome = trial.outcome
    return {
        "name": name_of(trial.setting),
        "setting": dict(trial.setting),
        "kind": trial.kind,
        "number": trial.number,
        "steps": trial.steps,
        "result": outcome.result,
        "samples_per_second": outcome.speed or None,
        "peak_bytes": outcome.peak or None,
        "seconds": outcome.seconds,
        "why": outcome.why,
    }


def show(facts: Facts) -> None:
    """Print the race, the settings by memory, the failures, and the remarks."""
    console = stdout_console(FILE_WIDTH)
    for _, headings, rows in tables(facts):
        if rows:
            print_cells(console, headings, rows, numbers=True)
            console.print()
    for line in (*failures(facts), *remarks(facts)):
        say(console, line)


def markdown(facts: Facts) -> str:
    """Return a page with all of it."""
    parts = [
        f"## {title}\n\n{markdown_table(headings, rows)}\n"
        for title, headings, rows in tables(facts)
        if rows
    ]
    tried = [trial_cells(trial) for trial in facts["trials"]]
    parts.append(f"## What was tried\n\n{markdown_table(HEADINGS, tried)}\n")
    notes = "".join(f"- {line}\n" for line in remarks(facts))
    return f"# Tuned\n\n`{facts['command']}`\n\n{notes}\n" + "\n".join(parts)


def tables(facts: Facts) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield title, headings and rows of the finals and of the ladder; either may have no rows."""
    finals = []
    for final in facts["finals"]:
        times_as_given = final["times_as_given"]
        finals.append(
            [
                final["name"],
                f"{final['samples_per_second']:.1f}",
                f"{min(final['rounds']):.1f}",
                str(len(final["rounds"])),
                f"{times_as_given:.2f}" if times_as_given else "n/a",
            ]
        )
    yield "Measured again, in turns", FINAL_HEADINGS, finals
    ladder = []
    for rung in facts["ladder"]:
        speed = f"{rung['samples_per_second']:.1f}"
        ladder.append([rung["name"], speed, format_size(rung["peak_bytes"])])
    yield "From fast to frugal", LADDER_HEADINGS, ladder


def trial_cells(trial: Mapping[str, Any]) -> list[str]:
    """Return the cells of a trial, one for each of ``HEADINGS``."""
    speed, peak = trial["samples_per_second"], trial["peak_bytes"]
    how = trial["result"] + (f": {trial['why']}" if trial["why"] else "")
    return [
        trial["name"],
        trial["kind"],
        f"{speed:.1f}" if speed else "",
        format_size(peak) if peak else "",
        f"{trial['seconds']:.0f}",
        how.replace("|", "/"),
    ]


def failures(facts: Facts) -> Iterator[str]:
    """Yield one line for each trial that failed."""
    for trial in facts["trials"]:
        if trial["result"] != "ok":
            yield f"{trial['name']}: {trial['result']}: {trial['why']}"


def remarks(facts: Facts) -> Iterator[str]:
    """Yield remarks on the numbers."""
    for why in facts["untraced"]:
        yield f"left out by states alone, without activations: {why}"
    if facts["fit_only"]:
        if facts["chosen"]:
            yield f"the first setting that fits: {facts['chosen']['name']}"
        return
    yield (
        "from fast to frugal: by the short trials, without dropout; peak: of the rank that takes"
        " most, on a CPU the resident set of its process"
    )
    if facts["noise"] is not None:
        yield (
            f"noise: rounds of one setting are up to {100 * facts['noise']:.1f} % of the fastest"
            " apart; its samples/s are those of each step in the round in which it was shortest"
        )
    first, *others = facts["finals"] or [None]
    if first and len(first["rounds"]) > 1:
        close = [final["name"] for final in others if not final["told_apart"]]
        if close:
            yield f"not told apart from the fastest by these rounds: {'; '.join(close)}"
        if facts["chosen"] and facts["chosen"]["name"] != first["name"]:
            yield (
                f"chosen: {facts['chosen']['name']}, which changes least of those that are not told"
                " apart"
            )
    elif first:
        yield "the budget was too small for a second round: a longer --budget goes on from here"
    if facts["untried"]:
        yield (
            f"no time to try all of: {'; '.join(facts['untried'])}. A longer --budget goes on from"
            " here"
        )
    if facts["load"]:
        yield (
            f"load average {facts['load']:.1f} when it began: other programs were at work, or just"
            " had been"
        )
