"""Horovod between real ranks: what is not a law."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from distcore import ConfigError, Run, RunConfig, World, launch

pytest.importorskip("horovod.torch", reason="Horovod is not built here: distcore-horovod build")

from distcore_horovod.check import rank_info_from_environment
from distcore_horovod.collectives import broadcast, gather_rows, sum_over_ranks
from distcore_horovod.gradients import share_buffers
from distcore_horovod.library import hvd
from distcore_horovod.rendezvous import connect, rendezvous
from distcore_horovod.strategy import HorovodStrategy

JOB = [
    "--strategy",
    "horovod",
    "--model",
    "bert-tiny",
    "--global-batch-size",
    "16",
    "--micro-batch-size",
    "4",
]


def rows_of_every_dtype() -> dict[str, Any]:
    connect(rank_info_from_environment(), timeout=30)
    dtypes = (
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.complex64,
    )
    mine = {str(dtype): torch.full((hvd.rank() * 2, 3), hvd.rank()).to(dtype) for dtype in dtypes}
    joined = gather_rows(mine)
    return {name: (rows.dtype == mine[name].dtype, rows.tolist()) for name, rows in joined.items()}


@pytest.mark.ranks
def test_rows_keep_their_dtype_and_number() -> None:
    for rows in launch(rows_of_every_dtype, nproc=2, timeout=60):
        assert all(kept and values == [[1, 1, 1]] * 2 for kept, values in rows.values())


def test_an_optimizer_that_horovod_has_not_wrapped_will_be_refused() -> None:
    assert "optimizer" in HorovodStrategy().capabilities.owns


def main_ranks_tensors() -> tuple[float, float]:
    connect(rank_info_from_environment(), timeout=30)
    half, scalar = (
        torch.full((3,), float(hvd.rank()), dtype=torch.bfloat16),
        torch.tensor(float(hvd.rank())),
    )
    broadcast({"half": half, "scalar": scalar, "none": torch.empty(0)})
    return float(half.sum()), float(scalar)


@pytest.mark.ranks
def test_every_rank_gets_the_main_ranks_tensors() -> None:
    assert launch(main_ranks_tensors, nproc=2, timeout=60) == [(0.0, 0.0)] * 2


def listening() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("tcp")
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


def opened_for_the_rendezvous() -> tuple[list[str], bool]:
    before = listening()
    with rendezvous(rank_info_from_environment(), timeout=30):
        opened = [address for address, _ in listening() - before]
    return opened, listening() == before


@pytest.mark.ranks
def test_the_rendezvous_listens_on_loopback_and_not_for_long() -> None:
    assert launch(opened_for_the_rendezvous, nproc=2, timeout=60) == [
        (["127.0.0.1"], True),
        ([], True),
    ]


def running_mean_after_training_on_other_rows() -> list[float]:
    connect(rank_info_from_environment(), timeout=30)
    model = nn.BatchNorm1d(2)
    world = World(
        rank=hvd.rank(), size=hvd.size(), local_rank=hvd.rank(), device=torch.device("cpu")
    )
    run = Run(
        config=RunConfig(),
        world=world,
        capabilities=HorovodStrategy().capabilities,
        module=model,
        model=model,
    )
    share_buffers(run)
    model(torch.full((4, 2), hvd.rank() + 1.0))
    model.eval()
    model(torch.zeros(1, 2))
    assert model.running_mean is not None
    return [float(value) for value in model.running_mean]


@pytest.mark.ranks
def test_running_statistics_are_the_main_ranks() -> None:
    first, second = launch(running_mean_after_training_on_other_rows, nproc=2, timeout=60)
    assert first == second == pytest.approx([0.1, 0.1])


def met_twice() -> list[float]:
    sums = []
    for _ in range(2):
        connect(rank_info_from_environment(), timeout=30)
        sums.append(float(sum_over_ranks(torch.ones(1)).item()))
        hvd.barrier()
        hvd.shutdown()
    return sums


@pytest.mark.ranks
def test_ranks_can_meet_again_in_the_same_store() -> None:
    assert launch(met_twice, nproc=2, timeout=60) == [[2.0, 2.0]] * 2


def one_leaves_a_collective_out() -> str:
    os.environ.update(HorovodStrategy()._variables(RunConfig(timeout=4)))
    connect(rank_info_from_environment(), timeout=30)
    if hvd.rank() == 1:
        time.sleep(30)
    try:
        return str(sum_over_ranks(torch.ones(1)).item())
    except ConnectionError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_collective_that_a_rank_leaves_out_does_not_hang() -> None:
    started = time.monotonic()
    answers = launch(one_leaves_a_collective_out, nproc=2, timeout=90)
    assert all(answer.startswith("Horovod: ") for answer in answers), answers
    assert time.monotonic() - started < 45


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        (
            {"op": "adasum"},
            {},
            r"op = 'adasum': this Horovod was built without MPI; build it on a machine",
        ),
        (
            {},
            {"device": "cuda"},
            r"device = 'cuda': this Horovod was built without NCCL; build it on a machine",
        ),
    ],
)
def test_an_operation_that_the_build_lacks_is_refused(
    options: dict[str, Any], changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hvd.mpi_built() or hvd.nccl_built():
        pytest.skip("this Horovod has MPI or NCCL")
    # without one only a plan asks, which needs no NCCL
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=says):
        HorovodStrategy(**options).check_config(RunConfig(**changes))


def test_gradients_that_are_fused_by_timing_are_declared() -> None:
    assert HorovodStrategy().capabilities.deterministic
    assert not HorovodStrategy(groups=0).capabilities.deterministic


def training(out: Path, *flags: str, start: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*start, sys.executable, "-m", "distcore", "train", *JOB, "--out", str(out), *flags]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def losses(out: Path) -> list[str]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [
        str(record["train/loss"]) for record in map(json.loads, lines) if "train/loss" in record
    ]


@pytest.mark.slow
@pytest.mark.ranks
def test_every_launcher_trains_the_same(tmp_path: Path) -> None:
    starts: dict[str, tuple[str, ...]] = {
        "torchrun": (
            str(Path(sys.executable).with_name("torchrun")),
            "--nproc-per-node",
            "2",
            "--no-python",
        ),
        "horovodrun": (str(Path(sys.executable).with_name("horovodrun")), "-np", "2"),
    }
    if mpirun := shutil.which("mpirun"):
        starts["mpirun"] = (mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2")
    jobs = {
        name: training(tmp_path / name, "--max-steps", "4", start=start)
        for name, start in starts.items()
    }
    jobs["local"] = training(tmp_path / "local", "--max-steps", "4", "--nproc", "2")
    for name, job in jobs.items():
        output, _ = job.communicate(timeout=200)
        assert job.returncode == 0, (name, output)
    assert all(losses(tmp_path / name) == losses(tmp_path / "local") != [] for name in jobs)


@pytest.mark.ranks
def test_a_killed_rank_ends_the_job_with_one_line(tmp_path: Path) -> None:
    job = training(tmp_path / "run", "--nproc", "2", "--log-every", "1")
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    psutil.Process(job.pid).children()[-1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    output, _ = job.communicate(timeout=60)
    # not the timeout of 600 s; other tests run beside this one
    assert time.monotonic() - killed < 30
    assert job.returncode == 3
    before = (
        "distcore train: ",
        "data: ",
        "task: ",
        "rows: ",
        "model: ",
        "ranks: ",
        "steps: ",
        "step ",
        "W rank 0: ",
    )
    last = [line for line in output.splitlines() if not line.startswith(before)]
    assert len(last) == 1, last
    assert last[0].startswith("error: rank 1 of 2 failed: killed by SIGKILL")
