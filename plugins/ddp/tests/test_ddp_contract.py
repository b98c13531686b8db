"""The laws on ``ddp`` under each of its options, and on ``dp``."""

from typing import ClassVar

import pytest

from distcore.testing import StrategyContract


class TestDDP(StrategyContract):
    strategy = "ddp"


@pytest.mark.slow
class TestThreeRanks(StrategyContract):
    strategy = "ddp"
    nproc = 3


@pytest.mark.slow
class TestStaticGraph(StrategyContract):
    strategy = "ddp"
    options: ClassVar = {"static_graph": True}


@pytest.mark.slow  # with two ranks a sum has but one order, and bit-for-bit holds
class TestStaticGraphOnThreeRanks(StrategyContract):
    strategy = "ddp"
    options: ClassVar = {"static_graph": True}
    nproc = 3


class TestFindUnused(StrategyContract):
    strategy = "ddp"
    options: ClassVar = {"find_unused": True}


@pytest.mark.slow
class TestCompression(StrategyContract):
    strategy = "ddp"
    options: ClassVar = {"compression": "bf16"}


class TestDP(StrategyContract):
    strategy = "dp"
