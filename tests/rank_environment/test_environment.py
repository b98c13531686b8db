"""The place of a rank from torchrun's variables, and environments that are no launcher's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcore import RunConfig, Simple, train
from distcore.errors import ConfigError
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import export, join

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29500",
}


def test_torchrun_is_joined_with_its_master() -> None:
    assert join(TORCHRUN) == RankInfo(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        launcher="torchrun",
        master_addr="host1",
        master_port=29500,
    )


def test_brackets_of_an_address_are_no_part_of_it() -> None:
    rank_info = join(TORCHRUN | {"MASTER_ADDR": "[::1]"})
    assert rank_info is not None
    assert rank_info.master_addr == "::1"


def test_a_pod_without_local_rank_is_alone_on_its_machine() -> None:
    rank_info = join({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "1"})
    assert rank_info is not None
    assert (rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size) == (
        1,
        2,
        0,
        1,
    )


def test_export_writes_what_every_backend_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "DISTCORE_LAUNCHER"):
        monkeypatch.setenv(name, "unset")
    export(RankInfo(rank=3, size=4, local_rank=1, local_size=2), "host1", 29500)
    assert {name: os.environ[name] for name in TORCHRUN} == TORCHRUN


class Points(Simple):
    def data(self) -> Any:
        rows = [(torch.ones(2), torch.ones(1))] * 4
        return rows, rows

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def row_loss(self, model: nn.Module, batch: Any) -> Tensor:
        squares: Tensor = (model(batch[0]) - batch[1]).square()[:, 0]
        return squares


def test_a_run_of_one_rank_exports_its_master_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (TORCHRUN | alone | {"MASTER_ADDR": "[::1]"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DISTCORE_LAUNCHER", "torchrun")
    train(RunConfig(out=str(tmp_path / "run"), max_steps=1, device="cpu", lr=1e-3), Points())
    assert os.environ["MASTER_ADDR"] == "::1"


def test_a_world_of_one_gets_a_free_port_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "DISTCORE_LAUNCHER"):
        monkeypatch.setenv(name, "unset")
    export(RankInfo())
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert int(os.environ["MASTER_PORT"]) > 1023


@pytest.mark.parametrize(
    "environ", [{"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, {**TORCHRUN, "PET_NNODES": "2"}]
)
def test_variables_for_torchrun_are_no_error_for_one_rank_and_in_its_ranks(
    environ: dict[str, str],
) -> None:
    rank_info = join(environ)
    assert (rank_info and rank_info.launcher) == ("torchrun" if "RANK" in environ else None)


@pytest.mark.parametrize(
    "environ",
    [{}, {"MASTER_ADDR": "host1", "MASTER_PORT": "29500"}, {"WORLD_SIZE": "4"}],
    ids=["plain shell", "only a master", "only a size"],
)
def test_no_rank_is_seen_where_there_is_none(environ: dict[str, str]) -> None:
    assert join(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "x"}, r"^RANK='x' in the environment: expected a whole number"),
        ({**TORCHRUN, "RANK": "4"}, r"^torchrun: rank 4 of 4: ranks count from 0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, r"^torchrun: local rank 2 of 2 on this machine$"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"^WORLD_SIZE=2 but MASTER_ADDR is not set: export it"),
        (
            {
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": "0",
                "PET_MASTER_ADDR": "pod-0",
            },
            (
                r"^PET_NNODES=2 is for torchrun, which has not .* command torchrun --no-python"
                r" distcore train"
            ),
        ),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "4",
                "MASTER_ADDR": "pod-0",
                "MASTER_PORT": "1",
                "PET_NPROC_PER_NODE": "2",
            },
            (
                r"^PET_NPROC_PER_NODE=2 is for torchrun, which has not .* command torchrun"
                r" --no-python distcore train"
            ),
        ),
    ],
)
def test_an_impossible_environment_is_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        join(environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "program"), [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")]
)
def test_ranks_that_no_plugin_reads_do_not_train_the_whole_job_each(
    name: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCORE_LOAD_PLUGINS", "none")  # as if the core alone were installed
    with pytest.raises(
        ConfigError,
        match=f"^{name}=4: no plugin reads the ranks of {program}; install it with: pip ",
    ):
        join({name: "4"})
    assert join({name: "1"}) is None
