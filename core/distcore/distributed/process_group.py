"""For strategies that use torch.distributed's process group: join, leave, sum, and gather rows."""

from __future__ import annotations

import gc
import os
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]  # not re-exported
    DistStoreError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from distcore.config import RunConfig
from distcore.distributed.devices import backend_of, device_of
from distcore.errors import StrategyError
from distcore.plugin.strategy.contract import LOOPBACK, RankInfo, World

LEFT = re.compile(r"closed by peer|reset by peer|Broken pipe", re.IGNORECASE)
"""In what gloo says where the process at the other end has gone."""


def join_process_group(config: RunConfig, rank_info: RankInfo, *, main_memory: bool = False) -> World:
    """Join the default process group by torch's backend for the device, and return the world that it reports.

    With ``main_memory`` ranks on accelerators can also send tensors in main memory, over gloo. Reads MASTER_ADDR and
    MASTER_PORT from the environment; a single process needs neither.

    A group that the program made before is used as it is, and stays after the run. Raises StrategyError if it is of
    other ranks or cannot send what it must.
    """
    device = device_of(config, rank_info)
    backend = backend_of(device)
    of_its_own = backend != "gloo"
    backends = f"cpu:gloo,{device.type}:{backend}" if main_memory and of_its_own else backend
    if dist.is_initialized():
        if id(dist.group.WORLD) not in _OWN:
            return _world_of_program(rank_info, device, backends)
        dist.destroy_process_group()  # a failed run in this process left its group behind
    dist.init_process_group(
        backends,
        rank=rank_info.rank,
        world_size=rank_info.size,
        store=_store(rank_info),
        timeout=timedelta(seconds=config.timeout),
        device_id=device if of_its_own else None,
    )
    _OWN[:] = [id(dist.group.WORLD)]
    return World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=rank_info.local_rank, device=device)


_OWN: list[int] = []
"""The identity of the default process group, if distcore has made it; one that the program made is not destroyed.

Not the group itself: a forked rank that inherits the last reference to one waits for ever for threads that it does not
have.
"""


def _world_of_program(rank_info: RankInfo, device: torch.device, backends: str) -> World:
    """Return the world of the group that is there; raises StrategyError if this run cannot use it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (rank_info.rank, rank_info.size):
        raise StrategyError(
            f"this process is rank {rank_info.rank} of {rank_info.size}, but the program has made a process group in "
            f"which it is rank {rank} of {size}: call destroy_process_group() before, or make none"
        )
    there = dist.get_backend_config()
    if missing := [one for one in backends.split(",") if (one if ":" in one else f"{device.type}:{one}") not in there]:
        raise StrategyError(
            f"the program has made a process group of {there}, and this run needs {', '.join(missing)}: call "
            "destroy_process_group() before, or make none"
        )
    return World(rank=rank, size=size, local_rank=rank_info.local_rank, device=device)


def open_store(rank_info: RankInfo) -> Store:
    """Return the key-value store of the ranks: the launcher's, or one that rank 0 hosts.

    For backends that connect ranks without a process group. Reads MASTER_ADDR and MASTER_PORT from the environment.
    """
    return _store(rank_info) or next(rendezvous("env://", rank_info.rank, rank_info.size))[0]


def has_state_in_buffers(model: nn.Module) -> bool:
    """Return True if ``model`` has persistent buffers, such as running statistics, which ranks must synchronise.

    Other buffers, such as position numbers, are always the same on every rank: to send them in every step would waste
    a collective.
    """
    return not model.state_dict().keys().isdisjoint(dict(model.named_buffers()))


def _store(rank_info: RankInfo) -> Store | None:
    """Return a store for the next group, or ``None`` if torch should find or open one by MASTER_ADDR and MASTER_PORT.

    torch's own server listens on all network interfaces. On one machine rank 0 therefore opens the store itself, on
    a loopback socket, unless the launcher already hosts one.
    """
    if rank_info.size == 1 and "MASTER_ADDR" not in os.environ:
        return HashStore()
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("MASTER_ADDR") != LOOPBACK and not hosted:
        return None
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if where not in _STORES:
        store: Store = _open(*where, rank_info, hosted)
        if hosted and rank_info.launcher != "local":  # ours has a store for each launch
            store = PrefixStore(agree_on_prefix(store, rank_info), store)
        _STORES[where] = store, count()
    store, numbers = _STORES[where]
    return PrefixStore(f"group-{next(numbers)}", store)


def agree_on_prefix(store: Store, rank_info: RankInfo, timeout: float = 300) -> str:
    """Return a name that only the ranks of this attempt know, the same on each; every rank calls.

    torchelastic's agents keep one store while they start ranks again and again, and tell the ranks nothing that is new
    each time: the number of restarts is that of a machine, and a change of machines does not count. What ranks of an
    earlier attempt have left in the store must not be taken for an answer. So rank 0 answers every rank that asks until
    all have heard it. Raises DistStoreError after ``timeout`` seconds.
    """
    mine, rank = uuid4().hex, rank_info.rank
    if rank:
        store.set(f"asks-{rank}", mine)
        store.wait([f"answer-{mine}"], timedelta(seconds=timeout))
        name = store.get(f"answer-{mine}").decode()
        store.set(f"{name}/heard-{rank}", "")
        return name
    asking = [f"asks-{other}" for other in range(1, rank_info.size)]
    heard = [f"{mine}/heard-{other}" for other in range(1, rank_info.size)]
    deadline, pause = time.monotonic() + timeout, 0.01
    while heard and not store.check(heard):
        if time.monotonic() > deadline:
            raise DistStoreError(f"timed out after {timeout:g} s waiting for {rank_info.size - 1} other rank(s)")
        if store.check(asking):
            for asks in store.multi_get(asking):
                store.set(f"answer-{asks.decode()}", mine)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return mine


_STORES: dict[tuple[str, int], tuple[Store, Iterator[int]]] = {}
"""By address and port: the store of this process, and the numbers of the groups that meet in it.

