"""``benchmarks/peers.py``: its bounds can break, and its prompts are of unlike lengths."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = {"by-hand": 40.0, "trainer": 40.0, "trainer-grouped": 15.0, "lightning": 40.0, "accelerate": 40.0}
LM = {"by-hand": 100.0, "trl": 110.0, "trl-grouped": 90.0, "trl-packed": 95.0}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("peers", BENCHMARKS / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("job", "precision", "cost", "holds"),
    [
        ("rows", "fp32", ROWS | {"distcore": 13.0, "distcore-fast": 13.0}, True),
        ("rows", "fp32", ROWS | {"distcore": 13.5, "distcore-fast": 13.0}, False),  # not 3 times the defaults
        ("rows", "fp32", ROWS | {"distcore": 13.0, "distcore-fast": 13.8}, False),  # not 1.1 times the best
        ("rows", "fp32", ROWS | {"trainer-grouped": 12.9, "distcore": 13.0, "distcore-fast": 11.0}, False),
        ("rows", "bf16", ROWS | {"distcore": 13.0, "distcore-fast": 11.9}, True),
        ("rows", "bf16", ROWS | {"distcore": 11.0, "distcore-fast": 12.2}, False),
        ("lm", "fp32", LM | {"distcore": 85.0, "distcore-fast": 81.0}, True),
        ("lm", "fp32", LM | {"distcore": 85.0, "distcore-fast": 82.0}, False),
    ],
)
def test_bounds_hold_or_not(
    benchmark: ModuleType, job: str, precision: str, cost: dict[str, float], holds: bool
) -> None:
    assert (
        benchmark.show(job, precision, {kind: [{"cpu": spent, "wall": spent}] for kind, spent in cost.items()}) is holds
    )


def test_prompts_are_the_same_each_time_and_of_unlike_lengths(benchmark: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps([[f"text {number}", 0] for number in range(50)]))
    made = benchmark.prompts(tmp_path / "train.json", 40).read_text()
    assert benchmark.prompts(tmp_path / "train.json", 40).read_text() == made
    rows = [json.loads(line) for line in made.splitlines()]
    assert len({row["prompt"].count("text") for row in rows}) == 12
    assert all(row["completion"].count("text") == 1 for row in rows)
