"""Fabric, by its guides on gradient accumulation, on data loaders, and on checkpoints."""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from rival_jobs.common import Job, Order, mean_loss, row_losses, serve


def run(order: Order) -> None:
    """Train, and evaluate with ``all_gather``."""
    fabric = Fabric(
        accelerator="cpu", devices=order.world, strategy="ddp" if order.world > 1 else "auto"
    )
    fabric.launch()
    seed_everything(0, workers=True)
    job = Job(order)
    model, optimizer = fabric.setup(job.model, job.optimizer())
    train, evaluation = fabric.setup_dataloaders(
        job.batches(job.train, order.shuffle), job.batches(job.evaluation)
    )
    path, state = (
        os.path.join(order.folder, "last.ckpt"),
        {"model": model, "optimizer": optimizer, "step": 0},
    )
    if order.resume:
        fabric.load(path, state)
    while state["step"] < order.last:
        epoch, done = divmod(state["step"], order.per_epoch)
        if hasattr(train.sampler, "set_epoch"):
            train.sampler.set_epoch(epoch)
        rest = islice(train, done * order.accumulation, None)
        while (samples := list(islice(rest, order.accumulation))) and state["step"] < order.last:
            _step(fabric, model, optimizer, samples)
            state["step"] += 1
    if order.stop:
        fabric.save(path, state)
    losses: list[float] = []
    model.eval()
    for batch in evaluation if order.evaluate else ():
        with torch.no_grad():
            mine = row_losses(model(batch["tokens"]), batch["labels"])
        losses += fabric.all_gather(mine).reshape(-1, len(mine)).T.flatten().tolist()
    if fabric.is_global_zero:
        job.write(job.model, losses)


def _step(fabric: Any, model: Any, optimizer: Any, samples: list[Any]) -> None:
    for index, batch in enumerate(samples):
        with fabric.no_backward_sync(model, enabled=index < len(samples) - 1):
            loss = mean_loss(model(batch["tokens"]), batch["labels"])
            fabric.backward(loss / len(samples))
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    serve(run)
