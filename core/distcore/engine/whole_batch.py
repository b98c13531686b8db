"""A loss over the global batch: embed rows, gather the embeddings, and send gradients back.

Each micro-batch but the last is embedded twice from the same random state: first without gradients,
then with them. The last one is embedded once, so that a step of one micro-batch has no second pass.
This is GradCache (Gao et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from distcore.distributed.devices import seed
from distcore.engine.loader import on_device
from distcore.engine.seeding import FOR_SHARDS, POSITIVE
from distcore.errors import TaskError
from distcore.model.row_dropout import current_masks
from distcore.plugin.strategy.contract import MicroBatch, Run, StepLoss
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.outputs import INDEX
from distcore.plugin.task.task import Batch

SERIAL = "distcore_serial"
"""Name beside the embeddings of a number that no other row of the step has."""


def train_whole_batch(
    hooks: Hooks,
    task: BoundTask,
    autocast: AbstractContextManager[object],
    run: Run,
    micros: list[tuple[MicroBatch, Batch]],
    _loss: StepLoss,
) -> Tensor:
    """Run forward and backward over the micro-batches of one step; return this rank's share.

    Replaces the loop's ``train_step``, which handles a loss that is a sum over rows. ``batch_loss``
    gets rows in ascending order, for any number of ranks.
    """
    base_seed = torch.initial_seed()  # the seed of this step and data shard

    def embed(number: int) -> dict[str, Tensor]:
        micro, batch = micros[number]
        if len(micros) > 1:
            # The same in both passes, so that the second one computes the same embeddings.
            seed(run.world.device, (base_seed + number * FOR_SHARDS) & POSITIVE)
        return _embeddings(run, task, autocast, run.model, micro, batch)

    last = len(micros) - 1
    with torch.no_grad():
        embedded = [embed(number) for number in range(last)]
    with hooks.accumulate(run, not last):
        last_embeddings = embed(last)
    positions_by_micro, gradients, loss = _gradients(
        run, hooks, task, [*embedded, last_embeddings], micros
    )

    def send_back(embeddings: dict[str, Tensor], number: int) -> None:
        micro, _ = micros[number]
        positions = positions_by_micro[number]
        weight = 0.0 if micro.is_padding else float(run.loss_multiplier)
        hooks.backward(run, _share(embeddings, gradients, positions) * weight)

    with hooks.accumulate(run, not last):
        send_back(last_embeddings, last)
    del last_embeddings  # before others are embedded: they need the memory
    for number in range(last):
        with hooks.accumulate(run, number == last - 1):
            send_back(embed(number), number)
    return loss * (run.loss_multiplier / run.world.shards)


def share_whole_batch(
    hooks: Hooks,
    task: BoundTask,
    autocast: AbstractContextManager[object],
    run: Run,
    micros: list[tuple[MicroBatch, Batch]],
    seed_block: Callable[[int], None],
) -> tuple[StepLoss, Tensor]:
    """Embed the blocks of a step under ``exact``; return what their shares are, and the loss.

    The gradient of a block's share is its part of the gradient of the loss over the global batch.
    ``seed_block`` seeds the random numbers of a block, by its number. Every rank has the loss.
    """
    embedded = []
    with torch.no_grad():
        for micro, batch in micros:
            seed_block(micro.block)
            embedded.append(_embeddings(run, task, autocast, run.module, micro, batch))
    positions_by_micro, gradients, loss = _gradients(run, hooks, task, embedded, micros)
    positions = {}
    for (micro, _), positions_of_micro in zip(micros, positions_by_micro, strict=True):
        positions[micro.block, micro.is_padding] = positions_of_micro

    def share(model: nn.Module, micro: MicroBatch, batch: Batch) -> Tensor:
        embeddings = _embeddings(run, task, autocast, model, micro, batch)
        total = _share(embeddings, gradients, positions[micro.block, micro.is_padding])
        return total * 0.0 if micro.is_padding else total

    return share, loss


def _embeddings(
    run: Run,
    task: BoundTask,
    autocast: AbstractContextManager[object],
    model: nn.Module,
    micro: MicroBatch,
    batch: Batch,
) -> dict[str, Tensor]:
    """Return the embeddings of a micro-batch, ``(n, …)``; raises TaskError for other rows."""
    run.tally.muted = micro.is_padding
    masks = current_masks()
    masks_of_rows: AbstractContextManager[object] = nullcontext()
    if masks:
        masks_of_rows = masks.begin_rows(micro.indices, run.world.device, batch)
    with masks_of_rows, autocast:
        embeddings = task.losses.embed(model, on_device(run, batch))
    rows = len(next(iter(embeddings.values())))
    if rows != len(micro.indices):
        raise TaskError(
            f"task: embed() returned {rows} rows for {len(micro.indices)}; expected tensors (n, …)"
        )
    return embeddings


def _share(
    embeddings: dict[str, Tensor], gradients: dict[str, Tensor], positions: Tensor
) -> Tensor:
    """Return a scalar whose gradient by each embedding is the one in ``gradients``."""
    shares = [(value * gradients[name][positions]).sum() for name, value in embeddings.items()]
    total = sum(shares)
    assert isinstance(total, Tensor)  # embed() returned at least one
    return total


def _gradients(
    run: Run,
    hooks: Hooks,
    task: BoundTask,
    embedded: list[dict[str, Tensor]],
    micros: list[tuple[MicroBatch, Batch]],
) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Return where this rank's rows are, the gradients of all rows' embeddings, and the loss.

    The first has the positions of each micro-batch's rows in the gradients, int64 ``(n,)``.
    """
    device = run.world.device
    mine = {}
    for name in embedded[0]:
        mine[name] = torch.cat([part[name].detach() for part in embedded])
    sizes = [len(micro.indices) for micro, _ in micros]
    serials = _serials(run, micros)
    indices = torch.as_tensor(np.concatenate([micro.indices for micro, _ in micros]))
    mine[INDEX] = indices.to(device)
    mine[SERIAL] = serials.to(device)
    # Each row once: no padding, and the leader alone of the ranks that share it.
    is_row = torch.tensor([not micro.is_padding for micro, _ in micros])
    is_sent = is_row.repeat_interleave(torch.tensor(sizes)) & run.world.is_shard_leader
    sent = {}
    for name, value in mine.items():
        sent[name] = value[is_sent.to(value.device)]
    gathered = hooks.gather_outputs(run, sent)
    numbers, order = gathered.pop(SERIAL).sort()  # the same order on every rank
    rows, by_row = gathered.pop(INDEX)[order].sort(stable=True)
    leaves = {}
    for name, value in gathered.items():
        leaves[name] = value[order][by_row].requires_grad_()
    run.tally.muted = False
    loss = task.losses.batch_loss(leaves, rows, run.log)
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    # Rows of a padding micro-batch are not there: any position serves, because their share of the
    # loss is 0.
    at = torch.searchsorted(numbers, serials.to(numbers.device))
    at = at.clamp(max=len(numbers) - 1)
    positions_by_micro = list(torch.split(by_row.argsort()[at], sizes))
    return positions_by_micro, dict(zip(leaves, gradients, strict=True)), loss.detach()


def _serials(run: Run, micros: list[tuple[MicroBatch, Batch]]) -> Tensor:
    """Return a number for each row of this rank, int64, which no other row of the step has.

    A mixture may have a row twice. Under ``exact`` the two are then in the order of their blocks.
    """
    if run.config.exact is None:
        first = run.world.shard << 32
        return torch.arange(first, first + sum(len(micro.indices) for micro, _ in micros))
    serials = []
    for micro, _ in micros:
        first = micro.block << 32
        serials.append(torch.arange(first, first + len(micro.indices)))
    return torch.cat(serials)
