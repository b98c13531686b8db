"""Runs as lines over parallel axes."""

from __future__ import annotations

from typing import Any

import pytest

from distcore_workbench.report.settings_figure import settings_figure


def facts(*runs: tuple[float, object, float | None]) -> dict[str, Any]:
    listed = [
        {
            "name": f"run {number}",
            "differs": {"lr": lr, "model": model},
            "metrics": {"accuracy": value},
        }
        for number, (lr, model, value) in enumerate(runs)
    ]
    return {"metrics": {"accuracy": "max"}, "runs": listed}


def test_each_run_is_a_line_from_its_settings_to_what_it_reached() -> None:
    figure = settings_figure(
        facts(
            (1e-4, "a", 0.5),
            (1e-3, "b", None),
            (1e-2, "c", 0.9),
            (1e-3, "a", 0.7),
            (1e-4, "b", 0.6),
        )
    )
    assert figure is not None
    assert figure.layout["xaxis"]["ticktext"] == ["lr", "model", "accuracy"]
    lines = [trace for trace in figure.traces if "run" in trace]
    assert [line["run"] for line in lines] == [0, 2, 3, 4], "a run without a result has no line"
    assert [line["y"] for line in lines] == [
        [0, 0, 0],
        [pytest.approx(1), 0.5, 1],
        [pytest.approx(0.5), 0, pytest.approx(0.5)],
        [0, 1, pytest.approx(0.25)],
    ]
    assert [line["line"]["width"] for line in lines] == [1.5, 4, 1.5, 1.5]
    ends = [trace for trace in figure.traces if trace["mode"] == "text"]
    assert [sorted(trace["text"]) for trace in ends] == [
        ["0.0001", "0.01"],
        ["a", "b", "c"],
        ["0.5", "0.9"],
    ]


def test_few_runs_and_runs_of_the_same_settings_have_no_figure() -> None:
    few = [(1e-4, "a", 0.5)] * 3
    assert settings_figure(facts(*few)) is None
    alike = facts(*few, *few)
    for run in alike["runs"]:
        run["differs"] = {}
    assert settings_figure(alike) is None
