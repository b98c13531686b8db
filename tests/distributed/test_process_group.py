"""The process group of a program that has made one, and the store that agents
keep over several attempts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distcore.config import RunConfig
from distcore.distributed import process_group
from distcore.distributed.process_group import (
    agree_on_prefix,
    join_process_group,
    leave_process_group,
)
from distcore.errors import ConfigError, StrategyError
from distcore.plugin.strategy import defaults
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.contract import RankInfo, Run, World
from distcore.plugin.strategy.state import Piece

CONFIG = RunConfig(device="cpu")


@pytest.fixture
def group_of_program() -> Iterator[object]:
    """A process group of one rank, made by somebody else."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_is_there_is_used_and_stays(group_of_program: object) -> None:
    world = join_process_group(CONFIG, RankInfo())
    assert dist.group.WORLD is group_of_program
    assert leave_process_group(world)
    assert dist.group.WORLD is group_of_program


@pytest.mark.usefixtures("group_of_program")
def test_a_group_of_other_ranks_is_refused() -> None:
    with pytest.raises(
        StrategyError,
        match=r"^this process is rank 1 of 2, but the program has made .* rank 0 of 1",
    ):
        join_process_group(CONFIG, RankInfo(rank=1, size=2))


def test_a_group_of_ours_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    join_process_group(CONFIG, RankInfo())
    left = dist.group.WORLD
    world = join_process_group(CONFIG, RankInfo())
    assert dist.group.WORLD is not left
    leave_process_group(world)
    assert not dist.is_initialized()


def test_defaults_of_hooks_use_the_group_that_was_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    world = join_process_group(CONFIG, RankInfo())
    module = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(module.weight.detach().clone(), mesh, [Shard(0)])
    module.weight = nn.Parameter(sharded)
    run = Run(
        config=CONFIG,
        world=world,
        capabilities=Capabilities(spec_version=3),
        module=module,
        model=module,
    )
    values = torch.arange(3.0)
    assert torch.equal(defaults.reduce_loss(run, values), values)
    assert defaults.gather_outputs(run, {"rows": values})["rows"].tolist() == values.tolist()
    saved = defaults.save_checkpoint(run)
    assert isinstance(saved["model/weight"], Piece)  # not gathered
    assert isinstance(saved["model/bias"], torch.Tensor)
    assert defaults.teardown(world)
    assert not dist.is_initialized()


def test_defaults_without_a_group_are_those_of_one_process() -> None:
    world, module = World(rank=0, size=1, local_rank=0, device=torch.device("cpu")), nn.Linear(2, 2)
    run = Run(
        config=CONFIG,
        world=world,
        capabilities=Capabilities(spec_version=3),
        module=module,
        model=module,
    )
    values = torch.arange(3.0)
    assert defaults.reduce_loss(run, values) is values
    assert defaults.gather_outputs(run, {"rows": values})["rows"] is values
    assert isinstance(defaults.save_checkpoint(run)["model/weight"], torch.Tensor)
    assert defaults.teardown(world)


def test_a_second_process_of_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both waited for an answer that the store gives once."""
    store, rank_info = HashStore(), RankInfo(rank=1, size=2)
    store.set("rank-1-is", "process 1 of elsewhere")
    monkeypatch.setattr(process_group, "open_store", lambda *_: store)
    line = (
        r"^two processes are rank 1 of 2: process 1 of elsewhere and process \d+ of \S+; start each"
        r" rank once"
    )
    with pytest.raises(ConfigError, match=line):
        join_process_group(CONFIG, rank_info)
    assert not dist.is_initialized()


COME_AND_GO = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=1, world_size=2)
dist.barrier()
"""


@pytest.mark.ranks
def test_a_rank_that_has_gone_already_does_not_make_a_finished_run_fail(tmp_path: Path) -> None:
    file = str(tmp_path / "store")
    other = subprocess.Popen([sys.executable, "-c", COME_AND_GO, file])
    store = dist.FileStore(file, 2)  # type: ignore[attr-defined]  # documented there
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    try:
        world = join_process_group(CONFIG, RankInfo(size=2))
        dist.barrier()
        assert other.wait(timeout=60) == 0
        assert leave_process_group(world)
    finally:
        dist.destroy_process_group()


def agreed(store: HashStore, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        return set(
            pool.map(
                lambda rank: agree_on_prefix(store, RankInfo(rank=rank, size=size), 20), range(size)
            )
        )


def test_each_attempt_has_a_prefix_of_its_own_whatever_the_last_one_left() -> None:
    store = HashStore()
    store.set("asks-1", "a rank that was killed before it heard the answer")
    first, second, smaller = agreed(store, 3), agreed(store, 3), agreed(store, 2)
    assert [len(names) for names in (first, second, smaller)] == [1, 1, 1]
    assert len(first | second | smaller) == 3
