"""Check that ranks agree (law 8) and train on each row once; run actions that fail on
all ranks or none.

Ranks communicate by the strategy's own ``gather_outputs``, because a strategy
need not use torch.distributed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from distcore.errors import AgreementError, CheckpointError, DamagedError, DistcoreError, TaskError
from distcore.plugin.strategy.contract import MicroBatch, RankInfo, Run
from distcore.plugin.strategy.extra_state import extra_state, has_extra_state, load_extra_state
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import Batch

T = TypeVar("T")


def check_world(run: Run, hooks: Hooks, rank_info: RankInfo) -> None:
    """Raise AgreementError if the backend's world is another than was started, or
    its data shards are.
    """
    world = run.world
    mine = torch.tensor(
        [[world.rank, world.shard, world.shards, world.is_shard_leader]], device=world.device
    )
    told = hooks.gather_outputs(run, {"world": mine})["world"].tolist()
    seen, wanted = [rank for rank, *_ in told], rank_info.size
    if world.size != wanted or seen != list(range(wanted)):
        raise AgreementError(
            f"strategy {hooks.name!r}: {wanted} ranks were started but it reports a world of"
            f" {world.size} in which ranks {seen} answer; it fell back to fewer processes"
        )
    shards = wanted // run.capabilities.ranks_per_shard
    leaders = sorted(shard for _, shard, _, is_leader in told if is_leader)
    if leaders != list(range(shards)) or any(
        not 0 <= shard < n == shards for _, shard, n, _ in told
    ):
        raise AgreementError(
            f"strategy {hooks.name!r}: declares {run.capabilities.ranks_per_shard} ranks per data"
            f" shard, so {shards} data shards of {wanted} ranks, but its ranks report (rank, shard,"
            f" shards, is_shard_leader) {told}"
        )


def check_agreed(run: Run, hooks: Hooks, **facts: object) -> None:
    """Raise AgreementError unless each of ``facts``, any JSON value, is the same on every rank.

    The message names the fact and the ranks that differ from rank 0. Every rank calls.
    """
    names = sorted(facts)
    digests = torch.tensor([[_digest(facts[name]) for name in names]], device=run.world.device)
    gathered = hooks.gather_outputs(run, {"facts": digests})["facts"].cpu()
    for column, name in enumerate(names):
        odd = [rank for rank, row in enumerate(gathered) if row[column] != gathered[0][column]]
        if odd:
            mine = f"; here (rank {run.world.rank}) it is {facts[name]!r}"[:200]
            raise AgreementError(
                f"ranks disagree on {name}: rank {', '.join(map(str, odd))} differs from rank"
                f" 0{mine}"
            )


def agree_on_metrics(run: Run, hooks: Hooks, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return ``metrics``, a task's report, with the main rank's value of each number, so that
    all ranks decide alike.

    Machines may round in different ways, so 1e-6 of a value may be between ranks; raises
    AgreementError, with both values, for more, and for metrics that a rank lacks. Every rank calls.
    """
    if run.world.size == 1:
        return metrics
    numbers = {
        name: float(value) for name, value in sorted(metrics.items()) if type(value) in (int, float)
    }
    check_agreed(run, hooks, **{"the names of the metrics": list(numbers)})
    # not all devices have float64
    mine = torch.tensor([list(numbers.values())], dtype=torch.float64).view(torch.int64)
    gathered = (
        hooks.gather_outputs(run, {"metrics": mine.to(run.world.device)})["metrics"]
        .cpu()
        .view(torch.float64)
    )
    for rank, values in enumerate(gathered):
        for name, ours, theirs in zip(numbers, gathered[0].tolist(), values.tolist(), strict=True):
            if not math.isclose(ours, theirs, rel_tol=1e-6) and not (
                math.isnan(ours) and math.isnan(theirs)
            ):
                raise AgreementError(
                    f"ranks disagree on the metric {name!r}: {ours} on rank 0, {theirs} on rank"
                    f" {rank}: a report may depend on the outputs and the data alone"
                )
    return metrics | {
        name: type(metrics[name])(value)
        for name, value in zip(numbers, gathered[0].tolist(), strict=True)
    }


