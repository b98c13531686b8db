"""Join torch's default process group and leave it; sums and gathered rows over it."""

from __future__ import annotations

import gc
import os
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from distcore.config import RunConfig
from distcore.distributed import dtensors
from distcore.distributed.devices import backend_of, device_of
from distcore.errors import ConfigError, StrategyError
from distcore.plugin.strategy.contract import LOOPBACK, RankInfo, Run, World
from distcore.plugin.strategy.state import SavedState, State
from distcore.rank_environment.network import port_for_ranks

OWN = "made by distcore"
"""Description of a default process group that distcore made."""
LEFT = re.compile(r"closed by peer|reset by peer|Broken pipe", re.IGNORECASE)
"""Pattern of gloo's error message for a peer that has exited."""
INSTEAD = "(MASTER_PORT=N in the environment of every rank)"
"""Where another port is chosen for ranks that distcore did not start."""


def join_process_group(
    config: RunConfig, rank_info: RankInfo, *, main_memory: bool = False
) -> World:
    """Join the default process group by torch's backend for the device; return its world.

    With ``main_memory`` ranks on accelerators can also send tensors in main memory, over gloo.
    Reads MASTER_ADDR and MASTER_PORT from the environment; a single process needs neither.

    A group that the program made earlier is used as it is, and kept after the run. Raises
    StrategyError if it has other ranks, or cannot send the required tensors.
    """
    device = device_of(config, rank_info)
    backend = backend_of(device)
    is_accelerator = backend != "gloo"
    backends = backend
    if main_memory and is_accelerator:
        backends = f"cpu:gloo,{device.type}:{backend}"
    if dist.is_initialized():
        if not _is_own():
            return _world_of_program(rank_info, device, backends)
        drop_leftover_group()
    store = open_store(rank_info, timedelta(seconds=config.timeout))
    _check_is_alone(store, rank_info)
    with port_for_ranks(os.environ.get("MASTER_PORT"), INSTEAD):
        dist.init_process_group(
            backends,
            rank=rank_info.rank,
            world_size=rank_info.size,
            store=store,
            timeout=timedelta(seconds=config.timeout),
            device_id=device if is_accelerator else None,
        )
    assert dist.group.WORLD is not None  # it was made just now
    dist.group.WORLD._set_group_desc(OWN)
    return _world(rank_info, device)


def _check_is_alone(store: Store, rank_info: RankInfo) -> None:
    """Raise ConfigError if another process is the same rank: both would wait for ever."""
    mine = f"process {os.getpid()} of {socket.gethostname()}"
    first = store.compare_set(f"rank-{rank_info.rank}-is", "", mine).decode()
    if first != mine:
        raise ConfigError(
            f"two processes are rank {rank_info.rank} of {rank_info.size}: {first} and {mine};"
            " start each rank once (RANK of each process)"
        )


def drop_leftover_group() -> None:
    """Destroy the group that a failed run of this process left behind; the program's is kept.

    Before ranks are forked, too: its threads do not come along, and a rank that destroys its copy
    may crash.
    """
    if dist.is_initialized() and _is_own():
        dist.destroy_process_group()


def _is_own() -> bool:
    return dist.group.WORLD is not None and dist.group.WORLD.group_desc == OWN


def _world(rank_info: RankInfo, device: torch.device) -> World:
    """Return the world of this process's group."""
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=rank_info.local_rank,
        device=device,
        group=TorchRanks(),
    )


