"""``benchmarks/seed_job.py``: how it splits the rows, what it compares, and that
its bounds can break.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from distcore.cli.main import main

pytestmark = pytest.mark.programs  # its runs are whole ones

BENCHMARK = Path(__file__).parents[2] / "benchmarks/seed_job.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("seed_job", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["seed_job"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_no_row_is_in_two_parts(benchmark: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text(
        json.dumps([[f"row {number}", number % 6] for number in range(21_000)])
    )
    benchmark.split(tmp_path / "all.json", tmp_path)
    parts = [
        {text for text, _ in json.loads((tmp_path / f"{name}.json").read_text())}
        for name in ("train", "kept", "unseen", "others")
    ]
    assert [len(part) for part in parts] == [9_200, 800, 10_000, 1_000]
    assert len(set().union(*parts)) == 21_000


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        (None, (), "No such file"),
        ("{", (), "not a list of [text, label]"),
        ([["a row", 6]], (), "labels 0 to 5"),
        ([["a row", 0]] * 20_000, (), "20000 rows, and the job needs more than 20000"),
        ([["a row", 0]] * 20_001, ("--model", "./nowhere"), "model ./nowhere: no such folder"),
    ],
)
def test_a_job_that_cannot_be_measured_is_one_line(
    rows: object, flags: Sequence[str], said: str, tmp_path: Path
) -> None:
    data = tmp_path / "rows.json"
    if rows is not None:
        data.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--data", str(data), *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_the_benchmark_judges_the_model_of_each_of_the_three(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("red", "green", "blue", "black", "white", "brown")
    rows = [
        [f"{word} {word} {number}", label]
        for number in range(240)
        for label, word in enumerate(words)
    ]
    for name, part in (
        ("train", rows),
        ("kept", rows[:60]),
        ("unseen", rows[60:120]),
        ("others", rows[:120]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    start = benchmark.make_pretrained(tmp_path, "bert-tiny", None)
    model = benchmark.save_with_new_head(tmp_path, start, 0)
    job = benchmark.Job(folder=tmp_path, model=model, seed=0, nproc=2, lr=2e-3, steps=None)
    for name in ("script", *benchmark.OURS):
        outcome = benchmark.outcome(job, name)
        assert outcome.speed > 0, name
        assert min(outcome.kept, outcome.unseen) > 90, (name, outcome)  # a sixth before it learned


@pytest.mark.parametrize(
    ("name", "speed", "accuracy", "holds"),
    [
        ("same arithmetic", 51.0, 43.8, True),
        ("same arithmetic", 49.0, 44.0, False),
        ("same arithmetic", 51.0, 43.6, False),
        ("preset fast", 99.0, 44.0, False),
        ("preset fast", 101.0, 45.0, True),
        ("script", 10.0, 44.0, True),
    ],
)
def test_a_line_holds_its_bounds_or_not(
    benchmark: ModuleType,
    name: str,
    speed: float,
    accuracy: float,
    holds: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = [benchmark.Outcome(speed=10.0, kept=40.0, unseen=44.0)] * 3
    outcomes = [benchmark.Outcome(speed=speed, kept=40.0, unseen=accuracy)] * 3
    assert benchmark.show(name, outcomes, script, benchmark.BOUNDS.get(name, 0)) is holds
    assert f"{speed / 10:.2f}" in capsys.readouterr().out


class Stopped(Exception):
    """Raised in the place of a run, with its command."""


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_preset_changes_rate_and_arithmetic_alone(
    benchmark: ModuleType,
    nproc: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(command: Sequence[str]) -> None:
        raise Stopped(command)

    def resolved(name: str) -> dict[str, Any]:
        with pytest.raises(Stopped) as stopped:
            benchmark.run_ours(job, tmp_path / "out", benchmark.OURS[name])
        assert main([*stopped.value.args[0][len(benchmark.DISTCORE) :], "--dry-run"]) == 0
        config: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
        return config

    monkeypatch.setattr(benchmark, "quiet", stop)
    for name, count in (("train", 70), ("kept", 10)):
        (tmp_path / f"{name}.json").write_text(
            json.dumps([[f"row {row}", row % 6] for row in range(count)])
        )
    job = benchmark.Job(
        folder=tmp_path, model="bert-tiny", seed=0, nproc=nproc, lr=3e-5, steps=None
    )
    same, fast = resolved("same arithmetic"), resolved("preset fast")
    assert (same["precision"], same["schedule"]["name"]) == ("fp32", "constant")
    assert fast["schedule"]["name"] == "linear"
    grouping = {"fp32": "batch", "bf16": "window"}[fast["precision"]]
    assert (same["loader"]["length_grouping"], fast["loader"]["length_grouping"]) == (
        "batch",
        grouping,
    )
    for config in (same, fast):
        assert (config["global_batch_size"], config["nproc"]) == (32 * nproc, nproc)
        assert (config["lr"], config["epochs"], config["seed"]) == (3e-5, 1, 0)
        assert (config["schedule"]["warmup_steps"], config["clip"]["norm"]) == (0, None)
        assert config["optimizer"]["weight_decay"] == 0.01
