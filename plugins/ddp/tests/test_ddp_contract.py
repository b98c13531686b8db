"""The laws on ``ddp`` under each of its options, and on ``dp``."""

from dataclasses import replace
from typing import ClassVar

from distcore import Capabilities, load_config
from distcore.testing import StrategyContract
from distcore.testing.cases import all_cases
from distcore.testing.rank import Subject
from distcore.testing.runner import measure
from distcore_ddp.ddp import DDPStrategy


class TestDDP(StrategyContract):
    strategy = "ddp"


class TestThreeRanks(StrategyContract):
    strategy = "ddp"
    nproc = 3


class TestStaticGraph(StrategyContract):
    strategy = "ddp"
    options: ClassVar = {"static_graph": True}


class TestFindUnused(StrategyContract):
    strategy = "ddp"
    options: ClassVar = {"find_unused": True}


class TestCompression(StrategyContract):
    strategy = "ddp"
    options: ClassVar = {"compression": "bf16"}


class TestDP(StrategyContract):
    strategy = "dp"


class Unexcused(DDPStrategy):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, exempt={})


def test_two_ranks_resume_bit_for_bit() -> None:
    config = load_config(None, {"strategy": "ddp", "nproc": 2})
    case = all_cases()["bit-for-bit"]
    ((finding,),) = measure([Subject(config=config, cases=(case,), make=lambda _config: Unexcused())], nproc=2)
    assert finding.held, str(finding)
