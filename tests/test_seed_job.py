"""``benchmarks/seed_job.py``: what it deals out, and that its bounds can break."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
