"""Which strategy to use: the page has each of them, and formulas that a benchmark holds."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from strategy_chain import is_offered

from distcore import registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/which-strategy.md").read_text()


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "memory_and_traffic", ROOT / "benchmarks/memory_and_traffic.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", [name for name in registry.entries("strategies") if is_offered(name)]
)
def test_the_page_has_each_strategy(name: str) -> None:
    assert f"`{name}`" in PAGE


def cells(heading: str) -> dict[str, list[str]]:
    """The cells of the table below the heading, by each strategy in the first column."""
    section = PAGE.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line[:3] == "| `"
    ]
    return {name: rest for names, *rest in rows for name in re.findall("`([^`]+)`", names)}


def value(formula: str, n: int, a: int) -> float:
    """Evaluate a cell such as ``4 + 16 / N`` or ``2 A + 1``; a remark may follow a
    comma or a semicolon.
    """
    expression = (
        formula.replace(";", ",").partition(",")[0].replace(" A", f" * {a}").replace("N", str(n))
    )
    return float(eval(expression))


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_formulas_are_those_that_the_benchmark_holds(n: int, benchmark: ModuleType) -> None:
    for name, (*memory, whole, traffic) in cells("## Memory and traffic").items():
        row = benchmark.ROWS[name]
        assert value(whole, n, 1) == pytest.approx(row.held(n)), name
        assert sum(
            value(cell, n, 1) for cell in memory if cell and "buffer" not in cell
        ) == pytest.approx(row.held(n))
        for micro_batches in (1, 3):
            if row.sent is not None and traffic[0].isdigit():
                assert value(traffic, n, micro_batches) == row.sent(n, micro_batches), name


def test_the_measured_values_are_within_the_bound(benchmark: ModuleType) -> None:
    measured = cells("### Measured")
    assert measured.keys() == benchmark.ROWS.keys()
    for name, (held, sent) in measured.items():
        row = benchmark.ROWS[name]
        assert float(held) == pytest.approx(row.held(2), rel=benchmark.TOLERANCE)
        if row.sent is not None:
            assert float(sent) == pytest.approx(row.sent(2, 1) / 2, rel=benchmark.TOLERANCE)
