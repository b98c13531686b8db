"""The laws at every stage, on two ranks."""

from typing import ClassVar

from distcore.testing import StrategyContract


class TestStage0(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 0}


class TestStage1(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 1}


class TestStage2(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 2}


class TestStage2Offload(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 2, "offload_optimizer": "cpu"}


class TestStage3(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 3}


class TestStage3Offload(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
