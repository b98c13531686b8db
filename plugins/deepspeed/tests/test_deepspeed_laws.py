"""The laws at every stage, on two ranks."""

import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest

from distcore.testing import StrategyContract
from distcore_deepspeed.ops import missing_for_nvme

DISK = TemporaryDirectory(prefix="distcore-nvme-")


class TestStage0(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 0}


@pytest.mark.slow  # stage 2 shards the optimizer, too
class TestStage1(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 1}


class TestStage2(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 2}


class TestStage2Offload(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 2, "offload_optimizer": "cpu"}
    alone = True


class TestStage3(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 3}


@pytest.mark.slow  # stage 2 above offloads, too
class TestStage3Offload(StrategyContract):
    strategy = "deepspeed"
    options: ClassVar = {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
    alone = True


@pytest.fixture(scope="module")
def async_io() -> None:
    """Compile before ranks start, whose time is limited; in a process of its own, as ranks are
    forked from this one.
    """
    code = "from distcore_deepspeed import ops; [ops.build(builder) for builder in ops.nvme()]"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.skipif(
    bool(missing_for_nvme()) or "DISTCORE_COMPILE" not in os.environ,
    reason=(
        f"needs {missing_for_nvme() or 'DISTCORE_COMPILE=1 in the environment'}: async_io compiles"
        " for a minute"
    ),
)
@pytest.mark.usefixtures("async_io")
class TestStage3Nvme(StrategyContract):
    """All that is offloaded goes through files, read and written with libaio."""

    strategy = "deepspeed"
    options: ClassVar = {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_param": "nvme",
        "nvme_path": DISK.name,
        # else 2 GB on each rank
        "config": {"zero_optimization": {"offload_param": {"buffer_size": 100_000}}},
    }
