"""A job that fails at one line of the user's twice is not tried with further settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distcore import TaskError
from distcore_workbench.tuning.bench import Bench
from distcore_workbench.tuning.outcome import Outcome
from distcore_workbench.tuning.record import Record, Trial

OWN = "KeyError: 'missing'; traceback in trials/{}/errors/traceback.txt; raised at job.py:45"


def bench(folder: Path, whys: list[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """One whose trials fail so, one after the other."""
    left: Any = iter(whys)
    runner: Any = SimpleNamespace(signals=[])
    tolerance: Any = None
    made = Bench(
        file=None,
        changes={},
        budget=60,
        record=Record(folder / "trials.jsonl"),
        runner=runner,
        plans=None,
        rows=8,
        tolerance=tolerance,
        again="",
    )
    monkeypatch.setattr(
        Bench,
        "_run",
        lambda _, kind, setting, number: Trial(
            kind=kind,
            setting=setting,
            number=number,
            steps=0,
            outcome=Outcome(result="failed", why=next(left)),
        ),
    )
    return made


def measured(made: Bench, count: int) -> None:
    for number in range(count):
        made.measure("screen", {"nproc": number + 1}, 0)


def test_the_second_failure_at_one_line_of_the_users_ends_the_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(tmp_path, [OWN.format(1), OWN.format(2)], monkeypatch)
    measured(made, 1)
    with pytest.raises(
        TaskError, match=r"the job itself fails, so no setting helps: KeyError: .* at job.py:45"
    ):
        made.measure("screen", {"nproc": 2}, 0)


@pytest.mark.parametrize(
    "whys",
    [
        ["gloo is gone"] * 3,
        [OWN.format(1), OWN.format(2).replace("45", "46"), ""],
        [OWN.format(1), "", OWN.format(3)],
    ],
)
def test_failures_that_differ_do_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whys: list[str]
) -> None:
    measured(bench(tmp_path, whys, monkeypatch), 3)
