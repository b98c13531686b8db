"""``benchmarks/seed_job.py``: what it deals out, and that its bounds can break."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from distcore.cli import main

BENCHMARK = Path(__file__).parents[1] / "benchmarks/seed_job.py"


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
    (tmp_path / "all.json").write_text(json.dumps([[f"row {number}", number % 6] for number in range(21_000)]))
    benchmark.split(tmp_path / "all.json", tmp_path)
    parts = [
        {text for text, _ in json.loads((tmp_path / f"{name}.json").read_text())}
        for name in ("train", "kept", "unseen", "others")
    ]
    assert [len(part) for part in parts] == [9_200, 800, 10_000, 1_000]
    assert len(set().union(*parts)) == 21_000


@pytest.mark.parametrize(
    ("name", "speed", "accuracy", "holds"),
    [
        ("same arithmetic", 31.0, 43.6, True),
        ("same arithmetic", 29.0, 44.0, False),
        ("same arithmetic", 31.0, 43.4, False),
        ("preset fast", 79.0, 44.0, False),
        ("preset fast", 81.0, 45.0, True),
        ("script", 10.0, 44.0, True),
    ],
)
def test_a_line_holds_its_bounds_or_not(
    benchmark: ModuleType, name: str, speed: float, accuracy: float, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script = [benchmark.Outcome(speed=10.0, kept=40.0, unseen=44.0)] * 3
    found = [benchmark.Outcome(speed=speed, kept=40.0, unseen=accuracy)] * 3
    assert benchmark.show(name, found, script) is holds
    assert f"{speed / 10:.2f}" in capsys.readouterr().out


class Stopped(Exception):
    """Raised in the place of a run, with its command."""


@pytest.mark.parametrize("nproc", [1, 2])
def test_only_the_preset_changes_rate_and_arithmetic(
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
        assert main([*stopped.value.args[0][1:], "--dry-run"]) == 0
        config: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
        return config

    monkeypatch.setattr(benchmark, "quiet", stop)
    for name, count in (("train", 70), ("kept", 10)):
        (tmp_path / f"{name}.json").write_text(json.dumps([[f"row {row}", row % 6] for row in range(count)]))
    job = benchmark.Job(folder=tmp_path, model="bert-tiny", seed=0, nproc=nproc, lr=3e-5, steps=None)
    same, fast = resolved("same arithmetic"), resolved("preset fast")
    assert (same["precision"], same["schedule"]["name"]) == ("fp32", "constant")
    assert fast["schedule"]["name"] == "linear"
    assert (same["loader"]["length_grouping"], fast["loader"]["length_grouping"]) == ("batch", "window")
    for config in (same, fast):
        assert (config["global_batch_size"], config["nproc"]) == (32 * nproc, nproc)
        assert (config["lr"], config["epochs"], config["seed"]) == (3e-5, 1, 0)
        assert (config["schedule"]["warmup_steps"], config["clip"]["norm"]) == (0, None)
        assert config["optimizer"]["weight_decay"] == 0.01
