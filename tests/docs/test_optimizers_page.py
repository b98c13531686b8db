"""docs/optimizers.md says what strategies declare: which optimizer each takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from strategy_chain import is_offered

from distcore import registry
from distcore.model.optim import optimizer_class
from distcore.plugin.options import build
from distcore.plugin.strategy.hooks import capabilities_of

PAGE = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
ROWS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "`single`, `dp`, `ddp`, `horovod`, `accelerate`": [
        (name, {}) for name in ("single", "dp", "ddp", "horovod", "accelerate")
    ],
    "`fsdp`, `accelerate` with `backend=fsdp2`": [
        ("fsdp", {}),
        ("accelerate", {"backend": "fsdp2"}),
    ],
    "`deepspeed`, `accelerate` with `backend=deepspeed`": [
        *(("deepspeed", {"stage": stage}) for stage in range(4)),
        ("accelerate", {"backend": "deepspeed"}),
    ],
}
NAMES = sorted(registry.offers("optimizers"))
INSTALLED = [pair for pairs in ROWS.values() for pair in pairs if is_offered(pair[0])]


def row(label: str) -> list[str]:
    """The cells of a row of the table of strategies, after its label."""
    match = re.search(rf"^\| {re.escape(label)} \| (.+) \|$", PAGE, re.M)
    assert match, f"no row {label}"
    return match[1].split(" | ")


@pytest.mark.parametrize(("strategy", "options"), INSTALLED, ids=lambda value: str(value))
def test_the_table_is_what_the_strategy_declares(strategy: str, options: dict[str, Any]) -> None:
    assert f"\n| | {' | '.join(NAMES)} |\n" in PAGE
    (label,) = (label for label, pairs in ROWS.items() if (strategy, options) in pairs)
    built = build("strategy", strategy, registry.load("strategies", strategy), options)
    declared = capabilities_of(strategy, built)
    taken = [declared.takes_optimizer(name, optimizer_class(name).elementwise) for name in NAMES]
    assert ["yes" if takes else "no" for takes in taken] == row(label)


def test_every_optimizer_has_a_row_of_its_own() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == NAMES


def test_horovods_adasum_takes_adamw_alone() -> None:
    if not is_offered("horovod"):
        pytest.skip("Horovod is not built here: distcore-horovod build")
    declared = capabilities_of(
        "horovod",
        build("strategy", "horovod", registry.load("strategies", "horovod"), {"op": "adasum"}),
    )
    assert [name for name in NAMES if declared.takes_optimizer(name, elementwise=True)] == ["adamw"]
