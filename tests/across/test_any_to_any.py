"""Laws 5 and 7 for every ordered pair of strategies and world
sizes: ``benchmarks/any_to_any.py`` measures them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distcore import registry

pytestmark = pytest.mark.ranks

BENCHMARK = Path(__file__).parents[2] / "benchmarks/any_to_any.py"
PUBLISHED = 1e-5


def measured(sizes: str, folder: Path, seconds: int, *flags: str) -> dict[str, dict[str, float]]:
    """Distances by source and target; fails with what the benchmark says was broken."""
    numbers = folder / "numbers.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(BENCHMARK),
        "--sizes",
        sizes,
        "--json",
        str(numbers),
        *flags,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )
    assert numbers.exists(), done.stderr
    results = json.loads(numbers.read_text())
    # a row not seen once, dropout that is not resumed bit for bit, a run that failed
    assert results["broken"] == {}
    assert done.returncode == 0, done.stdout
    table: dict[str, dict[str, float]] = results["table"]
    return table


def is_any_to_any(table: dict[str, dict[str, float]], sizes: int) -> None:
    ways = {"ddp": 1, "fsdp": 2, "deepspeed": 3, "horovod": 1, "accelerate": 1}
    in_pairs = (sizes - 1) * ("mesh" in registry.offers("strategies"))  # two share each layer
    settings = (
        1
        + in_pairs
        + sizes
        * sum(number for name, number in ways.items() if name in registry.offers("strategies"))
    )
    assert len(table) == settings
    for source, row in table.items():
        assert row.keys() == table.keys()
        assert row[source] == 0
        assert max(row.values()) <= PUBLISHED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_to_any_on_one_and_two_ranks(tmp_path: Path) -> None:
    is_any_to_any(measured("1,2", tmp_path, 600), sizes=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_to_any_on_up_to_four_ranks(tmp_path: Path) -> None:
    is_any_to_any(measured("1,2,4", tmp_path, 3600), sizes=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    "mesh" not in registry.offers("strategies"), reason="distcore-mesh is not installed"
)
def test_stages_of_a_pipeline_go_on_as_anything_and_anything_as_stages(tmp_path: Path) -> None:
    only = ("mesh-pp2", "mesh-pp2-interleaved", "mesh-tp2", "ddp", "fsdp-full", "deepspeed-3")
    table = measured("2", tmp_path, 600, "--untied", "--only", ",".join(only))
    assert {name.rpartition("×")[0] for name in table} == {"single", *only}
    assert max(value for row in table.values() for value in row.values()) <= PUBLISHED
