"""A loss over the global batch: embed rows, gather the embeddings, and send gradients back.

Each micro-batch but the last is embedded twice from the same random state: first without gradients,
then with them. The last one is embedded once, so that a step of one micro-batch has no second pass.
This is GradCache (Gao et al. 2021).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

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
        run.tally.muted = micro.is_padding
        if len(micros) > 1:
            # The same in both passes, so that the second one computes the same embeddings.
            seed(run.world.device, (base_seed + number * FOR_SHARDS) & POSITIVE)
        masks = current_masks()
        masks_of_rows: AbstractContextManager[object] = nullcontext()
        if masks:
            masks_of_rows = masks.begin_rows(micro.indices, run.world.device, batch)
        with masks_of_rows, autocast:
            embeddings = task.losses.embed(run.model, on_device(run, batch))
        rows = len(next(iter(embeddings.values())))
        if rows != len(micro.indices):
            raise TaskError(
                f"task: embed() returned {rows} rows for {len(micro.indices)}; expected tensors"
                " (n, …)"
            )
        return embeddings

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
        # Its gradient by each embedding is the given one.
        shares = [(value * gradients[name][positions]).sum() for name, value in embeddings.items()]
        weight = 0.0 if micro.is_padding else float(run.loss_multiplier)
        total = sum(shares)
        assert isinstance(total, Tensor)  # embed() returned at least one
        hooks.backward(run, total * weight)

    with hooks.accumulate(run, not last):
        send_back(last_embeddings, last)
    del last_embeddings  # before others are embedded: they need the memory
    for number in range(last):
        with hooks.accumulate(run, number == last - 1):
            send_back(embed(number), number)
    return loss * (run.loss_multiplier / run.world.shards)


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
    # A number for each row of the step, since a mixture may have a row twice.
    first = run.world.shard << 32
    sizes = [len(micro.indices) for micro, _ in micros]
    serials = torch.arange(first, first + sum(sizes))
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
