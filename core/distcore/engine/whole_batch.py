"""A loss over the global batch: embed rows, gather the embeddings, and send
each row's gradient back.

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
    """Run forward and backward over the micro-batches of one step; return this rank's
    share of the loss.

    Replaces the loop's ``train_step``, which handles a loss that is a sum over rows. ``batch_loss``
    gets rows in ascending order, for any number of ranks.
    """
    base_seed = torch.initial_seed()  # the seed of this step and data shard

    def embed(number: int) -> dict[str, Tensor]:
        micro, batch = micros[number]
        run.tally.muted = micro.is_padding
        if len(micros) > 1:
            # the same in both passes
            seed(run.world.device, (base_seed + number * 0x94D049BB133111EB) & (2**63 - 1))
        masks = current_masks()
        by_row = (
            masks.begin_rows(micro.indices, run.world.device, batch) if masks else nullcontext()
        )
        with by_row, autocast:
            embeddings = task.losses.embed(run.model, on_device(run, batch))
        if (rows := len(next(iter(embeddings.values())))) != len(micro.indices):
            raise TaskError(
                f"task: embed() returned {rows} rows for {len(micro.indices)}; expected tensors"
                " (n, …)"
            )
        return embeddings

    last = len(micros) - 1
    with torch.no_grad():
        embedded = [embed(number) for number in range(last)]
    with hooks.accumulate(run, not last):
        kept = embed(last)
    places, gradients, loss = _gradients(run, hooks, task, [*embedded, kept], micros)

    def send_back(embeddings: dict[str, Tensor], number: int) -> None:
        micro, at = micros[number][0], places[number]
        share = sum((value * gradients[name][at]).sum() for name, value in embeddings.items())
        assert isinstance(share, Tensor)  # embed() returned at least one
        hooks.backward(run, share * (0.0 if micro.is_padding else float(run.loss_multiplier)))

    with hooks.accumulate(run, not last):
        send_back(kept, last)
    del kept
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
    mine = {name: torch.cat([each[name].detach() for each in embedded]) for name in embedded[0]}
    # A number for each row of the step, since a mixture may have a row twice.
    first = run.world.shard << 32
    sizes = [len(micro.indices) for micro, _ in micros]
    serials = torch.arange(first, first + sum(sizes))
    counts = torch.tensor([not micro.is_padding for micro, _ in micros]).repeat_interleave(
        torch.tensor(sizes)
    )
    counts &= run.world.is_shard_leader
    indices = torch.as_tensor(np.concatenate([micro.indices for micro, _ in micros]))
    mine |= {INDEX: indices.to(run.world.device), SERIAL: serials.to(run.world.device)}
    gathered = hooks.gather_outputs(
        run, {name: value[counts.to(value.device)] for name, value in mine.items()}
    )
    numbers, order = gathered.pop(SERIAL).sort()  # the same order on every rank
    rows, by_row = gathered.pop(INDEX)[order].sort(stable=True)
    leaves = {name: value[order][by_row].requires_grad_() for name, value in gathered.items()}
    run.tally.muted = False
    loss = task.losses.batch_loss(leaves, rows, run.log)
    given = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    # Rows of a padding micro-batch are not there: any place serves, because their share of the
    # loss is 0.
    at = torch.searchsorted(numbers, serials.to(numbers.device)).clamp(max=len(numbers) - 1)
    return (
        list(torch.split(by_row.argsort()[at], sizes)),
        dict(zip(leaves, given, strict=True)),
        loss.detach(),
    )