def _world_of_program(rank_info: RankInfo, device: torch.device, backends: str) -> World:
    """Return the world of the program's own group; raises StrategyError if it does not fit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (rank_info.rank, rank_info.size):
        raise StrategyError(
            f"this process is rank {rank_info.rank} of {rank_info.size}, but the program has made a"
            f" process group in which it is rank {rank} of {size}: call destroy_process_group()"
            " before, or make none"
        )
    there = dist.get_backend_config()
    missing = []
    for backend in backends.split(","):
        of_device = backend if ":" in backend else f"{device.type}:{backend}"
        if of_device not in there:
            missing.append(backend)
    if missing:
        raise StrategyError(
            f"the program has made a process group of {there}, and this run needs"
            f" {', '.join(missing)}: call destroy_process_group() before, or make none"
        )
    return _world(rank_info, device)


def open_store(rank_info: RankInfo, timeout: timedelta = dist.default_pg_timeout) -> Store:
    """Return the key-value store of the ranks: the launcher's, or one that rank 0 hosts.

    Waits at most ``timeout`` for the other ranks. For backends that connect ranks without a process
    group. Reads MASTER_ADDR and MASTER_PORT from the environment.
    """
    with port_for_ranks(os.environ.get("MASTER_PORT"), INSTEAD):
        store = _store(rank_info)
        if store is not None:
            return store
        rendezvoused = next(rendezvous("env://", rank_info.rank, rank_info.size, timeout=timeout))
        torch_store: Store = rendezvoused[0]
        return torch_store


def _store(rank_info: RankInfo) -> Store | None:
    """Return a store for the next group; ``None`` if torch is to open one by MASTER_ADDR.

    torch's own server listens on all network interfaces. On one machine rank 0 therefore opens the
    store itself, on a loopback socket, unless the launcher already hosts one.
    """
    if rank_info.size == 1 and "MASTER_ADDR" not in os.environ:
        return HashStore()
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("MASTER_ADDR") != LOOPBACK and not hosted:
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if address not in _STORES:
        store: Store = _open(*address, rank_info, hosted)
        if hosted and rank_info.launcher != "local":  # ours has a store for each launch
            store = PrefixStore(agree_on_prefix(store, rank_info), store)
        _STORES[address] = store, count()
    store, numbers = _STORES[address]
    return PrefixStore(f"group-{next(numbers)}", store)


def agree_on_prefix(store: Store, rank_info: RankInfo, timeout: float = 300) -> str:
    """Agree on a name that only the ranks of this attempt know; every rank calls.

    torchelastic's agents keep one store over all attempts, and no variable identifies the attempt:
    the number of restarts is counted per machine, without changes of machines. Answers of an
    earlier attempt may still be in the store. So rank 0 answers each request separately, until all
    ranks have an answer. Raises DistStoreError after ``timeout`` seconds.
    """
    mine = uuid4().hex
    rank = rank_info.rank
    if rank:
        store.set(f"asks-{rank}", mine)
        store.wait([f"answer-{mine}"], timedelta(seconds=timeout))
        name = store.get(f"answer-{mine}").decode()
        store.set(f"{name}/heard-{rank}", "")
        return name
    others = range(1, rank_info.size)
    asking = [f"asks-{other}" for other in others]
    heard = [f"{mine}/heard-{other}" for other in others]
    deadline = time.monotonic() + timeout
    pause = 0.01
    while heard and not store.check(heard):
        if time.monotonic() > deadline:
            raise DistStoreError(
                f"timed out after {timeout:g} s waiting for {rank_info.size - 1} other rank(s)"
            )
        if store.check(asking):
            for asks in store.multi_get(asking):
                store.set(f"answer-{asks.decode()}", mine)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return mine


_STORES: dict[tuple[str, int], tuple[Store, Iterator[int]]] = {}
"""This process's store by address and port, with a counter that numbers its groups.

Each group has a key prefix of its own. torch's keys are the same for every group, so a fast rank
would read its peers' keys of the previous group and hang. The store is kept in the module, because
its server must outlive the worlds that use it one after another.
"""


def _open(address: str, port: int, rank_info: RankInfo, hosted: bool) -> TCPStore:
    """Connect to the store at the address; rank 0 first opens it, unless a launcher hosts it."""
    if rank_info.rank or hosted:
        return TCPStore(address, port, rank_info.size, is_master=False)
    listener = socket.create_server((address, port))
    return TCPStore(
        address, port, rank_info.size, is_master=True, master_listen_fd=listener.detach()
    )


def leave_process_group(world: World) -> bool:
    """Leave the default process group once every rank has called; return True.

    The program's own group stays.

    A connection that another rank has closed is no error here: the run has already ended.
    """
    # Free wrapped models that only a reference cycle still holds. Destroyed later, such a model
    # would destroy the group while it holds the interpreter's lock, and wait for a thread that
    # needs the lock: a deadlock.
    gc.collect()
    try:
        dist.barrier()
    except RuntimeError as error:
        # gloo fails also where a faster rank has gone after the last message of the barrier, before
        # this rank has looked at it. One that failed before it came here says so itself, and ends
        # the job by its exit status.
        if not LEFT.search(str(error)):
            raise
    drop_leftover_group()
    return True


class TorchRanks:
    """The ranks of torch's default process group, for the defaults of a strategy's hooks."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks, on every rank."""
        return sum_over_ranks(values)

    def gather(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of all ranks, in rank order, on every rank."""
        return gather_rows(outputs)

    def save(self, run: Run) -> State:
        """Return whole tensors, and this rank's shards of DTensors; nothing is gathered."""
        return dtensors.save(run)

    def load(self, run: Run, state: SavedState) -> bool:
        """Read this rank's part of every tensor, whatever strategy saved it; always true."""
        return dtensors.load(run, state)

    def leave(self, world: World) -> bool:
        """Leave the group once every rank has called; always true."""
        return leave_process_group(world)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over ranks, on every rank; ``values`` is not changed."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def gather_rows(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the rows of all ranks in rank order; the same result on every rank.

    Each tensor has shape ``(n_r, …)`` on rank r, where n_r may be 0, and ``(sum of n_r, …)`` in the
    result; dtypes are kept. Needs one collective for all lengths, and one per tensor, padded to the
    longest n_r.
    """
    if not outputs:
        return {}
    names = sorted(outputs)
    device = outputs[names[0]].device
    mine = torch.tensor([len(outputs[name]) for name in names], device=device)
    lengths = _all_gather(mine)
    lengths_of_ranks = [[int(length) for length in row] for row in lengths]
    return {
        name: _gather(outputs[name], [row[index] for row in lengths_of_ranks])
        for index, name in enumerate(names)
    }


def _gather(rows: Tensor, lengths: list[int]) -> Tensor:
    """Return the rows of all ranks; ``lengths`` are the numbers of them, in rank order."""
    longest = max(lengths)  # all_gather takes the same shape from every rank
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    if longest == 0:  # on every rank, so all of them leave out the collective
        return padded
    parts = zip(_all_gather(padded), lengths, strict=True)
    return torch.cat([part[:length] for part, length in parts])


def _all_gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts
