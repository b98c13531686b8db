"""The process group of a program that has made one, and the store that agents keep over several attempts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from distcore.config import RunConfig
from distcore.distributed.process_group import agree_on_prefix, join_process_group, leave_process_group
from distcore.errors import StrategyError
from distcore.plugin.contract import RankInfo

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
    with pytest.raises(StrategyError, match=r"^this process is rank 1 of 2, but the program has made .* rank 0 of 1"):
        join_process_group(CONFIG, RankInfo(rank=1, size=2))


def test_a_group_of_ours_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    join_process_group(CONFIG, RankInfo())
    left = dist.group.WORLD
    world = join_process_group(CONFIG, RankInfo())
    assert dist.group.WORLD is not left
    leave_process_group(world)
    assert not dist.is_initialized()


def agreed(store: HashStore, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(lambda rank: agree_on_prefix(store, RankInfo(rank=rank, size=size), 20), range(size)))


def test_each_attempt_has_a_prefix_of_its_own_whatever_the_last_one_left() -> None:
    store = HashStore()
    store.set("asks-1", "a rank that was killed before it heard the answer")
    first, second, smaller = agreed(store, 3), agreed(store, 3), agreed(store, 2)
    assert [len(names) for names in (first, second, smaller)] == [1, 1, 1]
    assert len(first | second | smaller) == 3