def check_rows(
    run: Run, hooks: Hooks, batches: list[tuple[MicroBatch, Batch]], planned: np.ndarray
) -> None:
    """Raise AgreementError unless the ranks together train on each of the ``planned`` rows
    as often as planned.

    ``batches`` are this rank's micro-batches of a step, ``planned`` the row numbers of its global
    batch, shape ``(rows,)``. Every rank calls.
    """
    mine = [torch.from_numpy(micro.indices) for micro, _ in batches if not micro.is_padding]
    mine = mine or [torch.empty(0, dtype=torch.long)]
    _check_same_rows(run, hooks, torch.cat(mine))
    if not run.world.is_shard_leader:
        mine = [torch.empty(0, dtype=torch.long)]
    rows = (
        hooks.gather_outputs(run, {"index": torch.cat(mine).to(run.world.device)})["index"]
        .cpu()
        .numpy()
    )
    numbers = np.union1d(planned, rows)
    seen, wanted = (
        np.bincount(np.searchsorted(numbers, some), minlength=len(numbers))
        for some in (rows, planned)
    )
    twice, missing, foreign = (
        numbers[(seen > wanted) & (wanted > 0)],
        numbers[seen < wanted],
        numbers[wanted == 0],
    )
    if wrong := [*twice[:1], *missing[:1], *foreign[:1]]:
        raise AgreementError(
            f"strategy {hooks.name!r}: ranks do not share out the global batch: {len(twice)} rows"
            f" on several ranks, {len(missing)} on none, {len(foreign)} not of this step (first:"
            f" {wrong[0]})"
        )


def check_weights(run: Run, hooks: Hooks, step: int) -> None:
    """Raise AgreementError if replicated weights differ between ranks
    after optimizer step ``step``.

    They differ if the loss bypasses ``model(...)``, because the backend then never sees the
    backward pass. Sharded weights are not compared, nor are those of a strategy that is exempt from
    law 2.
    """
    if (
        run.world.size == 1
        or run.capabilities.shards_parameters
        or "gradient" in run.capabilities.exempt
    ):
        return
    sums = [_sum_of(parameter.detach()) for parameter in run.module.parameters()]
    mine = (
        torch.stack(sums).view(torch.int64)[None] if sums else torch.zeros(1, 0, dtype=torch.int64)
    )
    told = hooks.gather_outputs(run, {"weights": mine.to(run.world.device)})["weights"].cpu()
    odd = [rank for rank, row in enumerate(told) if not torch.equal(row, told[0])]
    if odd:
        raise AgreementError(
            f"strategy {hooks.name!r}: after step {step} rank {', '.join(map(str, odd))} has not"
            " rank 0's weights: gradients were not averaged, or forward writes weights; the task's"
            " loss must call model(...), not a part of it, and forward may only read weights"
        )


def share_buffers(run: Run, hooks: Hooks) -> None:
    """Give every rank the main rank's persistent buffers, such as running statistics,
    in a run that trains.

    During training each rank updates its own buffers and does not use them. Sharing
    gives evaluations and checkpoints
    one meaning under every strategy: the running statistics of rank 0.
    """
    if run.optimizer is None or run.world.size == 1:
        return
    saved = run.module.state_dict(keep_vars=True)
    buffers = [buffer for name, buffer in run.module.named_buffers() if name in saved]
    if not buffers:
        return
    # As bytes: in any number format, large integers would be rounded and imaginary parts lost.
    mine = [_bytes(buffer) for buffer in buffers]
    flat = torch.cat(mine)[None]
    told = hooks.gather_outputs(run, {"buffers": flat if run.world.is_main else flat[:0]})[
        "buffers"
    ][0]
    with torch.no_grad():
        for buffer, values in zip(
            buffers, torch.split(told, [len(part) for part in mine]), strict=True
        ):
            # A copy, since a view of the joined bytes may begin where no element of this dtype can.
            buffer.copy_(values.clone().view(buffer.dtype).view(buffer.shape))


