"""torch.distributed for strategies that stand on its process group: join, sum, gather rows of unequal numbers."""

from __future__ import annotations

import gc
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]  # not re-exported

from distcore.config import RunConfig
from distcore.distributed.devices import device_of
from distcore.plugin.contract import LOOPBACK, RankInfo, World


def join_process_group(config: RunConfig, rank_info: RankInfo, *, main_memory: bool = False) -> World:
    """Join the default process group (gloo on the CPU, nccl on GPUs) and return the world that it reports.

    ``main_memory``: ranks on GPUs send tensors that are in main memory, too, over gloo. Reads the addresses that the
    launcher exported; a process alone needs none.
    """
    if dist.is_initialized():  # left by a run in this process that failed
        dist.destroy_process_group()
    device = device_of(config, rank_info)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if main_memory and backend == "nccl" else backend,
        rank=rank_info.rank,
        world_size=rank_info.size,
        store=_store(rank_info),
        timeout=timedelta(seconds=config.timeout),
        device_id=device if backend == "nccl" else None,
    )
    return World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=rank_info.local_rank, device=device)


def open_store(rank_info: RankInfo) -> Store:
    """Return the store that the launcher gave the ranks, or that rank 0 hosts here while it holds the answer.

    For backends that meet without a process group; reads the addresses that the launcher exported.
    """
    return _store(rank_info) or next(rendezvous("env://", rank_info.rank, rank_info.size))[0]


def has_state_in_buffers(model: nn.Module) -> bool:
    """True if buffers of ``model`` are part of its state, such as running statistics, which ranks must share.

    Buffers that are not saved, such as position numbers, are the same on every rank for ever: sending them in every
    step would cost a collective for nothing.
    """
    return not model.state_dict().keys().isdisjoint(dict(model.named_buffers()))


def _store(rank_info: RankInfo) -> Store | None:
    """The store to meet at; ``None``: the launcher's own, or rank 0's by MASTER_ADDR and MASTER_PORT.

    torch's own server listens on all interfaces, so on one machine rank 0 hands it a loopback socket.
    """
    if rank_info.size == 1 and "MASTER_ADDR" not in os.environ:
        return HashStore()
    if os.environ.get("MASTER_ADDR") != LOOPBACK or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return None
    port = int(os.environ["MASTER_PORT"])
    if rank_info.rank:
        return TCPStore(LOOPBACK, port, rank_info.size, is_master=False)
    listener = socket.create_server((LOOPBACK, port))
    return TCPStore(LOOPBACK, port, rank_info.size, is_master=True, master_listen_fd=listener.detach())


def lay_out_gradients(wrapped: nn.Module, module: nn.Module) -> None:
    """Run a backward pass that counts for nothing through ``wrapped``: ``module``, its gradients averaged in buckets.

    torch moves gradients between its buckets once, after the first backward of a process. Above two ranks the order
    of a sum depends on the place: without this a resumed run rounds otherwise than one that was never interrupted.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    own = vars(module).get("forward")  # of the instance: wrappers put theirs there
    module.forward = lambda: torch.stack([parameter.sum() for parameter in trained]).sum()
    try:
        wrapped().backward()
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    module.zero_grad()


def leave_process_group(world: World) -> bool:
    """Leave the default process group, every rank having come so far.

    A wrapped model that is kept by nothing but a cycle goes first: later it would take the group along, and hold the
    interpreter's lock while it waits for a thread that wants the lock.
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return True


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over ranks, on every rank; ``values`` stays as it is."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def gather_rows(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the rows of all ranks in rank order, on every rank.

    Each tensor is ``(n_r, …)`` on rank r, n_r may be 0; the answer is ``(sum of n_r, …)``, dtypes kept. One
    collective for all lengths, one for each tensor, padded to the longest rank.
    """
    if not outputs:
        return {}
    names = sorted(outputs)
    mine = torch.tensor([len(outputs[name]) for name in names], device=outputs[names[0]].device)
    lengths = _all_gather(mine)
    return {name: _gather(outputs[name], [int(row[i]) for row in lengths]) for i, name in enumerate(names)}


def _gather(rows: Tensor, lengths: list[int]) -> Tensor:
    longest = max(lengths)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    if longest == 0:
        return padded
    return torch.cat([part[:length] for part, length in zip(_all_gather(padded), lengths, strict=True)])


def _all_gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts
