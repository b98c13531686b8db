"""Check that ranks agree (law 8) and train on each row once; run actions that fail on all or none.

Ranks communicate by the strategy's own ``gather_outputs``, because a strategy need not use
torch.distributed.
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
    """Raise AgreementError if the backend's world, or its data shards, are not those started."""
    world = run.world
    report = [world.rank, world.shard, world.shards, world.is_shard_leader]
    mine = torch.tensor([report], device=world.device)
    reports = hooks.gather_outputs(run, {"world": mine})["world"].tolist()
    seen = [rank for rank, *_ in reports]
    wanted = rank_info.size
    if world.size != wanted or seen != list(range(wanted)):
        raise AgreementError(
            f"strategy {hooks.name!r}: {wanted} ranks were started but it reports a world of"
            f" {world.size} in which ranks {seen} answer; it fell back to fewer processes"
        )
    shards = wanted // run.capabilities.ranks_per_shard
    leaders = sorted(shard for _, shard, _, is_leader in reports if is_leader)
    are_in_range = all(0 <= shard < n == shards for _, shard, n, _ in reports)
    if leaders != list(range(shards)) or not are_in_range:
        raise AgreementError(
            f"strategy {hooks.name!r}: declares {run.capabilities.ranks_per_shard} ranks per data"
            f" shard, so {shards} data shards of {wanted} ranks, but its ranks report (rank, shard,"
            f" shards, is_shard_leader) {reports}"
        )


def check_agreed(run: Run, hooks: Hooks, **facts: object) -> None:
    """Raise AgreementError unless each of ``facts``, any JSON value, is the same on every rank.

    The message names the fact and the ranks that differ from rank 0. Every rank calls.
    """
    names = sorted(facts)
    digests = [_digest(facts[name]) for name in names]
    mine = torch.tensor([digests], device=run.world.device)
    digests_of_ranks = hooks.gather_outputs(run, {"facts": mine})["facts"].tolist()
    for column, name in enumerate(names):
        digest_of_main = digests_of_ranks[0][column]
        odd = [rank for rank, row in enumerate(digests_of_ranks) if row[column] != digest_of_main]
        if odd:
            value_here = f"; here (rank {run.world.rank}) it is {facts[name]!r}"[:200]
            raise AgreementError(
                f"ranks disagree on {name}: rank {', '.join(map(str, odd))} differs from rank"
                f" 0{value_here}"
            )


def agree_on_metrics(run: Run, hooks: Hooks, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return ``metrics``, a task's report, with the main rank's value of each number.

    So all ranks decide alike. Machines may round in different ways, so 1e-6 of a value may be
    between ranks; raises AgreementError, with both values, for more, and for metrics that a rank
    lacks. Every rank calls.
    """
    if run.world.size == 1:
        return metrics
    numbers = {}
    for name, value in sorted(metrics.items()):
        if type(value) in (int, float):  # no bool
            numbers[name] = float(value)
    check_agreed(run, hooks, **{"the names of the metrics": list(numbers)})
    values = torch.tensor([list(numbers.values())], dtype=torch.float64)
    # As int64 with the same bits: not all devices have float64.
    mine = {"metrics": values.view(torch.int64).to(run.world.device)}
    bits = hooks.gather_outputs(run, mine)["metrics"].cpu()
    gathered = bits.view(torch.float64)
    values_of_main = gathered[0].tolist()
    for rank, row in enumerate(gathered.tolist()):
        for name, expected, value in zip(numbers, values_of_main, row, strict=True):
            are_nan = math.isnan(expected) and math.isnan(value)
            if not are_nan and not math.isclose(expected, value, rel_tol=1e-6):
                raise AgreementError(
                    f"ranks disagree on the metric {name!r}: {expected} on rank 0, {value} on rank"
                    f" {rank}: a report may depend on the outputs and the data alone"
                )
    agreed = {
        name: type(metrics[name])(value)
        for name, value in zip(numbers, values_of_main, strict=True)
    }
    return metrics | agreed


def check_rows(
    run: Run, hooks: Hooks, batches: list[tuple[MicroBatch, Batch]], planned: np.ndarray
) -> None:
    """Raise AgreementError unless the ranks together train on each row as often as planned.

    ``batches`` are this rank's micro-batches of a step, ``planned`` the row numbers of its global
    batch, shape ``(rows,)``. Every rank calls.
    """
    no_rows = torch.empty(0, dtype=torch.long)
    parts = [torch.from_numpy(micro.indices) for micro, _ in batches if not micro.is_padding]
    own_rows = torch.cat([no_rows, *parts])
    _check_same_rows(run, hooks, own_rows)
    # Ranks of one data shard have the same rows: its leader alone counts them.
    mine = own_rows if run.world.is_shard_leader else no_rows
    gathered = hooks.gather_outputs(run, {"index": mine.to(run.world.device)})
    rows = gathered["index"].cpu().numpy()
    numbers = np.union1d(planned, rows)
    seen = np.bincount(np.searchsorted(numbers, rows), minlength=len(numbers))
    wanted = np.bincount(np.searchsorted(numbers, planned), minlength=len(numbers))
    twice = numbers[(seen > wanted) & (wanted > 0)]
    missing = numbers[seen < wanted]
    foreign = numbers[wanted == 0]
    if wrong := [*twice[:1], *missing[:1], *foreign[:1]]:
        raise AgreementError(
            f"strategy {hooks.name!r}: ranks do not share out the global batch: {len(twice)} rows"
            f" on several ranks, {len(missing)} on none, {len(foreign)} not of this step (first:"
            f" {wrong[0]})"
        )


def check_weights(run: Run, hooks: Hooks, step: int) -> None:
    """Raise AgreementError if replicated weights differ between ranks after optimizer ``step``.

    They differ if the loss bypasses ``model(...)``, because the backend then never sees the
    backward pass. Sharded weights are not compared, nor are those of a strategy that is exempt from
    law 2.
    """
    are_replicated = not run.capabilities.shards_parameters
    if run.world.size == 1 or not are_replicated or "gradient" in run.capabilities.exempt:
        return
    mine = torch.zeros(1, 0, dtype=torch.int64)
    if sums := [_sum_of(parameter.detach()) for parameter in run.module.parameters()]:
        # As int64 with the same bits: not all devices have float64.
        mine = torch.stack(sums).view(torch.int64)[None]
    gathered = hooks.gather_outputs(run, {"weights": mine.to(run.world.device)})
    sums_of_ranks = gathered["weights"].tolist()
    odd = [rank for rank, row in enumerate(sums_of_ranks) if row != sums_of_ranks[0]]
    if odd:
        raise AgreementError(
            f"strategy {hooks.name!r}: after step {step} rank {', '.join(map(str, odd))} has not"
            " rank 0's weights: gradients were not averaged, or forward writes weights; the task's"
            " loss must call model(...), not a part of it, and forward may only read weights"
        )


def share_buffers(run: Run, hooks: Hooks) -> None:
    """Give every rank the main rank's persistent buffers, in a run that trains.

    During training each rank updates its own buffers and does not use them. Sharing gives
    evaluations and checkpoints one meaning under every strategy: the running statistics of rank 0.
    """
    if run.optimizer is None or run.world.size == 1:
        return
    saved = run.module.state_dict(keep_vars=True)
    buffers = [buffer for name, buffer in run.module.named_buffers() if name in saved]
    if not buffers:
        return
    # As bytes: in any number format, large integers would be rounded and imaginary parts lost.
    mine = [_bytes(buffer) for buffer in buffers]
    lengths = [len(part) for part in mine]
    row = torch.cat(mine)[None]
    # The other ranks send no row, so the gathered rows are the main rank's.
    outputs = {"buffers": row if run.world.is_main else row[:0]}
    shared = hooks.gather_outputs(run, outputs)["buffers"][0]
    with torch.no_grad():
        for buffer, values in zip(buffers, torch.split(shared, lengths), strict=True):
            # A copy, since a view of the joined bytes may begin where no element of this dtype can.
            buffer.copy_(values.clone().view(buffer.dtype).view(buffer.shape))


def share_extra_state(run: Run, hooks: Hooks) -> None:
    """Give every rank the main rank's extra state, as ``share_buffers`` does; every rank calls."""
    if run.optimizer is None or run.world.size == 1 or not has_extra_state(run.module):
        return
    device = run.world.device
    encoded = extra_state(run.module)
    names = sorted(encoded)
    # The other ranks send nothing, so all that is gathered is the main rank's.
    parts = [encoded[name] for name in names] if run.world.is_main else []
    no_bytes = torch.empty(0, dtype=torch.uint8)
    sizes = [len(part) for part in parts]
    mine = {
        "sizes": torch.tensor(sizes, dtype=torch.long, device=device),
        "bytes": torch.cat([no_bytes, *parts]).to(device),
    }
    gathered = hooks.gather_outputs(run, mine)
    if not run.world.is_main:
        sizes_of_main = gathered["sizes"].cpu().tolist()
        parts_of_main = torch.split(gathered["bytes"].cpu(), sizes_of_main)
        load_extra_state(run.module, dict(zip(names, parts_of_main, strict=True)))


def _sum_of(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, fp64, on the CPU; of complex ones, that of both parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double().sum().cpu()


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's bytes, uint8, shape ``(bytes,)``."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).view(torch.uint8).clone()


def _check_same_rows(run: Run, hooks: Hooks, rows: Tensor) -> None:
    """Raise AgreementError if ranks of one data shard have other rows; every rank calls."""
    if run.world.shards == run.world.size:
        return
    report = [run.world.shard, _digest(rows.tolist())]
    mine = torch.tensor([report], device=run.world.device)
    reports = hooks.gather_outputs(run, {"rows": mine})["rows"].tolist()
    for shard in range(run.world.shards):
        ranks = []
        digests = set()
        for rank, (shard_of_rank, digest) in enumerate(reports):
            if shard_of_rank == shard:
                ranks.append(rank)
                digests.add(digest)
        if len(digests) > 1:
            raise AgreementError(
                f"strategy {hooks.name!r}: ranks {ranks} are data shard {shard} but have other rows"
            )


def broadcast_from_main(run: Run, hooks: Hooks, text: str) -> str:
    """Return the main rank's ``text`` on every rank; every rank calls."""
    encoded = list(text.encode()) if run.world.is_main else []
    mine = torch.tensor(encoded, dtype=torch.long, device=run.world.device)
    gathered = hooks.gather_outputs(run, {"text": mine})
    return bytes(gathered["text"].tolist()).decode()


def on_all_ranks(run: Run, hooks: Hooks, what: str, action: Callable[[], T] | None) -> T:
    """Run ``action`` on every rank that has one and return its result.

    If it fails on one rank, raise on all.

    A failure is an OSError, a CheckpointError or a TaskError. Raises TaskError or DamagedError as
    they are, and CheckpointError for the others, with the message of the first failed rank.
    ``what`` precedes the message of an OSError.
    """
    result = None
    failure = None
    try:
        result = action() if action else None
    except (OSError, CheckpointError, TaskError) as error:
        failure = error
    text = str(failure or "")
    if isinstance(failure, OSError):
        where = f"{failure.filename}: " if failure.filename else ""
        text = f"{what}: {where}{failure.strerror or failure}"
    encoded = text.encode()
    matches = [number for number, kind in enumerate(_KINDS) if isinstance(failure, kind)]
    number_of_kind = matches[0] if matches else -1
    report = {"size": [len(encoded)], "kind": [number_of_kind], "words": list(encoded)}
    mine = {}
    for name, numbers in report.items():
        mine[name] = torch.tensor(numbers, dtype=torch.long, device=run.world.device)
    gathered = hooks.gather_outputs(run, mine)
    kinds = gathered["kind"].tolist()
    for rank, size in enumerate(gathered["size"].tolist()):
        if size:
            # Earlier ranks sent no words, so those of the first failed rank come first.
            words = gathered["words"][:size].tolist()
            kind_of_failure = _KINDS[kinds[rank]]
            raise kind_of_failure(bytes(words).decode()) from failure
    # There was no failure, so this is what the action returned.
    return result  # type: ignore[return-value]


def _digest(fact: object) -> int:
    """Return 63 bits of a hash of any JSON value, which an int64 tensor can hold."""
    text = json.dumps(fact, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


_KINDS: tuple[type[DistcoreError], ...] = (DamagedError, TaskError, CheckpointError)
"""Exceptions of ``on_all_ranks``. Ranks send each other the index; other errors are the last."""
