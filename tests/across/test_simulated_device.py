"""Training on a simulated accelerator: what a run on the CPU cannot show, such as a tensor
on the wrong device.

It is no GPU: see docs/devices.md for what was never run. The runs are in programs of their own,
most of them in one,
``JOBS``: torch must be told of the device when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_device
import work_folder as work

pytestmark = [pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(900)]

JOBS = Path(simulated_device.SOURCE).with_name("jobs.py")
RANKS = (
    "-m torch.distributed.run --standalone --nproc-per-node 2 -m distcore train --data rows.json"
    " --model bert-tiny --dropout 0 --max-seq-len 16 --strategy ddp --max-steps 3 --lr 1e-3"
)
"""By torchrun: there is one device, which each rank sees as its own; distcore alone starts a rank
per device. Without dropout, whose random numbers are a device's own.
"""
STEP = {"in": 0, "out": 0, "waits": 0, "pageable": 0, "races": 0, "unrecorded": 0}
"""Operations that a step of one process may run on the stream that computes: no copy, and no
wait for the device.
"""


def program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, with the device."""
    environment = os.environ | {"PYTHONPATH": simulated_device.PATHS}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if reason := simulated_device.missing():
        pytest.skip(f"the device cannot be built: {reason}")
    path = tmp_path_factory.mktemp("simulated")
    work.write_rows(path)
    with pytest.MonkeyPatch.context() as patch:
        work.enter(path, patch)
        yield path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    ran = program(folder, str(JOBS))
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    return answer


