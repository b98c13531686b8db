"""``distcore compare RUN RUN…``: runs that are there, without training anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distcore.cli.main import main
from distcore.config import dump_config, load_config
from distcore.model.optim import optimizer_options

METRICS = {"loss": "min", "accuracy": "max"}


def write_run(
    folder: Path, evaluation: dict[str, Any] | None, changes: dict[str, Any], rows: int = 20
) -> None:
    """A run folder as a run leaves it; ``evaluation=None``: before its end."""
    folder.mkdir(parents=True)
    options = {
        f"optimizer.{name}": value
        for name, value in optimizer_options(load_config(None, changes)).items()
    }
    (folder / "config.yaml").write_text(dump_config(load_config(None, options | changes)))
    report = {
        "steps": 8,
        "world_size": 1,
        "train_seconds": 2.5,
        "samples_per_second": 102.4,
        "peak_memory_bytes": 2**28,
        "metrics": METRICS,
        "evaluation": (evaluation or {}) | {"classification_report": "x", "dataset_size": rows},
    }
    if evaluation is not None:
        (folder / "report.json").write_text(json.dumps(report))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs in ``runs``, of which the last one is not finished."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/slow"), {"loss": 0.5, "accuracy": 0.8}, {"lr": 1e-4})
    write_run(
        Path("runs/fast"),
        {"loss": 0.25, "accuracy": 0.75},
        {"lr": 1e-3, "optimizer.betas": [0.9, 0.98]},
    )
    write_run(Path("runs/stopped"), None, {"lr": 1e-2})
    return tmp_path


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["compare", *arguments]) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # without colors
    return [" ".join(line.split()) for line in text.splitlines()]


def test_differing_keys_come_first_then_metrics_with_the_best_marked_then_speed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines_of(capsys, "runs/slow", "runs/fast") == [
        "run lr optimizer.betas loss ↓ accuracy ↑ samples/s training s peak MiB/rank",
        "slow 0.0001 [0.9, 0.999] 0.5000 0.8000 * 102.4 2.5 256",
        "fast 0.001 [0.9, 0.98] 0.2500 * 0.7500 102.4 2.5 256",
    ]


def test_each_evaluation_set_has_columns_of_its_own(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path("runs/fast/report.json")
    sets = {"evaluations": {"hard": {"loss": 0.75, "accuracy": 0.5, "dataset_size": 9}}}
    report.write_text(json.dumps(json.loads(report.read_text()) | sets))
    heading, slow, fast = lines_of(capsys, "runs/slow", "runs/fast")
    assert "accuracy ↑ hard/loss ↓ hard/accuracy ↑ samples/s" in heading
    assert "0.8000 * n/a n/a 102.4" in slow
    assert "0.7500 0.7500 0.5000 102.4" in fast


def test_figures_of_a_part_of_a_run_are_named_as_such(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path("runs/fast/report.json")
    report.write_text(json.dumps(json.loads(report.read_text()) | {"measured_since": 4}))
    said = "fast: was resumed at step 4; its speed, seconds and memory are of the steps since then"
    assert said in lines_of(capsys, "runs/slow", "runs/fast")


def test_a_folder_stands_for_the_runs_in_it_and_one_that_is_not_finished_says_so(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(capsys, "runs")
    assert [line.split()[0] for line in lines[1:4]] == ["fast", "slow", "stopped"]
    assert lines[3].startswith("stopped 0.01 [0.9, 0.999] n/a n/a n/a n/a n/a")
    assert lines[4] == "stopped: not finished, it has no report.json"


def test_columns_that_do_not_fit_stand_below_the_table(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    lines = lines_of(capsys, "runs/slow", "runs/fast")
    assert lines[0] == "run lr optimizer.betas loss ↓ accuracy ↑"
    assert lines[3:] == [
        "",
        "run samples/s training s peak MiB/rank",
        "slow 102.4 2.5 256",
        "fast 102.4 2.5 256",
    ]


def test_runs_that_were_tested_on_other_rows_are_named(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Path("runs/other"), {"loss": 0.1, "accuracy": 0.9}, {"lr": 1e-4}, rows=64)
    assert (
        lines_of(capsys, "runs/slow", "runs/other")[-1]
        == "tested on different rows: 20, 64 of them"
    )


def test_the_page_has_the_same_table_and_no_file_is_written_without_out(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines_of(capsys, "runs/slow", "runs/fast", "--out", "compared")
    lines_of(capsys, "runs/slow", "runs/fast")
    facts = json.loads(Path("compared/compare.json").read_text())
    assert facts["metrics"] == METRICS
    assert [run["differs"]["lr"] for run in facts["runs"]] == [1e-4, 1e-3]
    for name in ("compare.md", "compare.html"):
        text = Path("compared", name).read_text()
        assert re.search(r"[|>] ?0\.2500 \* ?[|<]", text)
        assert re.search(r"[|>] ?optimizer\.betas ?[|<]", text)
    assert sorted(path.name for path in runs.iterdir()) == ["compared", "runs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "runs/slow --strategies single",
            "compare runs/slow: give run folders, .* or a config file .*; not both",
        ),
        ("runs/slow --row single", "compare runs/slow: give run folders, .*; not both"),
        ("runs/slow --lr 1", "--lr: is for a job to run"),
        ("runs/slow --set lr=1", "--lr: is for a job to run"),
        ("runs/slow --rounds 2", "--rounds: is for a job to run"),
        ("runs/slwo", "compare runs/slwo: no such folder; give run folders"),
        ("runs/slow empty", "compare empty: no run folder: it has no config.yaml"),
        (
            "job.yaml",
            "compare job.yaml: no such folder; give run folders, or --strategies for a job to run",
        ),
        ("runs/broken", "runs/broken/report.json: cannot be read"),
    ],
)
def test_runs_that_cannot_be_compared_are_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (runs / "empty").mkdir()
    write_run(runs / "runs/broken", {}, {})
    (runs / "runs/broken/report.json").write_text("{")
    assert main(["compare", *arguments.split()]) == 2
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)
