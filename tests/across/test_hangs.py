"""``benchmarks/hangs.py``: the watchdog names a rank that stops, and one
that makes another collective.

A stop then ends the run, after the others have saved.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/hangs.py"


@pytest.mark.needs("distcore-ddp", "distcore-workbench")
@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.parametrize(
    "kind", ["stopped rank", pytest.param("other order", marks=pytest.mark.slow)]
)
def test_the_rank_that_the_others_wait_for_is_named(kind: str) -> None:
    command = [sys.executable, str(BENCHMARK), "--jitter-minutes", "0", "--kinds", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "named rightly: 1 of 1" in done.stdout, done.stdout + done.stderr
    assert "ended in time: 1 of 1" in done.stdout, done.stdout + done.stderr
    assert "| step-00000006 |" in done.stdout, "the others had not saved their last whole step"
