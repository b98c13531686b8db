"""Training on a simulated accelerator: what a run on the CPU cannot show, such as a tensor on the wrong device.

It is no GPU: see docs/devices.md for what was never run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated_device
import work_folder as work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
import json, sys
import simulated_device

simulated_device.make()  # first: torch knows one such device from then on
import torch
from distcore import RunConfig, load_config, train
from distcore.testing.problem import Problem

SHARED = {
    "global_batch_size": 8, "micro_batch_size": 4, "lr": 0.01, "max_steps": 4, "save_every": 2, "log_level": "error",
    "extensions": {"progress": False, "stopwatch": True},
}


def run(name, task=None, **changes):
    before = torch.sim.counts()
    report = train(RunConfig(out=name, **SHARED | changes), task)
    after = torch.sim.counts()
    counted = {key: after.get(key, 0) - before.get(key, 0) for key in ("copies", "waits")}
    return {key: report[key] for key in ("device", "precision", "peak_memory_bytes")} | counted | {
        "loss": report["evaluation"]["loss"], "seconds": json.load(open(f"{name}/steps.json"))["seconds"],
    }


found = {
    "automatic": run("automatic", Problem()),
    "cpu": run("cpu", Problem(), device="cpu"),
    "bf16": run("bf16", Problem(), precision="bf16"),
    "bf16_cpu": run("bf16_cpu", Problem(), device="cpu", precision="bf16"),
}
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if reason := simulated_device.missing():
        pytest.skip(f"the device cannot be built: {reason}")
    folder = tmp_path_factory.mktemp("simulated")
    work.write_rows(folder)
    with pytest.MonkeyPatch.context() as patch:
        work.enter(folder, patch)
        ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=800, check=False)
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return answer


def test_the_accelerator_is_taken_without_being_asked_for(found: dict[str, Any]) -> None:
    assert found["automatic"]["device"] == "sim"
    assert found["cpu"]["device"] == "cpu"


@pytest.mark.parametrize(("there", "here"), [("automatic", "cpu"), ("bf16", "bf16_cpu")])
def test_it_trains_as_the_cpu_does(found: dict[str, Any], there: str, here: str) -> None:
    assert found[there]["loss"] == pytest.approx(found[here]["loss"], rel=1e-5)


def test_bf16_is_autocast_on_it(found: dict[str, Any]) -> None:
    assert found["bf16"]["precision"] == "bf16"
    assert found["bf16"]["loss"] != found["automatic"]["loss"]


def test_memory_and_times_are_the_devices(found: dict[str, Any]) -> None:
    assert 0 < found["automatic"]["peak_memory_bytes"] < 2**24 < found["cpu"]["peak_memory_bytes"]
    assert len(found["automatic"]["seconds"]) == 4
    assert all(second > 0 for second in found["automatic"]["seconds"])