def share_extra_state(run: Run, hooks: Hooks) -> None:
    """Give every rank the main rank's extra state, as ``share_buffers`` does with
    buffers; every rank calls.
    """
    if run.optimizer is None or run.world.size == 1 or not has_extra_state(run.module):
        return
    encoded = extra_state(run.module)
    parts = [encoded[name] for name in sorted(encoded)] if run.world.is_main else []
    mine = {
        "sizes": torch.tensor(
            [len(part) for part in parts], dtype=torch.long, device=run.world.device
        ),
        "bytes": torch.cat([torch.empty(0, dtype=torch.uint8), *parts]).to(run.world.device),
    }
    told = {name: values.cpu() for name, values in hooks.gather_outputs(run, mine).items()}
    shared = dict(
        zip(sorted(encoded), torch.split(told["bytes"], told["sizes"].tolist()), strict=True)
    )
    if not run.world.is_main:
        load_extra_state(run.module, shared)


def _sum_of(tensor: Tensor) -> Tensor:
    """Return the sum of all elements on the CPU, an fp64 scalar; of complex ones,
    that of both parts.
    """
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().sum().cpu()


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's bytes, uint8, shape ``(bytes,)``."""
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .clone()
    )


def _check_same_rows(run: Run, hooks: Hooks, rows: Tensor) -> None:
    if run.world.shards == run.world.size:
        return
    mine = torch.tensor([[run.world.shard, _digest(rows.tolist())]], device=run.world.device)
    told = hooks.gather_outputs(run, {"rows": mine})["rows"].tolist()
    for shard in range(run.world.shards):
        if len({digest for other, digest in told if other == shard}) > 1:
            ranks = [rank for rank, (other, _) in enumerate(told) if other == shard]
            raise AgreementError(
                f"strategy {hooks.name!r}: ranks {ranks} are data shard {shard} but have other rows"
            )


def broadcast_from_main(run: Run, hooks: Hooks, text: str) -> str:
    """Return the main rank's ``text`` on every rank; every rank calls."""
    mine = list(text.encode()) if run.world.is_main else []
    gathered = hooks.gather_outputs(
        run, {"text": torch.tensor(mine, dtype=torch.long, device=run.world.device)}
    )
    return bytes(gathered["text"].tolist()).decode()


def on_all_ranks(run: Run, hooks: Hooks, what: str, action: Callable[[], T] | None) -> T:
    """Run ``action`` on every rank that has one and return its result; if it fails on one
    rank, raise on all.

    A failure is an OSError, a CheckpointError or a TaskError. Raises TaskError or DamagedError as
    they are, and CheckpointError for the others, with the message of the first failed rank.
    ``what`` precedes the message of an OSError.
    """
    result, failure = None, None
    try:
        result = action() if action else None
    except (OSError, CheckpointError, TaskError) as error:
        failure = error
    text = str(failure or "")
    if isinstance(failure, OSError):
        where = f"{failure.filename}: " if failure.filename else ""
        text = f"{what}: {where}{failure.strerror or failure}"
    words = text.encode()
    kind = next((number for number, kind in enumerate(_KINDS) if isinstance(failure, kind)), -1)
    mine = {"size": [len(words)], "kind": [kind], "words": list(words)}
    tensors = {
        name: torch.tensor(part, dtype=torch.long, device=run.world.device)
        for name, part in mine.items()
    }
    gathered = {name: part.tolist() for name, part in hooks.gather_outputs(run, tensors).items()}
    if any(sizes := gathered["size"]):
        first = next(rank for rank, size in enumerate(sizes) if size)
        message = bytes(gathered["words"][: sizes[first]]).decode()
        raise _KINDS[gathered["kind"][first]](message) from failure
    # there was no failure, so this is what action returned
    return result  # type: ignore[return-value]


def _digest(fact: object) -> int:
    text = json.dumps(fact, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


_KINDS: tuple[type[DistcoreError], ...] = (DamagedError, TaskError, CheckpointError)
"""Exceptions of ``on_all_ranks``; ranks send each other the index in this tuple, the last
one's for all others.
"""
