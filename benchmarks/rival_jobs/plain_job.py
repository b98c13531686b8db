"""The reference: one process, with the whole global batch at once."""

from __future__ import annotations

import torch
from rival_jobs.common import Job, Order, collate, mean_loss, row_losses, serve


def run(order: Order) -> None:
    """Train on the rows in order."""
    job = Job(order)
    optimizer, size = job.optimizer(), order.batch * order.accumulation * order.world
    for step in range(order.steps):
        first = step % order.per_epoch * size
        batch = collate([job.train[row] for row in range(first, min(first + size, order.rows))])
        mean_loss(job.model(batch["tokens"]), batch["labels"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    batch = collate([job.evaluation[row] for row in range(len(job.evaluation))])
    job.model.eval()
    with torch.no_grad():
        job.write(job.model, row_losses(job.model(batch["tokens"]), batch["labels"]))


if __name__ == "__main__":
    serve(run)
