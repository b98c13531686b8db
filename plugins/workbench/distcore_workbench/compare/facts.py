"""The results of a comparison as JSON values: compare.json, from which table and page are made."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from distcore.files import strict_json
from distcore.launchers.processes import available_cores
from distcore_workbench.compare.comparison_rows import Row
from distcore_workbench.compare.distance import Distance, OtherBits
from distcore_workbench.compare.runs import Failed, Timing
from distcore_workbench.report.side_by_side import reached

Facts = dict[str, Any]
"""JSON values by name."""
VERSION = 2
"""Version of the format of compare.json."""
COUNTED = ("steps", "samples")
"""Keys in which reports must be equal; otherwise the runs trained on different rows."""


@dataclass(kw_only=True)
class Entry:
    """A row and its measurements so far."""

    row: Row
    """The row that is measured."""
    timings: list[Timing] = field(default_factory=list)
    """One per round that has succeeded."""
    failed: Failed | None = None
    """The first run that failed; the row is not run again."""
    profile: Mapping[str, Any] | Failed | None = None
    """The content of profile.json."""
    distance: Distance | None = None
    """Distance of the parameters from the reference's, both after the first round."""
    bits: OtherBits | None = None
    """Elements with other bits than the reference's, under ``exact``; after the first round."""
    repeat: Distance | None = None
    """Largest distance of the parameters after a later round from those after the first one."""

    @property
    def runs(self) -> bool:
        """True if the row can run, and has not failed."""
        return self.row.reason is None and self.failed is None


def facts_of(entries: Sequence[Entry], reference: str, warm_up: int, about: Facts) -> Facts:
    """Return the comparison as JSON values.

    ``about`` says how it was measured; ``warm_up`` is a number of steps.
    """
    base = next(entry for entry in entries if entry.row.name == reference)
    facts = {
        "version": VERSION,
        "distcore": version("distcore-core"),
        "machine": {
            "cores": available_cores(),
            "processor": platform.machine(),
            "python": platform.python_version(),
        },
        **about,
        "reference": reference,
        "warm_up_steps": warm_up,
        "job": dict(base.row.job),
        "metrics": _names(base),
        "rows": [_row_facts(entry, base, warm_up) for entry in entries],
    }
    return dict(json.loads(strict_json(facts)))  # table and page get exactly what compare.json says


def _row_facts(entry: Entry, base: Entry, warm_up: int) -> Facts:
    """Return a row of the comparison; without measurements, only its setting and why."""
    row = entry.row
    config = row.config
    facts: Facts = {
        "name": row.name,
        "strategy": config.strategy,
        "strategy_options": config.strategy_options,
        "cannot_run": row.reason,
        "failed": entry.failed.error if entry.failed else None,
        "differs": {key: list(both) for key, both in row.differs.items()},
        "notes": _notes(entry, base),
        "folder": str(row.folder),
    }
    if not entry.timings:
        return facts
    rounds = [_round_facts(timing, warm_up) for timing in entry.timings]
    medians = {}
    for key in rounds[0]:
        medians[key] = statistics.median(facts_of_round[key] for facts_of_round in rounds)
    speeds = [facts_of_round["samples_per_second"] for facts_of_round in rounds]
    report = entry.timings[0].report
    return facts | {
        "world_size": report["world_size"],
        "device": report["device"],
        "threads": entry.timings[0].threads,
        "micro_batch_size": config.micro_batch_size,
        **medians,
        "samples_per_second_range": [min(speeds), max(speeds)],
        **_step_quantiles(entry.timings, warm_up),
        "communication_seconds": communication(entry.profile),
        "peak_memory_bytes": max(timing.report["peak_memory_bytes"] for timing in entry.timings),
        "metrics": {name: reached(report).get(name) for name in _names(base)},
        "distance": asdict(entry.distance) if entry.distance else None,
        "other_bits": asdict(entry.bits) if entry.bits else None,
        "distance_between_rounds": asdict(entry.repeat) if entry.repeat else None,
        "rounds": rounds,
    }


def _names(base: Entry) -> list[str]:
    """Return the names of the metrics, also those of each evaluation set."""
    names = list(base.row.metrics)
    if not base.timings:
        return names
    for set_name in base.timings[0].report.get("evaluations", {}):
        names += [f"{set_name}/{metric}" for metric in base.row.metrics]
    return names


def _round_facts(timing: Timing, warm_up: int) -> Facts:
    """Return the parts of one run's time in seconds, and its speed.

    Start-up, warm-up, training and rest add up to the wall time.
    """
    first = _first_counted(timing, warm_up)
    early = timing.steps[:first]
    later = timing.steps[first:]
    # The warm-up is the time of the early steps beyond the median of the later ones.
    warm_up_seconds = max(0.0, sum(early) - len(early) * statistics.median(later))
    return {
        "wall_seconds": timing.wall,
        "start_up_seconds": timing.start_up,
        "warm_up_seconds": warm_up_seconds,
        "training_seconds": sum(timing.steps) - warm_up_seconds,
        "rest_seconds": timing.wall - timing.start_up - sum(timing.steps),
        "samples_per_second": sum(timing.samples[first:]) / sum(later),
    }


def _first_counted(timing: Timing, warm_up: int) -> int:
    """Return the index of the first step after the warm-up, which is at most half of the run."""
    return min(warm_up, len(timing.steps) // 2)


def _step_quantiles(timings: Sequence[Timing], warm_up: int) -> Facts:
    """Return the 5th, 50th and 95th percentile of the step times of all rounds, in seconds.

    Steps of the warm-up are left out.
    """
    seconds: list[float] = []
    for timing in timings:
        seconds += timing.steps[_first_counted(timing, warm_up) :]
    seconds.sort()
    quantiles = {}
    for percentile in (5, 50, 95):
        quantiles[f"step_p{percentile}_seconds"] = _quantile(seconds, percentile / 100)
    return quantiles


def _quantile(ordered: Sequence[float], part: float) -> float:
    """Interpolate linearly between the two nearest values, as numpy does by default."""
    position = part * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def communication(profile: Mapping[str, Any] | Failed | None) -> float | None:
    """Return the seconds per step in which rank 0 was in a collective.

    ``None``: not measured, or not measurable.
    """
    if profile is None or isinstance(profile, Failed):
        return None
    seconds: float | None = profile["seconds_per_step"]["communication"]
    return seconds


def _notes(entry: Entry, base: Entry) -> list[str]:
    """Return warnings for a reader who compares this row with the others, one sentence each."""
    notes = []
    for key, (value, reference_value) in entry.row.differs.items():
        notes.append(f"{key} = {value!r}, the reference has {reference_value!r}")
    notes += [f"does not keep {law}" for law in entry.row.exempt]
    if entry.timings and base.timings:
        reference_counts = _counts(base.timings[0])
        for key, count in _counts(entry.timings[0]).items():
            if count != reference_counts[key]:
                notes.append(f"{key}: {count}, the reference {reference_counts[key]}")
    if entry.distance and not math.isfinite(entry.distance.relative):
        notes.append(
            f"{entry.distance.tensor}: this tensor cannot be compared with the reference's"
        )
    if isinstance(entry.profile, Failed):
        notes.append(f"communication could not be measured: {entry.profile.error}")
    return notes


def _counts(timing: Timing) -> Facts:
    """Return the steps and rows of a run: equal for two runs that did the same."""
    counts = {key: timing.report[key] for key in COUNTED}
    evaluation = timing.report["evaluation"]
    for key in ("evaluated", "unique"):
        counts[key] = evaluation.get(key)
    return counts
