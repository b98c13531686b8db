"""Lightning's Trainer with its defaults: it has no setting for a mean over the items of a step.

Only the sampler is the job's own, as its page on samplers allows: Lightning's
shuffles all training rows.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rival_jobs.common import Job, Order, collate, mean_loss, row_losses, serve
from torchdata.stateful_dataloader import StatefulDataLoader


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The job in Lightning's words."""

    def __init__(self, job: Job) -> None:
        """Hold the job's model."""
        super().__init__()
        self.job, self.model = job, job.model
        self.losses: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        """Return the mean loss of the micro-batch."""
        return mean_loss(self.model(batch["tokens"]), batch["labels"])

    def test_step(self, batch: Any, index: int) -> None:
        """Gather the losses of the rows of all ranks, in the order in which the
        sampler deals them out.
        """
        mine = row_losses(self.model(batch["tokens"]), batch["labels"])
        self.losses += self.all_gather(mine).reshape(-1, len(mine)).T.flatten().tolist()

    def configure_optimizers(self) -> Any:
        """Return the job's optimizer."""
        return self.job.optimizer()


def run(order: Order) -> None:
    """Train, and evaluate with ``test``."""
    lightning.seed_everything(0, workers=True)
    job = Job(order)
    settings: Any = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    settings |= {"devices": order.world, "strategy": "ddp"} if order.world > 1 else {"devices": 1}
    settings |= {"accumulate_grad_batches": order.accumulation}
    module = Module(job)
    saves = (
        [ModelCheckpoint(order.folder, "saved", every_n_train_steps=order.stop)]
        if order.stop
        else []
    )
    trainer = lightning.Trainer(
        max_steps=order.last,
        use_distributed_sampler=False,
        callbacks=saves,
        enable_checkpointing=bool(saves),
        **settings,
    )
    path = os.path.join(order.folder, "saved.ckpt")
    ranks: Any = {"num_replicas": order.world, "rank": int(os.environ.get("RANK", "0"))}
    sampler: Any = torch.utils.data.DistributedSampler(job.train, shuffle=order.shuffle, **ranks)
    loader = StatefulDataLoader(job.train, order.batch, sampler=sampler, collate_fn=collate)
    trainer.fit(module, loader, ckpt_path=path if order.resume else None)
    if order.evaluate:
        lightning.Trainer(enable_checkpointing=False, **settings).test(
            module, job.batches(job.evaluation), verbose=False
        )
    if trainer.is_global_zero:
        job.write(job.model, module.losses if order.evaluate else None)


if __name__ == "__main__":
    serve(run)
