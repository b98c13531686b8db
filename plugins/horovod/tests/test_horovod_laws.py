"""Every law, under Horovod's own ranks."""

from __future__ import annotations

from typing import ClassVar

import pytest

from distcore.testing import StrategyContract

pytest.importorskip("horovod.torch", reason="Horovod is not built here: distcore-horovod build")


class TestTwoRanks(StrategyContract):
    strategy = "horovod"


@pytest.mark.slow
class TestThreeRanks(StrategyContract):
    strategy = "horovod"
    nproc = 3


class TestOtherOptions(StrategyContract):
    """Sums, fusion by the clock, and parameters that take no part."""

    strategy = "horovod"
    options: ClassVar = {"op": "sum", "groups": 0, "find_unused": True}


@pytest.mark.slow
class TestCompression(StrategyContract):
    strategy = "horovod"
    options: ClassVar = {"compression": "fp16"}
