"""``benchmarks/peers.py``: its bounds can break, its rows are of unlike lengths, and its
search keeps what gains.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = {
    "by-hand": 40.0,
    "trainer": 40.0,
    "trainer-grouped": 15.0,
    "lightning": 40.0,
    "accelerate": 40.0,
}
LM = {"by-hand": 100.0, "trl": 110.0, "trl-grouped": 90.0, "trl-packed": 95.0}
TEXTS = [(f"text {number}", number % 6) for number in range(50)]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
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
        # not 3 times the defaults
        ("rows", "fp32", ROWS | {"distcore": 13.5, "distcore-fast": 13.0}, False),
        # not 1.1 times the best
        ("rows", "fp32", ROWS | {"distcore": 13.0, "distcore-fast": 13.8}, False),
        (
            "rows",
            "fp32",
            ROWS | {"trainer-grouped": 12.9, "distcore": 13.0, "distcore-fast": 11.0},
            False,
        ),
        ("rows", "fp32", ROWS | {"searched": 14.0, "distcore": 13.0, "distcore-fast": 13.0}, False),
        ("rows", "bf16", ROWS | {"distcore": 13.0, "distcore-fast": 11.9}, True),
        ("rows", "bf16", ROWS | {"distcore": 11.0, "distcore-fast": 12.2}, False),
        # not the Trainer's groups
        ("rows", "bf16", ROWS | {"distcore": 15.1, "distcore-fast": 11.9}, False),
        ("lm", "fp32", LM | {"distcore": 85.0, "distcore-fast": 81.0}, True),
        ("lm", "fp32", LM | {"distcore": 85.0, "distcore-fast": 82.0}, False),
    ],
)
def test_a_bound_of_a_peer_holds_or_not(
    benchmark: ModuleType,
    job: str,
    precision: str,
    cost: dict[str, float],
    holds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark, "processor", lambda: "one with avx512_bf16")
    runs = {kind: [{"cpu": spent, "wall": spent}] for kind, spent in cost.items()}
    assert benchmark.show(job, precision, runs) is holds


def test_a_processor_without_bf16_breaks_no_bound_of_it(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "processor", lambda: "an older one")
    runs = {kind: [{"cpu": 1.0, "wall": 1.0}] for kind in (*ROWS, "distcore", "distcore-fast")}
    assert benchmark.show("rows", "bf16", runs)
    assert "not measured here" in capsys.readouterr().out


def test_rows_are_the_same_each_time_and_of_unlike_lengths(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    made = benchmark.make.data("lm", TEXTS, 40, tmp_path).read_text()
    assert benchmark.make.data("lm", TEXTS, 40, tmp_path).read_text() == made
    rows = [json.loads(line) for line in made.splitlines()]
    assert len(rows) == 40
    assert len({row["prompt"].count("text") for row in rows}) == 12
    assert all(row["completion"].count("text") == 1 for row in rows)


def costs(given: dict[str, float]) -> Any:
    """A library's cost is that of its defaults, times the factors of its flags."""

    def run(library: str, flags: dict[str, Any]) -> float | str:
        if "compile" in flags:
            return "Traceback\nno compiler"
        spent = given[library]
        for name, value in flags.items():
            spent *= {"accumulate": 0.5 if value == 4 else 0.9, "train_sampling_strategy": 0.8}.get(
                name, 1.0
            )
        return spent

    return run


def test_a_search_keeps_flags_that_gain_and_returns_the_fastest(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    best = benchmark.search(
        "rows", ["by-hand", "trainer"], 1, costs({"by-hand": 10.0, "trainer": 9.0})
    )
    assert best == ("by-hand", {"accumulate": 4})
    assert "16 flags tried, 0 left" in capsys.readouterr().out
    best = benchmark.search(
        "rows", ["by-hand", "trainer"], 1, costs({"by-hand": 30.0, "trainer": 9.0})
    )
    assert best == ("trainer", {"train_sampling_strategy": "group_by_length"})
    assert benchmark.search("rows", ["by-hand"], 0, costs({"by-hand": 30.0})) == ("by-hand", {})


@pytest.mark.slow
def test_libraries_run_without_distcore(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = benchmark.make.data("rows", TEXTS, 160, tmp_path)
    model = benchmark.make.model("rows", "bert-tiny", rows, tmp_path)
    (tmp_path / "distcore.py").write_text("raise ImportError('distcore is not there')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = ["rows", "by-hand", str(model), str(rows), "5", "fp32", "{}"]
    script = str(BENCHMARKS / "peer_runs/libraries.py")
    done = benchmark.run_once(sys.executable, 1, [script, *given], 120)
    assert set(done) == {"cpu", "wall"}, done
