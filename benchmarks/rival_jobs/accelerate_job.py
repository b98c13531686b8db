"""Accelerate, by its guides on gradient accumulation with samples of unlike size, on
metrics, and on checkpoints.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from rival_jobs.common import Job, Order, count, row_losses, serve, sum_of_losses


def run(order: Order) -> None:
    """Train, and evaluate with ``gather_for_metrics``."""
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=True, dataloader_config=settings, gradient_accumulation_steps=order.accumulation
    )
    set_seed(0)
    job = Job(order)
    prepared: Any = accelerator.prepare(
        job.model,
        job.optimizer(),
        job.batches(job.train, order.shuffle),
        job.batches(job.evaluation),
    )
    model, optimizer, train, evaluation = prepared
    step = 0
    if order.resume:
        accelerator.load_state(order.folder)
        step = int(Path(order.folder, "step").read_text())
    while step < order.last:
        epoch, done = divmod(step, order.per_epoch)
        train.set_epoch(epoch)
        rest = iter(
            accelerator.skip_first_batches(train, done * order.accumulation) if done else train
        )
        while (samples := list(islice(rest, order.accumulation))) and step < order.last:
            _step(accelerator, model, optimizer, samples, order)
            step += 1
    if order.stop:
        accelerator.save_state(order.folder)
        if accelerator.is_main_process:
            Path(order.folder, "step").write_text(str(step))
        accelerator.wait_for_everyone()
    losses: list[float] = []
    model.eval()
    for batch in evaluation if order.evaluate else ():
        with torch.no_grad():
            mine = row_losses(model(batch["tokens"]), batch["labels"])
        losses += accelerator.gather_for_metrics(mine).tolist()
    if accelerator.is_main_process:
        job.write(accelerator.unwrap_model(model), losses)


def _step(accelerator: Any, model: Any, optimizer: Any, samples: list[Any], order: Order) -> None:
    """One optimizer step, as the guide writes it."""
    items = accelerator.gather(sum(count(batch["labels"]) for batch in samples)).sum().item()
    for index, batch in enumerate(samples):
        waits = index < len(samples) - 1 and accelerator.num_processes > 1
        with model.no_sync() if waits else nullcontext():
            loss = sum_of_losses(model(batch["tokens"]), batch["labels"])
            accelerator.backward(loss * order.accumulation * accelerator.num_processes / items)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    serve(run)
