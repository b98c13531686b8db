"""Activations in main memory give the results of activations on the device, and
a CPU refuses them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from text_task import TEXTS
from torch import nn

from distcore import RunConfig, TaskError, train
from distcore.cli.main import main
from distcore_workbench.activation_offload import ActivationOffload

ON_A_CPU = """
from pathlib import Path
from distcore import hookimpl
from distcore_workbench.activation_offload import ActivationOffload
copies = []
class OnACPU(ActivationOffload):
    def check_config(self, config):
        pass
    def pack(self, tensor):
        packed = super().pack(tensor)
        copies.append(packed is not tensor)
        return packed
    @hookimpl
    def on_run_end(self, run):
        Path(run.config.out, f"copies-{run.world.rank}").write_text(str(sum(copies)))
class Forgets(OnACPU):
    def unpack(self, packed):
        tensor = super().unpack(packed)
        return tensor / 2 if isinstance(packed, tuple) and tensor.is_floating_point() else tensor
"""
"""Extensions that copy on a CPU, too, where main memory is that of the device."""


def losses(name: str, extension: str | None, **changes: Any) -> list[float]:
    """The logged losses of a run, whose ranks all copied, or none."""
    extensions: dict[str, Any] = {"progress": False}
    if extension:
        Path("here.py").write_text(ON_A_CPU)
        extensions[f"here.py:{extension}"] = {"least_bytes": 0}
    out = Path(f"{name}-{extension}")
    train(
        RunConfig(
            task=TEXTS,
            max_steps=3,
            log_every=1,
            out=str(out),
            device="cpu",
            extensions=extensions,
            **changes,
        )
    )
    if extension:
        assert all(
            int((out / f"copies-{rank}").read_text()) > 10
            for rank in range(changes.get("nproc", 1))
        )
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.programs
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "single"},
        {"strategy": "single", "gradient_checkpointing": True},
        pytest.param({"strategy": "ddp", "nproc": 2}, marks=[pytest.mark.ranks, pytest.mark.slow]),
        pytest.param({"strategy": "fsdp", "nproc": 2}, marks=[pytest.mark.ranks, pytest.mark.slow]),
        pytest.param(
            {"strategy": "deepspeed:3", "nproc": 2}, marks=[pytest.mark.ranks, pytest.mark.slow]
        ),
        pytest.param(
            {"strategy": "mesh:tp=2", "nproc": 2}, marks=[pytest.mark.ranks, pytest.mark.slow]
        ),
    ],
    ids=str,
)
def test_losses_are_those_without_copies(changes: dict[str, Any], work_folder: Path) -> None:
    assert losses("run", "OnACPU", **changes) == losses("run", None, **changes)


@pytest.mark.programs
def test_copies_with_other_values_are_seen(work_folder: Path) -> None:
    with pytest.raises(
        TaskError, match="proof: after step 2 the loss differs from that of one plain process"
    ):
        losses("proved", "Forgets", strategy="single")
    assert losses("run", "Forgets", strategy="single", prove="off") != losses(
        "run", None, strategy="single"
    )


def test_parameters_and_small_tensors_stay_where_they_are() -> None:
    offload, layer = ActivationOffload(least_bytes=64), nn.Linear(8, 8)
    large, small = torch.ones(8, 8), torch.ones(2, 2)
    for kept in (layer.weight, layer.weight.t(), small):
        assert offload.unpack(offload.pack(kept)) is kept
    packed = offload.pack(large)
    assert packed is not large
    assert torch.equal(offload.unpack(packed), large)


def test_a_cpu_is_one_line(work_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (
        f"train --task {TEXTS} --data rows.json --device cpu --out run --set"
        " extensions.activation_offload=true"
    )
    assert main(words.split()) == 2
    [*_, line] = capfd.readouterr().err.splitlines()
    assert line == "error: extensions.activation_offload: does nothing on a CPU; leave it out"
    assert not Path("run").exists()