def test_the_accelerator_is_taken_without_being_asked_for(results: dict[str, Any]) -> None:
    assert results["automatic"]["device"] == "sim"
    assert results["cpu"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("there", "here"), [("automatic", "cpu"), ("bf16", "bf16_cpu"), ("fp16", "fp16_cpu")]
)
def test_the_simulated_device_trains_as_the_cpu_does(
    there: str, here: str, results: dict[str, Any]
) -> None:
    assert results[there]["loss"] == pytest.approx(results[here]["loss"], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_autocast_on_it(precision: str, results: dict[str, Any]) -> None:
    assert results[precision]["precision"] == precision
    assert results[precision]["loss"] != results["automatic"]["loss"]


def test_the_loss_scaler_skips_a_step_that_overflows(results: dict[str, Any]) -> None:
    assert results["scale"] == {"before": 2.0**127, "after": 2.0**126, "stepped": False}


def test_memory_and_times_are_the_devices(results: dict[str, Any]) -> None:
    assert (
        0 < results["automatic"]["peak_memory_bytes"] < 2**24 < results["cpu"]["peak_memory_bytes"]
    )
    assert len(results["automatic"]["seconds"]) == 4
    assert all(second > 0 for second in results["automatic"]["seconds"])
    assert 0 < min(results["automatic"]["phases"]) < sum(results["automatic"]["phases"]) < 60


@pytest.mark.parametrize("resumed", ["there", "to_cpu", "from_cpu"])
def test_a_run_goes_on_from_a_checkpoint_on_either_device(
    resumed: str, results: dict[str, Any]
) -> None:
    assert results[resumed]["steps"] == 4
    assert results[resumed]["loss"] == pytest.approx(results["cpu"]["loss"], rel=1e-5)
    if resumed == "there":
        assert results[resumed]["loss"] == results["automatic"]["loss"]


def test_a_checkpoint_of_it_is_evaluated_on_either_device(results: dict[str, Any]) -> None:
    assert results["evaluated"]["sim"] == results["automatic"]["loss"]
    assert results["evaluated"]["cpu"] == pytest.approx(results["automatic"]["loss"], rel=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_copies_nothing_on_the_stream_that_computes_and_waits_for_nothing(
    precision: str, workers: int, results: dict[str, Any]
) -> None:
    for step in results["counts"][f"{precision}-{workers}"]:
        assert {name: step.get(name, 0) for name in STEP} == STEP
        assert step["aside"] == 6  # two micro-batches of three tensors each, from pinned memory


def test_the_only_wait_of_fp16_is_that_of_the_scaler(results: dict[str, Any]) -> None:
    for step in results["counts"]["fp16-0"]:
        assert step.get("waits", 0) <= 1
        assert step.get("races", 0) == step.get("unrecorded", 0) == 0


def test_every_step_allocates_as_often_as_the_one_before(results: dict[str, Any]) -> None:
    for steps in results["counts"].values():
        assert len({step["allocations"] for step in steps}) == 1


def test_batches_come_in_the_order_of_a_run_without_a_thread(results: dict[str, Any]) -> None:
    assert results["rows"]["sim"] == results["rows"]["cpu"]
    assert len(results["rows"]["sim"]) > 12


def test_data_that_fail_end_the_step_that_needs_them(results: dict[str, Any]) -> None:
    failed = results["failed"]
    assert failed["steps"] == failed["steps_cpu"] == 3
    assert failed["error"] == failed["error_cpu"] == "TaskError: row 17 cannot be read"
    assert failed["threads"] == []


def test_the_dataset_is_not_read_while_the_run_evaluates(results: dict[str, Any]) -> None:
    assert results["overlaps"] == []


@pytest.mark.parametrize("kind", ["task", "evaluation", "strategy"])
def test_tensors_on_different_devices_end_in_one_line(kind: str, results: dict[str, Any]) -> None:
    line = results["mixed"][kind]
    assert len(line.splitlines()) == 1
    assert "Expected all tensors to be on the same device" in line
    assert {
        "task": "jobs.py",
        "evaluation": "jobs.py",
        "strategy": (
            "strategy 'single': left 1 of the model's parameters and buffers, 'head.bias' first,"
            " on cpu"
        ),
    }[kind] in line


def test_tied_weights_stay_tied_where_a_move_makes_new_parameters(results: dict[str, Any]) -> None:
    on_device, on_cpu = results["tied_parameters"]
    assert on_device == on_cpu
    loss, expected = results["tied"]
    assert loss == pytest.approx(expected, rel=1e-5)


def test_dropout_by_row_has_the_masks_of_the_cpu(results: dict[str, Any]) -> None:
    on_device, on_cpu = results["dropout by row"]
    assert on_device == pytest.approx(on_cpu, rel=1e-5)
    by_rank, _ = results["dropout by rank"]
    assert by_rank != pytest.approx(on_cpu, rel=1e-5)


def test_a_collation_that_hangs_does_not_keep_the_process(folder: Path) -> None:
    assert program(folder, str(JOBS), "hang").returncode == 7


@pytest.mark.ranks
def test_two_ranks_train_as_on_the_cpu_over_their_backend(folder: Path) -> None:
    losses = {}
    for device in ("sim", "cpu"):
        ran = program(folder, *f"{RANKS} --device {device} --out ddp-{device}".split())
        assert ran.returncode == 0, ran.stderr
        report = json.loads((folder / f"ddp-{device}/report.json").read_text())
        assert (report["device"], report["world_size"]) == (device, 2)
        losses[device] = report["evaluation"]["loss"]
    assert losses["sim"] == pytest.approx(losses["cpu"], rel=1e-5)


def test_make_gpu_is_rehearsed(folder: Path) -> None:
    record, tests = folder / "record.jsonl", Path(__file__).parents[1] / "gpu"
    environment = os.environ | {
        "PYTHONPATH": simulated_device.PATHS,
        "DISTCORE_GPU_RECORD": str(record),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        str(tests),
        "-k",
        "(parity and single-fp32) or bert-fp32",
    ]
    for number in range(2):
        ran = subprocess.run(
            command,
            cwd=tests.parents[1],
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        # 5: all held before, so nothing is left to run
        assert ran.returncode == (0 if number == 0 else 5), ran.stdout
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert {"single, fp32: loss against the CPU"} < {row["what"] for row in rows}
    assert {row["state"] for row in rows} == {"held"}
    assert all(row["machine"].startswith("1 × sim; torch") for row in rows)
