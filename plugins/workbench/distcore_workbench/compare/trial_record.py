"""The record of a search, ``trials.json`` in the folder of its sweep, as those read it
who need no Optuna.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

RECORD = "trials.json"
"""The file with all trials: number, run, state and value of each."""


def said_of(sweep: Path) -> Iterator[str]:
    """Yield lines about a search: how many trials fell behind, and what the metric
    depended on; none without.
    """
    file = sweep / RECORD
    if not file.is_file():
        return
    record = json.loads(file.read_text(encoding="utf-8"))
    states = [trial["state"] for trial in record["trials"]]
    if early := states.count("pruned"):
        yield (
            f"behind the median of those before: {early} of {len(states)} trials, ended if they"
            " still trained"
        )
    if record["importance"]:
        listed = ", ".join(f"{key} {weight:.2f}" for key, weight in record["importance"].items())
        yield f"importance for {record['metric']}: {listed}"