Each group has keys of its own: under torch's names for them, which are always the same, a rank that is ahead would read
where its peers were in the last group, and wait for them there.
"""


def _open(address: str, port: int, rank_info: RankInfo, hosted: bool) -> TCPStore:
    if rank_info.rank or hosted:
        return TCPStore(address, port, rank_info.size, is_master=False)
    listener = socket.create_server((address, port))
    return TCPStore(address, port, rank_info.size, is_master=True, master_listen_fd=listener.detach())


def rebuild_gradient_buckets(wrapped: nn.Module, module: nn.Module) -> None:
    """Run a dummy backward pass, so that gradient buckets are rebuilt before the first step.

    ``wrapped`` is ``module`` in torch's data-parallel wrapper. torch assigns gradients to buckets anew after the first
    backward of a process. With more than two ranks the order in which a gradient is summed depends on its place in a
    bucket: a resumed run would round differently in its first step than a run that was never interrupted.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    own = vars(module).get("forward")  # some wrappers replace the method on the instance
    module.forward = lambda _: torch.stack([parameter.sum() for parameter in trained]).sum()
    try:
        wrapped(trained[0].detach()).backward()  # of an accelerator, where the wrapper cannot be called with no input
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    module.zero_grad()


def check_gradients_averaged(wrapped: Any, module: nn.Module, remedy: str) -> None:
    """Raise StrategyError if the backward pass that ends a step did not average all gradients over the ranks.

    ``wrapped`` is ``module`` in torch's data-parallel wrapper, which by itself complains in the next forward pass, when
    the ranks have stepped apart. ``remedy``: what the user can do, the end of the message.
    """
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        without = next((repr(name) for name, p in trained if p.grad is None), None)
        when = f"{without} got no gradient in this step" if without else "got no gradient in the last backward pass"
        raise StrategyError(f"parameter {when}; {remedy}") from error


def leave_process_group(world: World) -> bool:
    """Leave the default process group once every rank has called; return True. The program's own stays.

    The end of a run does not depend on it: a connection that another rank has closed is none of this rank's errors.
    """
    # Free wrapped models that only a reference cycle still holds. Destroyed later, such a model would destroy the
    # group while it holds the interpreter's lock, and wait for a thread that needs the lock: a deadlock.
    gc.collect()
    try:
        dist.barrier()
    except RuntimeError as error:
        # gloo fails also where a faster rank has gone after the last message of the barrier, before this rank has
        # looked at it. One that failed before it came here says so itself, and ends the job by its exit status.
        if not LEFT.search(str(error)):
            raise
    if id(dist.group.WORLD) in _OWN:
        _OWN.clear()
        dist.destroy_process_group()
    return True


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over ranks, on every rank, same shape and dtype; ``values`` is not changed."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def gather_rows(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the rows of all ranks in rank order; the same result on every rank.

    Each tensor has shape ``(n_r, …)`` on rank r, where n_r may be 0, and ``(sum of n_r, …)`` in the result; dtypes
    are kept. Needs one collective for all lengths, and one per tensor, padded to the longest n_r.
    """
    if not outputs:
        return {}
    names = sorted(outputs)
    mine = torch.tensor([len(outputs[name]) for name in names], device=outputs[names[0]].device)
    lengths = _all_gather(mine)
    return {name: _gather(outputs[name], [int(row[i]) for row in lengths]) for i, name in enumerate(names)}


def _gather(rows: Tensor, lengths: list[int]) -> Tensor:
    longest = max(lengths)  # all_gather takes the same shape from every rank
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    if longest == 0:  # on every rank, so all of them leave out the collective
        return padded
    return torch.cat([part[:length] for part, length in zip(_all_gather(padded), lengths, strict=True)])


def _all_gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts
