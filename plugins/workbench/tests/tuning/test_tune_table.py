"""The tables of a tune: no figure contradicts the one beside it."""

from __future__ import annotations

import pytest

from distcore_workbench.tuning.racing import Finalist
from distcore_workbench.tuning.tune_table import markdown, show, tune_facts

ROUNDS = [[0.1, 0.2], [0.2, 0.1]]
"""Seconds of two steps, in two rounds: the shortest time of each makes a speed
that neither round had.
"""
ABOUT = {"command": "distcore tune", "untraced": [], "fit_only": False, "untried": [], "load": None}


def test_the_speed_of_a_finalist_stands_beside_its_slowest_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    finals = [Finalist(setting={"nproc": 2}, speeds=[100.0, 90.0], rounds=[*ROUNDS])]
    facts = tune_facts([], finals, {"nproc": 2}, ABOUT)
    show(facts)
    heading, row = capsys.readouterr().out.splitlines()[:2]
    assert heading.split("  ")[0] == "setting"
    assert "slowest round" in heading
    speed, slowest, rounds = (float(word) for word in row.split()[-4:-1])
    assert speed == pytest.approx(150)
    assert (slowest, rounds) == (90, 2)
    assert "…" not in markdown(facts)
